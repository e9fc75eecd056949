// `shoal train --compress` (DDP11): communication, step by step.

#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>

#include "tests/cli/shoal_program.h"
#include "tests/support/temp_folder.h"

namespace shoal::test::compress_test {
namespace {

using nlohmann::json;

json train(const std::string& strategy, const std::string& compress) {
  const TempFolder folder;
  const auto ended = shoal({"train", "--data", "reference", "--model", "mlp", "--steps", "4", "--ranks", "2",
                            "--strategy", strategy, "--compress", compress, "--json", folder.file("report.json")});
  EXPECT_EQ(ended.code, 0) << strategy << ", " << compress << ": " << ended.output;
  if (ended.code != 0) return {};
  EXPECT_NE(ended.output.find("bytes in"), std::string::npos) << "says what it has sent: " << ended.output;
  return read(folder.file("report.json"));
}

double last_loss(const json& report) {
  return report["loss"].back().get<double>();
}

// Information that ranks share in a step: a flag per gradient, one for forwards and a weight, in float32.
double facts(const json& report) {
  return 4 * (static_cast<double>(report["params"].size()) + 2);
}

// Two thin factors for each matrix that becomes at least two times smaller, the rest uncompressed; in float32.
double factor_bytes(const json& report, double rank) {
  double elements = 0;
  for (const auto& parameter : report["params"]) {
    const auto shape = parameter["shape"].get<std::vector<double>>();
    const auto numel = std::accumulate(shape.begin(), shape.end(), 1.0, std::multiplies<>());
    const auto factors = (shape[0] + numel / shape[0]) * rank;
    elements += shape.size() > 1 && 2 * factors < numel ? factors : numel;
  }
  return 4 * elements;
}

TEST(Compress, DDP11_fewer_bytes_travel_in_each_step) {
  const auto plain = train("ddp", "none");
  ASSERT_FALSE(plain.is_null());
  EXPECT_EQ(plain["communication"]["step_bytes"].size(), 4U);
  const auto bytes = [](const json& report, int step) {
    return report["communication"]["step_bytes"][step].get<double>();
  };
  const auto share = [&](const std::string& compress, double tolerance) {
    const auto report = train("ddp", compress);
    if (report.is_null()) return 0.0;
    EXPECT_EQ(report["config"]["compress"], compress);
    EXPECT_EQ(report["config"]["lr"], report["lr"].back()) << "also where it is the default";
    EXPECT_NEAR(last_loss(report), last_loss(plain), tolerance * last_loss(plain)) << compress;
    return bytes(report, 3) / bytes(plain, 3);
  };
  // One bucket, which includes the flags and the weight unless it is compressed.
  const auto half = (bytes(plain, 3) - facts(plain)) / 2 + facts(plain);
  EXPECT_DOUBLE_EQ(share("bf16", 0.02), half / bytes(plain, 3));
  EXPECT_NEAR(share("int8", 0.05), 0.5, 0.02);  // two rounds of a quarter
  EXPECT_LT(share("topk:0.01", 0.5), 0.07);     // two ranks' 8 bytes for one of a hundred elements of 4
  const auto factors = train("ddp", "powersgd:2:2");
  EXPECT_NEAR(bytes(factors, 1), bytes(plain, 1), 0.01 * bytes(plain, 1)) << "before the start";
  EXPECT_EQ(bytes(factors, 3), factor_bytes(factors, 2) + facts(factors));
}

TEST(Compress, FSDP14_sharded_strategies_take_what_they_can) {
  for (const auto* strategy : {"zero2", "megatron", "fsdp"}) {
    const auto plain = train(strategy, "none");
    const auto half = train(strategy, "fp16");
    ASSERT_FALSE(plain.is_null() || half.is_null());
    EXPECT_LT(half["communication"]["bytes_per_step"], plain["communication"]["bytes_per_step"]) << strategy;
  }
  const auto ended = shoal({"train", "--data", "reference", "--model", "mlp", "--steps", "2", "--ranks", "2",
                            "--strategy", "zero2", "--compress", "powersgd:2"});
  EXPECT_EQ(ended.code, 2) << ended.output;
  EXPECT_NE(ended.output.find("it is for ddp, zero1"), std::string::npos) << ended.output;
}

TEST(Compress, DDP11_wrong_words_are_refused) {
  for (const auto* word : {"fp8", "powersgd", "powersgd:x", "topk:", "topk:2", "bf16:3"}) {
    const auto ended = shoal({"train", "--compress", word});
    EXPECT_EQ(ended.code, 2) << word << ": " << ended.output;
  }
  for (const auto* strategy : {"none", "diloco", "decentralized"}) {
    const auto ended = shoal({"train", "--strategy", strategy, "--compress", "bf16"});
    EXPECT_EQ(ended.code, 2) << ended.output;
    EXPECT_NE(ended.output.find("--compress: " + std::string(strategy) + " does not have it"), std::string::npos)
        << ended.output;
  }
}

}  // namespace
}  // namespace shoal::test::compress_test
