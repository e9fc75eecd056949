// Checkpoints of Python libraries, converted by scripts/import_checkpoint.py and read here (BEY05).

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "base/input_file.h"
#include "checkpoint/format/crc32.h"
#include "checkpoint/loading/reader.h"
#include "checkpoint/loading/reshard.h"
#include "shoal/error.h"
#include "tests/support/processes.h"
#include "tests/support/temp_folder.h"

namespace shoal::import_test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::HasSubstr;

void expect_tensors(const fs::path& path, const json& expected) {
  const CheckpointReader reader(path);
  EXPECT_EQ(reader.index().tensors.size(), expected.size());
  for (const auto& [name, about] : expected.items()) {
    const auto tensor = reader.read(name);
    EXPECT_EQ(c10::toString(tensor.scalar_type()), about[0].get<std::string>()) << name;
    EXPECT_EQ(tensor.sizes().vec(), about[1].get<std::vector<int64_t>>()) << name;
    EXPECT_EQ(crc32(tensor.data_ptr(), tensor.nbytes()), about[2].get<uint32_t>()) << name;
  }
}

json read_json(const fs::path& path) {
  return json::parse(read_text(path, 1 << 20, refuse_as<UsageError>));
}

// Runs the tool once for each list of arguments, in one interpreter: importing PyTorch takes longer than a conversion.
std::vector<test::Ended> convert(const std::vector<std::vector<std::string>>& conversions) {
  const std::string driver = R"(
import contextlib, io, json, runpy, sys
for arguments in json.loads(sys.argv[2]):
    sys.argv = [sys.argv[0], *arguments]
    output, code = io.StringIO(), 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            runpy.run_path(")" IMPORT_CHECKPOINT R"(", run_name="__main__")
        except SystemExit as end:
            code = 0 if end.code is None else end.code if isinstance(end.code, int) else 1
            print("" if isinstance(end.code, int | None) else end.code)
    print("ENDED", json.dumps([code, output.getvalue()]))
)";
  const auto ran = test::run({PYTHON, "-c", driver, "", json(conversions).dump()}, 200);
  std::vector<test::Ended> ended;
  std::istringstream lines(ran.output);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("ENDED ")) continue;
    const auto one = json::parse(line.substr(6));
    ended.push_back({.code = one[0], .output = one[1]});
  }
  EXPECT_EQ(ran.code, 0) << ran.output;
  EXPECT_EQ(ended.size(), conversions.size()) << ran.output;
  ended.resize(conversions.size());
  return ended;
}

TEST(Import, BEY05_checkpoints_of_python_libraries_keep_names_and_values) {
  if (test::run({PYTHON, "-c", "import safetensors"}, 100).code != 0) GTEST_SKIP() << "no safetensors in .venv";
  const test::TempFolder folder;
  const auto made = test::run({PYTHON, MAKE_FOREIGN, folder.path()}, 200);
  ASSERT_EQ(made.code, 0) << made.output;
  const auto expected = json::parse(made.output.substr(made.output.find("{\"dcp\"")));
  const auto from = [&](const std::string& name, const std::string& out, std::vector<std::string> options = {}) {
    options.insert(options.begin(), {folder.file(name), folder.file(out)});
    return options;
  };
  const auto ended = convert(
      {from("dcp", "from dcp"), from("oss.pt", "from oss.pt"), from("megatron.pt", "from megatron.pt"),
       from("dcp", "model", {"--prefix", "model.", "--shard-gb", "0.000002"}), from("args", "from args"),
       from("args.pt", "from args.pt"), from("args.pt", "trusted", {"--trust"}), from("dcp", "x", {"--shard-gb=0"}),
       from("dcp", "x", {"--shard-gb=-1"}), from("dcp", "x", {"--shard-gb=nan"}), from("dcp", "model"),
       from("nowhere", "x"), from("dcp", "x", {"--prefix", "y"})});
  for (int i = 0; i < 4; ++i) ASSERT_EQ(ended[i].code, 0) << ended[i].output;
  for (const std::string name : {"dcp", "oss.pt", "megatron.pt"}) {
    SCOPED_TRACE(name);
    expect_tensors(folder.path() / ("from " + name), expected.at(name));
  }
  EXPECT_EQ(read_json(folder.path() / "from dcp/other.json"),
            (json{{"scheduler.gamma", 0.5}, {"scheduler.milestones", {3, 4}}}));
  EXPECT_EQ(read_json(folder.path() / "from oss.pt/other.json")["param_groups"][0]["params"], (json{0, 1}));

  // In several files, under the module's own names; from there on a checkpoint like any other.
  json model;
  for (const auto& [name, about] : expected.at("dcp").items()) {
    if (name.starts_with("model.")) model[name.substr(6)] = about;
  }
  EXPECT_EQ(CheckpointReader(folder.path() / "model").index().files.size(), 2U);
  reshard(CheckpointReader(folder.path() / "model"), folder.path() / "run", 2);
  expect_tensors(folder.path() / "run", model);

  // Code in a file runs only on request.
  for (int i = 4; i < 6; ++i) {
    EXPECT_EQ(ended[i].code, 1);
    EXPECT_THAT(ended[i].output, HasSubstr("holds argparse.Namespace beside tensors"));
  }
  for (const auto* name : {"from args", "from args.pt", "x"}) EXPECT_FALSE(fs::exists(folder.path() / name));
  EXPECT_THAT(ended[6].output, HasSubstr("left out: args (Namespace)"));
  expect_tensors(folder.path() / "trusted", expected.at("args.pt"));
  for (int i = 7; i < 10; ++i) EXPECT_THAT(ended[i].output, HasSubstr("give more than 0"));
  EXPECT_THAT(ended[10].output, HasSubstr("exists; give a new folder"));
  EXPECT_THAT(ended[11].output, HasSubstr("neither a file nor a folder"));
  EXPECT_THAT(ended[12].output, HasSubstr("no tensor's name begins with y"));
  for (int i = 7; i < 13; ++i) EXPECT_EQ(ended[i].code, 1);
  for (const auto& entry : fs::directory_iterator(folder.path())) {
    EXPECT_EQ(entry.path().string().find(".tmp-"), std::string::npos) << entry.path();
  }
}

}  // namespace
}  // namespace shoal::import_test
