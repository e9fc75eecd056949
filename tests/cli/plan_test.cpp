// `shoal plan` compared with the counts of `shoal train`.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/cli/shoal_program.h"
#include "tests/support/temp_folder.h"

namespace shoal::test::plan_test {
namespace {

using nlohmann::json;

struct Case {
  std::string strategy, ranks, transport, model, dtype = "float32", optimizer = "adamw", compress = "none";
  std::string hosts = "1", shard_size{};
};

void expect_train_does_what_plan_says(const Case& it) {
  SCOPED_TRACE(it.strategy + " on " + it.ranks + " ranks, " + it.transport + ", " + it.model + ", " + it.dtype + ", " +
               it.optimizer + ", " + it.compress);
  constexpr int64_t steps = 3;
  const TempFolder folder;
  const std::vector<std::string> common{"--strategy",  it.strategy,  "--ranks",    it.ranks,    "--transport",
                                        it.transport,  "--model",    it.model,     "--dtype",   it.dtype,
                                        "--optimizer", it.optimizer, "--compress", it.compress, "--json"};
  auto plan_line = common, train_line = common;
  plan_line.insert(plan_line.begin(), "plan");
  plan_line.insert(plan_line.end(), {folder.file("plan.json"), "--hosts", it.hosts});
  train_line.insert(train_line.begin(), {"train", "--data", "reference", "--steps", std::to_string(steps)});
  train_line.push_back(folder.file("train.json"));
  if (!it.shard_size.empty()) train_line.insert(train_line.end(), {"--shard-size", it.shard_size});
  const auto planned = shoal(plan_line);
  ASSERT_EQ(planned.code, 0) << planned.output;
  const auto trained = shoal(train_line);
  ASSERT_EQ(trained.code, 0) << trained.output;
  const auto plan = read(folder.file("plan.json"))["strategies"][0];
  const auto report = read(folder.file("train.json"));

  const auto& calls = plan["communication"];
  const bool all_counted = !plan["memory"]["params_gathered"].get<bool>();
  for (const auto& [field, counter] :
       {std::pair("collectives", "collectives_per_step"), std::pair("bytes", "bytes_per_step")}) {
    int64_t expected = calls["first_step"][field].get<int64_t>() + calls["rebuild"][field].get<int64_t>();
    for (int64_t step = 1; step < steps; ++step) {
      expected += calls[step < calls["plain_steps"] ? "plain_step" : "per_step"][field].get<int64_t>();
    }
    const double counted = report["communication"][counter].get<double>() * steps;
    if (all_counted) {
      EXPECT_EQ(expected, std::llround(counted)) << field;
    }
    EXPECT_LE(expected, std::llround(counted)) << field;
  }
  if (all_counted) {
    const auto& sent = report["communication"]["step_bytes"];
    ASSERT_EQ(sent.size(), static_cast<size_t>(steps));
    EXPECT_EQ(sent.back(), calls[steps <= calls["plain_steps"] ? "plain_step" : "per_step"]["bytes"]);
  }
  constexpr double mebibyte = 1 << 20;
  for (const auto& [field, counter] :
       {std::pair("params_bytes", "params_mib"), std::pair("grads_bytes", "grads_mib"),
        std::pair("state_bytes", "state_mib"), std::pair("buffers_bytes", "buffers_mib")}) {
    const auto& ranks = report["memory"]["by_rank"][counter];
    ASSERT_EQ(ranks.size(), plan["memory"][field].size());
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      const double expected = plan["memory"][field][rank].get<double>() / mebibyte;
      EXPECT_NEAR(ranks[rank].get<double>(), expected, 0.05 * expected + 1e-3) << counter << " of rank " << rank;
    }
  }
}

// Each strategy, transport, model and precision, and optimizers and compressions by their names on the command line.
// planning_test has their combinations.
TEST(Plan, BEY11_every_strategy_does_what_was_planned) {
  for (const Case& it : {Case{"ddp", "2", "host", "gpt", "float32", "adamw", "powersgd:2:2"},
                         Case{"ddp", "1", "host", "cnn", "bf16_pure"},
                         Case{"zero1", "2", "host", "gpt", "float32", "muon"},  // has embeddings
                         Case{"zero2", "4", "gloo", "cnn", "bf16_mixed", "sgd_momentum"},
                         Case{"zero2", "2", "gloo", "mlp", "float32", "adafactor", "fp16"},
                         Case{"zero2", "2", "host", "mlp", "bf16_pure", "rmsprop"},
                         Case{"zero1", "3", "gloo", "mlp", "float32", "adagrad", "powersgd:4"},
                         Case{"megatron", "2", "host", "mlp", "float32", "sgd", "topk:0.01"},
                         Case{"megatron", "2", "gloo", "mlp", "float32", "muon", "bf16"},  // whole parameters
                         Case{"megatron", "3", "host", "mlp", "fp16_mixed", "lamb", "int8"},
                         Case{"fsdp", "2", "host", "gpt", "float64", "accum_adamw"},
                         Case{"fsdp", "2", "gloo", "mlp", "float32", "muon", "topk:0.1"},
                         // As if each half of the ranks had a host of its own.
                         Case{"hybrid", "4", "auto", "cnn", "float32", "adamw", "none", "2", "2"}}) {
    expect_train_does_what_plan_says(it);
  }
}

TEST(Plan, BEY11_a_hook_that_a_strategy_refuses_is_left_out_or_refused) {
  const TempFolder folder;
  ASSERT_EQ(shoal({"plan", "--model", "mlp", "--compress", "powersgd:2", "--json", folder.file("plan.json")}).code, 0);
  const auto plans = read(folder.file("plan.json"))["strategies"];
  ASSERT_EQ(plans.size(), 2U);
  EXPECT_EQ(plans[0]["strategy"], "ddp");
  EXPECT_EQ(plans[1]["strategy"], "zero1");
  const auto ended = shoal({"plan", "--model", "mlp", "--compress", "powersgd:2", "--strategy", "zero2"});
  EXPECT_EQ(ended.code, 2) << ended.output;
  EXPECT_NE(ended.output.find("it is for ddp, zero1"), std::string::npos) << ended.output;
  for (const std::string hook : {"foo", "topk:0", "topk:x", "powersgd:x", "powersgd:0"}) {
    const auto none = shoal({"plan", "--model", "mlp", "--compress", hook});
    EXPECT_EQ(none.code, 2) << hook << "\n" << none.output;
    EXPECT_EQ(none.output.find("gradients as"), std::string::npos) << hook << "\n" << none.output;
  }
  EXPECT_NE(shoal({"plan", "--compress", "foo"}).output.find("--compress foo: give none, fp16"), std::string::npos);
}

TEST(Plan, BEY11_bf16_is_planned_for_strategies_with_float32_copies) {
  const TempFolder folder;
  const auto all = shoal({"plan", "--model", "mlp", "--dtype", "bf16", "--json", folder.file("plan.json")});
  ASSERT_EQ(all.code, 0) << all.output;
  EXPECT_NE(all.output.find("Without bf16: ddp"), std::string::npos) << all.output;
  const auto one =
      shoal({"plan", "--model", "mlp", "--dtype", "bf16", "--strategy", "megatron", "--json", folder.file("one.json")});
  ASSERT_EQ(one.code, 0) << one.output;
  const auto plans = read(folder.file("plan.json"))["strategies"];
  EXPECT_NE(std::find(plans.begin(), plans.end(), read(folder.file("one.json"))["strategies"][0]), plans.end())
      << plans;
  const auto none = shoal({"plan", "--model", "mlp", "--dtype", "bf16", "--strategy", "ddp"});
  EXPECT_EQ(none.code, 2) << none.output;
  EXPECT_NE(none.output.find("strategy ddp keeps no float32 copies"), std::string::npos) << none.output;
}

double total(const std::string& dtype, const std::string& strategy, const std::string& ranks) {
  const TempFolder folder;
  const auto ended = shoal({"plan", "--params", "7.5e9", "--ranks", ranks, "--dtype", dtype, "--strategy", strategy,
                            "--json", folder.file("plan.json")});
  EXPECT_EQ(ended.code, 0) << ended.output;
  return read(folder.file("plan.json"))["strategies"][0]["memory"]["total_bytes"];
}

// Rajbhandari et al. 2020, figure 1: 7.5e9 parameters, 64 ranks, Adam.
TEST(Plan, BEY11_reproduces_the_zero_papers_table) {
  const std::vector<std::pair<std::string, double>> figures{
      {"ddp", 120}, {"zero1", 31.4}, {"zero2", 16.6}, {"fsdp", 1.9}};
  for (const auto& [strategy, gigabytes] : figures) {
    EXPECT_NEAR(total("mixed", strategy, "64") / 1e9, gigabytes, 0.05) << strategy;
  }
  const auto table = shoal({"plan", "--params", "7.5e9", "--ranks", "64", "--dtype", "mixed"});
  for (const auto* figure : {"120.0", "31.4", "16.6", "1.9"}) {
    EXPECT_NE(table.output.find(figure), std::string::npos) << table.output;
  }
  const auto small = shoal({"plan", "--params", "5e6", "--ranks", "8", "--strategy", "fsdp"});
  EXPECT_NE(small.output.find("      0.0025      0.0025       0.005        0.01"), std::string::npos) << small.output;
}

// Its values are not needed, and its backward runs once for all strategies.
TEST(Plan, BEY11_a_large_model_takes_seconds) {
  const TempFolder folder;
  const double before = children_seconds();
  const auto ended = shoal({"plan", "--model", "gpt", "--size", "gpt2", "--json", folder.file("plan.json")});
  ASSERT_EQ(ended.code, 0) << ended.output;
  EXPECT_LT(children_seconds() - before, 15);
  EXPECT_EQ(read(folder.file("plan.json"))["strategies"].size(), 5U);
}

// Megatron-LM's documentation: float32 8 + 8/d; bfloat16 with float32 gradients 6 + 12/d. For 16-bit gradients its 4 +
// 16/d includes an unnecessary float32 copy of the gradients: 4 + 12/d.
TEST(Plan, MEG15_bytes_per_parameter) {
  for (const double ranks : {1.0, 4.0, 64.0}) {
    const auto each = [&](const char* dtype) {
      return total(dtype, "megatron", std::to_string(static_cast<int>(ranks))) / 7.5e9;
    };
    EXPECT_DOUBLE_EQ(each("float32"), 8 + 8 / ranks);
    EXPECT_DOUBLE_EQ(each("mixed_fp32_grads"), 6 + 12 / ranks);
    EXPECT_DOUBLE_EQ(each("mixed"), 4 + 12 / ranks);
  }
}

TEST(Plan, refuses_what_it_cannot_plan) {
  const auto refusal = [](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "plan");
    const auto ended = shoal(arguments);
    EXPECT_EQ(ended.code, 2) << ended.output;
    return ended.output;
  };
  EXPECT_NE(refusal({"--params", "-1"}).find("--params -1"), std::string::npos);
  EXPECT_NE(refusal({"--params", "1e300"}).find("--params 1e+300"), std::string::npos);
  EXPECT_NE(refusal({"--json", "/nowhere/plan.json"}).find("--json: cannot write"), std::string::npos);
  EXPECT_NE(refusal({"--params", "1e9", "--model", "cnn"}).find("--params"), std::string::npos);
  EXPECT_NE(refusal({"--params", "1e9", "--dtype", "int4"}).find("--dtype int4"), std::string::npos);
  EXPECT_NE(refusal({"--params", "1e9", "--optimizer", "adafactor"}).find("shapes"), std::string::npos);
  EXPECT_NE(refusal({"--strategy", "zero3"}).find("--strategy zero3"), std::string::npos);
  EXPECT_NE(refusal({"--ranks", "0"}).find("--ranks 0"), std::string::npos);
  EXPECT_NE(refusal({"--model", "resnet"}).find("resnet"), std::string::npos);
  EXPECT_NE(refusal({"--ranks", "4", "--hosts", "3"}).find("--hosts 3"), std::string::npos);
  EXPECT_NE(refusal({"--ranks", "4", "--hosts", "2", "--transport", "tcp"}).find("--transport tcp"), std::string::npos);
  EXPECT_NE(refusal({"--params", "1e9", "--strategy", "hybrid"}).find("ranks of one host"), std::string::npos);
}

}  // namespace
}  // namespace shoal::test::plan_test
