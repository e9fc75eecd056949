// --json of the commands that move files and start programs.

#include <gmock/gmock.h>

#include <fstream>

#include "tests/cli/shoal_program.h"

namespace shoal::test::json_test {
namespace {

using nlohmann::json;

json json_of(std::vector<std::string> line) {
  line.insert(line.end(), {"--json", "-"});
  const auto ended = shoal(line);
  EXPECT_EQ(ended.code, 0) << ended.output;
  return json::parse(ended.output, nullptr, /*allow_exceptions=*/false);
}

TEST(Json, of_checkpoints_traces_and_flights) {
  const TempFolder folder;
  const auto file = [&](const char* name) { return folder.file(name); };
  ASSERT_EQ(shoal({"train", "--data", "reference", "--model", "mlp", "--steps", "3", "--ranks", "2", "--save",
                   file("run"), "--trace", file("traces"), "--flight-recorder", file("flights")})
                .code,
            0);
  const auto verified = json_of({"checkpoint", "verify", file("run")});
  EXPECT_GT(verified["bytes"], 0);
  EXPECT_EQ(verified["unchecked_bytes"], 0);
  const auto tensors = json_of({"checkpoint", "inspect", file("run")})["tensors"];
  EXPECT_EQ(verified["tensors"], tensors.size());
  EXPECT_EQ(json_of({"checkpoint", "reshard", file("run"), file("other"), "--ranks", "3"})["ranks"], 3);
  EXPECT_EQ(json_of({"checkpoint", "export", file("run"), file("model.pt")})["output"], file("model.pt"));
  // Nothing is written into the checkpoint that is read.
  const auto inside = json_of({"checkpoint", "verify", file("run")})["path"].get<std::string>();
  for (const auto& line :
       std::vector<std::vector<std::string>>{{"checkpoint", "inspect", file("run"), "--json", inside + "/index.json"},
                                             {"checkpoint", "export", file("run"), inside + "/model.safetensors"},
                                             {"checkpoint", "inspect", file("model.pt"), "--json", file("model.pt")}}) {
    const auto ended = shoal(line);
    EXPECT_EQ(ended.code, 1);
    EXPECT_NE(ended.output.find("the command reads"), std::string::npos) << ended.output;
  }
  EXPECT_EQ(json_of({"checkpoint", "verify", file("run")})["unchecked_bytes"], 0);
  const auto exported = json_of({"checkpoint", "inspect", file("model.pt")});
  EXPECT_EQ(exported["library"], "PyTorch");
  size_t of_model = 0;
  for (const auto& tensor : tensors) of_model += tensor["part"] == "model" ? 1 : 0;
  EXPECT_EQ(exported["tensors"].size(), of_model);
  const auto merged = json_of({"trace", "merge", file("traces"), "-o", file("job.json")});
  EXPECT_EQ(merged["ranks"], 2);
  EXPECT_EQ(merged["events"], read(file("job.json"))["traceEvents"].size());
  const auto flight = json_of({"flight", file("flights"), "--last", "2"});
  EXPECT_EQ(flight["ranks"].size(), 2U);
  EXPECT_EQ(flight["ranks"][1]["records"].size(), 2U);
  EXPECT_EQ(flight["ranks"][1]["state"], "left in order");
  EXPECT_FALSE(flight["verdict"].empty());
  EXPECT_EQ(shoal({"trace", "merge", file("traces"), "-o", "-", "--json", "-"}).code, 2);
  EXPECT_THAT(shoal({"trace", "merge", file("traces"), "-o", file("one"), "--json", file("one")}).output,
              testing::HasSubstr("give two files"));
  EXPECT_THAT(
      shoal({"trace", "merge", file("traces"), "-o", file("one"), "--json", file("traces") + "/rank-0.json"}).output,
      testing::HasSubstr("the command reads"));
  EXPECT_THAT(shoal({"flight", file("flights"), "--json", file("flights") + "/rank-0.flight"}).output,
              testing::HasSubstr("the command reads"));
  EXPECT_EQ(json_of({"flight", file("flights")})["ranks"].size(), 2U);
}

TEST(Json, of_launch_and_topologies) {
  const TempFolder folder;
  const auto report = folder.file("launch.json");
  EXPECT_EQ(shoal({"launch", "-n", "2", "--json", report, "--", "/bin/sh", "-c", "exit 7"}).code, 7);
  EXPECT_EQ(read(report)["exit_code"], 7);
  EXPECT_EQ(read(report)["ranks"], 2);
  bool has_ring = false;
  for (const auto& topology : json_of({"topology", "--list"})) has_ring = has_ring || topology["name"] == "ring";
  EXPECT_TRUE(has_ring);
}

}  // namespace
}  // namespace shoal::test::json_test
