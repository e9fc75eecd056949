// Checkpoints of Python libraries, converted by scripts/import_checkpoint.py and read here (BEY05).

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <filesystem>
#include <nlohmann/json.hpp>

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

TEST(Import, BEY05_checkpoints_of_python_libraries_keep_names_and_values) {
  if (test::run({PYTHON, "-c", "import safetensors"}, 100).code != 0) GTEST_SKIP() << "no safetensors in .venv";
  const test::TempFolder folder;
  const auto made = test::run({PYTHON, MAKE_FOREIGN, folder.path()}, 200);
  ASSERT_EQ(made.code, 0) << made.output;
  const auto expected = json::parse(made.output.substr(made.output.find("{\"dcp\"")));
  const auto convert = [&](const std::string& name, const std::string& out, std::vector<std::string> options = {}) {
    options.insert(options.begin(), {PYTHON, IMPORT_CHECKPOINT, folder.file(name), folder.file(out)});
    return test::run(options, 100);
  };
  for (const std::string name : {"dcp", "oss.pt", "megatron.pt"}) {
    SCOPED_TRACE(name);
    const auto ended = convert(name, "from " + name);
    ASSERT_EQ(ended.code, 0) << ended.output;
    expect_tensors(folder.path() / ("from " + name), expected.at(name));
  }
  EXPECT_EQ(read_json(folder.path() / "from dcp/other.json"),
            (json{{"scheduler.gamma", 0.5}, {"scheduler.milestones", {3, 4}}}));
  EXPECT_EQ(read_json(folder.path() / "from oss.pt/other.json")["param_groups"][0]["params"], (json{0, 1}));

  // In several files, under the module's own names; from there on a checkpoint like any other.
  const auto ended = convert("dcp", "model", {"--prefix", "model.", "--shard-gb", "0.000002"});
  ASSERT_EQ(ended.code, 0) << ended.output;
  json model;
  for (const auto& [name, about] : expected.at("dcp").items()) {
    if (name.starts_with("model.")) model[name.substr(6)] = about;
  }
  EXPECT_EQ(CheckpointReader(folder.path() / "model").index().files.size(), 2U);
  reshard(CheckpointReader(folder.path() / "model"), folder.path() / "run", 2);
  expect_tensors(folder.path() / "run", model);

  // Code in a file runs only on request.
  for (const std::string name : {"args", "args.pt"}) {
    const auto refused = convert(name, "from " + name);
    EXPECT_EQ(refused.code, 1);
    EXPECT_THAT(refused.output, HasSubstr("holds argparse.Namespace beside tensors"));
    EXPECT_FALSE(fs::exists(folder.path() / ("from " + name)));
  }
  EXPECT_THAT(convert("args.pt", "trusted", {"--trust"}).output, HasSubstr("left out: args (Namespace)"));
  expect_tensors(folder.path() / "trusted", expected.at("args.pt"));
  for (const std::string size : {"0", "-1", "nan"}) {
    EXPECT_THAT(convert("dcp", "x", {"--shard-gb=" + size}).output, HasSubstr("give more than 0"));
  }
  EXPECT_THAT(convert("dcp", "model").output, HasSubstr("exists; give a new folder"));
  EXPECT_THAT(convert("nowhere", "x").output, HasSubstr("neither a file nor a folder"));
  EXPECT_THAT(convert("dcp", "x", {"--prefix", "y"}).output, HasSubstr("no tensor's name begins with y"));
  for (const auto& entry : fs::directory_iterator(folder.path())) {
    EXPECT_EQ(entry.path().string().find(".tmp-"), std::string::npos) << entry.path();
  }
}

}  // namespace
}  // namespace shoal::import_test
