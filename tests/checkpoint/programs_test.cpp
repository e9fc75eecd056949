// Checkpoints in other programs: Python, and `shoal checkpoint`.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "checkpoint/format/crc32.h"
#include "checkpoint/loading/reader.h"
#include "checkpoint/saving/saver.h"
#include "shoal/world.h"
#include "tests/checkpoint/tensors.h"
#include "tests/support/processes.h"
#include "tests/support/temp_folder.h"

namespace shoal::programs_test {
namespace {

using nlohmann::json;
using test::run;
using test::Whole;
using ::testing::HasSubstr;

uint32_t crc32_of(const at::Tensor& tensor) {
  return crc32(tensor.data_ptr(), tensor.nbytes());
}

// Saves a checkpoint of one rank; cut: tensors in several slices.
std::vector<Whole> save(const std::filesystem::path& root, bool cut) {
  static const auto world = init();  // once per process
  const auto wholes = test::random_wholes(3);
  CheckpointSaver(world.group(), root)
      .save({.step = 12,
             .strategy = "ddp",
             .slices = cut ? test::random_slices(wholes, 0, 1, 1) : test::whole_slices(wholes),
             .global_state = {{"scale", 8}}});
  return wholes;
}

TEST(Programs, BEY05_a_reader_written_from_the_document_finds_the_same_bytes) {
  const test::TempFolder folder;
  const auto wholes = save(folder.path() / "run", /*cut=*/true);
  const auto python = run({PYTHON3, READ_CHECKPOINT, folder.path() / "run/step-12"}, 60);
  ASSERT_EQ(python.code, 0) << python.output;
  const auto seen = json::parse(python.output);
  EXPECT_EQ(seen.size(), wholes.size());
  for (const auto& whole : wholes) {
    const auto& about = seen.at(whole.name);
    EXPECT_EQ(about[0], whole.part);
    EXPECT_EQ(about[2], json(whole.tensor.sizes().vec()));
    EXPECT_EQ(about[3], whole.order.empty() ? json() : json(whole.order));
    EXPECT_EQ(about[4], crc32_of(test::in_order(whole))) << whole.name;
  }
}

constexpr const char* open_in_python =
    "import sys, json, zlib, torch, safetensors.torch as s\n"
    "t = s.load_file(sys.argv[1])\n"
    "print(json.dumps({n: [str(v.dtype), list(v.shape), zlib.crc32(v.contiguous().reshape(-1).view(torch.uint8)"
    ".numpy().tobytes() if v.numel() else b'')] for n, v in t.items()}))";

void expect_python_opens(const std::string& file, const std::vector<Whole>& wholes, size_t count) {
  const auto python = run({PYTHON, "-c", open_in_python, file}, 100);
  ASSERT_EQ(python.code, 0) << python.output;
  const auto seen = json::parse(python.output);
  EXPECT_EQ(seen.size(), count);
  for (const auto& whole : wholes) {
    if (!seen.contains(whole.name)) continue;
    EXPECT_EQ(seen[whole.name][1], json(whole.tensor.sizes().vec()));
    EXPECT_EQ(seen[whole.name][2], crc32_of(whole.tensor)) << whole.name;
  }
}

TEST(Programs, BEY05_the_python_package_opens_model_and_export) {
  if (run({PYTHON, "-c", "import safetensors"}, 60).code != 0) GTEST_SKIP() << "no safetensors in .venv";
  const test::TempFolder folder;
  const auto wholes = save(folder.path() / "run", /*cut=*/false);
  const auto models = wholes.size() - 1;  // one is the optimizer's
  expect_python_opens(folder.path() / "run/step-12/model.safetensors", wholes, models);
  save(folder.path() / "cut", /*cut=*/true);
  const auto ended = run({SHOAL, "checkpoint", "export", folder.path() / "cut", folder.file("one.safetensors")}, 60);
  ASSERT_EQ(ended.code, 0) << ended.output;
  expect_python_opens(folder.file("one.safetensors"), wholes, models);
}

TEST(Programs, BEY05_reshard) {
  const test::TempFolder folder;
  save(folder.path() / "run", /*cut=*/true);
  const auto digests = [](const std::filesystem::path& path) {
    const auto python = run({PYTHON3, READ_CHECKPOINT, path}, 60);
    EXPECT_EQ(python.code, 0) << python.output;
    return json::parse(python.output);
  };
  const auto out = (folder.path() / "out").string();
  const std::vector<std::string> command{SHOAL, "checkpoint", "reshard", folder.path() / "run", out, "--ranks"};
  const auto reshard = [&](const char* ranks) {
    auto arguments = command;
    arguments.emplace_back(ranks);
    return run(arguments, 60);
  };
  EXPECT_EQ(reshard("0").code, 2);
  const auto ended = reshard("4");
  EXPECT_EQ(ended.code, 0) << ended.output;
  EXPECT_THAT(ended.output, HasSubstr("in the files of 4 ranks"));
  EXPECT_EQ(digests(folder.path() / "out/step-12"), digests(folder.path() / "run/step-12"));
  EXPECT_EQ(CheckpointReader(out).index().files.size(), 8U) << "model and optimizer";
  const auto again = reshard("3");
  EXPECT_EQ(again.code, 1);
  EXPECT_THAT(again.output, HasSubstr("reshard to a new folder"));
}

TEST(Programs, BEY05_inspect_verify_export) {
  const test::TempFolder folder;
  const auto wholes = save(folder.path() / "run", /*cut=*/true);
  const auto path = (folder.path() / "run").string();
  const auto shoal = [](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {SHOAL, "checkpoint"});
    return run(arguments, 60);
  };
  const auto inspected = shoal({"inspect", path});
  EXPECT_EQ(inspected.code, 0) << inspected.output;
  EXPECT_THAT(inspected.output, HasSubstr("ddp at 1 ranks, step 12"));
  EXPECT_THAT(inspected.output, HasSubstr("model: 13 tensors"));
  EXPECT_THAT(inspected.output, HasSubstr("optimizer: 1 tensors"));
  const auto json_text = shoal({"inspect", path, "--json", "-"});
  const auto report = json::parse(json_text.output);
  EXPECT_EQ(report["state"]["global"]["scale"], 8);
  EXPECT_EQ(report["tensors"].size(), wholes.size());
  EXPECT_THAT(shoal({"verify", path}).output, HasSubstr("intact: 14 tensors"));

  const auto exported = shoal({"export", path, folder.file("hf"), "--shard-gb", "0.000003"});
  EXPECT_EQ(exported.code, 0) << exported.output;
  const CheckpointReader sharded(folder.path() / "hf");
  EXPECT_GT(sharded.index().files.size(), 1U);
  EXPECT_EQ(sharded.index().tensors.size(), wholes.size() - 1);
  for (const auto& whole : wholes) {
    if (whole.part != "model") continue;
    EXPECT_TRUE(test::same_bytes(sharded.read(whole.name), whole.tensor)) << whole.name;
  }
  EXPECT_THAT(shoal({"export", path, folder.file("hf")}).output, HasSubstr("export to a new folder"));
  std::filesystem::create_directory(folder.path() / "transformers");
  std::ofstream(folder.path() / "transformers/config.json") << "{}";
  EXPECT_EQ(shoal({"export", path, folder.file("transformers")}).code, 0);
  EXPECT_THAT(shoal({"export", path, folder.file("nan"), "--shard-gb", "nan"}).output,
              HasSubstr("--shard-gb nan: give"));
  EXPECT_THAT(shoal({"verify", folder.file("hf")}).output, HasSubstr("without checksums"));

  const auto optimizer = shoal({"export", path, folder.file("o.safetensors"), "--part", "optimizer"});
  EXPECT_EQ(optimizer.code, 0) << optimizer.output;
  EXPECT_EQ(CheckpointReader(folder.file("o.safetensors")).index().tensors.size(), 1U);
  EXPECT_THAT(shoal({"export", path, folder.file("x"), "--part", "none"}).output, HasSubstr("no tensors of part none"));

  std::filesystem::resize_file(folder.path() / "run/step-12/model.safetensors", 5000);
  for (const auto* command : {"inspect", "verify"}) {
    const auto ended = shoal({command, path});
    EXPECT_EQ(ended.code, 1);
    EXPECT_THAT(ended.output, HasSubstr("model.safetensors has 5000 bytes; it was written with"));
  }
  EXPECT_EQ(shoal({"verify"}).code, 2);
  EXPECT_EQ(shoal({"inspect", folder.file("nowhere")}).code, 1);
}

TEST(Programs, tensors_of_a_dtype_that_libtorch_lacks_are_listed_and_not_called_intact) {
  const test::TempFolder folder;
  std::string header = R"({"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)";
  header += R"("a":{"dtype":"F4","shape":[2097152],"data_offsets":[4,1048580]}})";
  const uint64_t length = header.size();
  std::ofstream file(folder.file("f4.safetensors"), std::ios::binary);
  file.write(reinterpret_cast<const char*>(&length), sizeof length);
  file << header << std::string(1048580, '\0') << std::flush;
  const auto listed = run({SHOAL, "checkpoint", "inspect", folder.file("f4.safetensors")}, 20);
  EXPECT_THAT(listed.output, HasSubstr("model: 2 tensors, 1.000 MiB")) << listed.output;
  const auto verified = run({SHOAL, "checkpoint", "verify", folder.file("f4.safetensors")}, 20);
  EXPECT_EQ(verified.code, 0);
  EXPECT_THAT(verified.output, HasSubstr("intact: 1 tensors, 0.000 MiB"));
  EXPECT_THAT(verified.output, HasSubstr("; 1 more not read, as libtorch does not have their dtype\n"));
}

}  // namespace
}  // namespace shoal::programs_test
