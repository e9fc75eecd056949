// DDP17: a wrapper's report on itself and its steps, compared with the test's own counts.

#include <gmock/gmock.h>
#include <torch/optim/sgd.h>

#include <chrono>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "engine/buckets/step_trailer.h"
#include "shoal/decentralized.h"
#include "shoal/hooks.h"
#include "tests/support/models.h"
#include "tests/support/training.h"
#include "tests/support/world.h"

namespace shoal::test::logging_data_test {
namespace {

using ::testing::ElementsAre;

constexpr auto forward_pause = std::chrono::milliseconds(20);
constexpr auto backward_pause = std::chrono::milliseconds(30);

// Model whose gradients do not arrive in reverse order of registration. It has frozen parts, a buffer and a part that
// no rank uses; forward takes at least forward_pause, and backward backward_pause after the first gradients.
struct SlowImpl : torch::nn::Module {
  SlowImpl() {
    torch::manual_seed(3);
    last = register_module("last", torch::nn::Linear(30, 5));
    first = register_module("first", torch::nn::Linear(12, 30));
    idle = register_module("idle", torch::nn::Linear(3, 7));
    frozen = register_module("frozen", torch::nn::Linear(12, 12));
    to(at::kDouble);
    register_buffer("counts", at::zeros({9}, at::kFloat));
    for (auto& parameter : frozen->parameters()) parameter.requires_grad_(false);
  }
  at::Tensor forward(const at::Tensor& x) {
    if (fails) throw std::runtime_error("injected");
    std::this_thread::sleep_for(pause);
    auto hidden = torch::tanh(first(frozen(x)));
    if (hidden.requires_grad()) {
      hidden.register_hook([](const at::Tensor&) { std::this_thread::sleep_for(backward_pause); });
    }
    return last(hidden);
  }
  bool fails = false;
  std::chrono::milliseconds pause = forward_pause;
  torch::nn::Linear last{nullptr}, first{nullptr}, idle{nullptr}, frozen{nullptr};
};

constexpr int64_t trained_elements = 30 * 5 + 5 + 12 * 30 + 30 + 3 * 7 + 7;

double milliseconds(Clock::duration time) {
  return std::chrono::duration<double, std::milli>(time).count();
}

// Buckets of one step as they were called, without flags and weights.
std::vector<int64_t> called_buckets(const CallLog& log, int64_t step, const std::vector<int64_t>& facts) {
  std::vector<int64_t> list;
  for (const auto& record : log.records()) {
    if (record.label.step != step || record.label.bucket < 0) continue;
    list.push_back(record.bytes - (list.size() < facts.size() ? facts[list.size()] : 0));
  }
  return list;
}

TEST(LoggingData, DDP17_says_what_was_built_and_what_buckets_became) {
  const auto log = std::make_shared<CallLog>();
  auto model = std::make_shared<SlowImpl>();
  DistributedDataParallel<SlowImpl> parallel(
      model, group().recorded(log),
      {.find_unused_parameters = true, .bucket_cap_mb = 1e-6, .first_bucket_mb = 1e-6});  // a bucket each
  const auto train = [&](int64_t step) { mean_loss(parallel.forward(batch(group().rank(), step))).backward(); };
  auto data = parallel.logging_data();
  EXPECT_EQ(data.strategy, "DistributedDataParallel");
  EXPECT_NE(data.module.find("SlowImpl"), std::string::npos) << data.module;
  EXPECT_EQ(data.group, "world");
  EXPECT_EQ(data.transport, group().transport());
  EXPECT_EQ(data.rank, group().rank());
  EXPECT_EQ(data.world_size, group().size());
  EXPECT_EQ(data.device, "cpu");
  EXPECT_THAT(data.dtypes, ElementsAre("Double"));
  EXPECT_EQ(data.trainable_tensors, 6);
  EXPECT_EQ(data.trainable_bytes, 8 * trained_elements);
  EXPECT_EQ(data.frozen_tensors, 2);
  EXPECT_EQ(data.frozen_bytes, 8 * (12 * 12 + 12));
  EXPECT_EQ(data.buffer_tensors, 1);
  EXPECT_EQ(data.buffer_bytes, 4 * 9);
  EXPECT_EQ(data.communication_hook, "");
  EXPECT_THAT(data.settings, ::testing::Contains(std::pair<std::string, std::string>("find_unused_parameters", "yes")));
  EXPECT_EQ(data.steps, 0);
  EXPECT_TRUE(data.unused_parameters.empty());
  EXPECT_FALSE(data.rebuilt);

  // Rounds up to whole cache-line pairs.
  const auto bytes = [](int64_t elements) { return (8 * elements + 127) / 128 * 128; };
  EXPECT_THAT(data.first_bucket_bytes,
              ElementsAre(bytes(7), bytes(21), bytes(30), bytes(12 * 30), bytes(5), bytes(30 * 5)))
      << "registered last, reduced first";
  EXPECT_EQ(data.bucket_bytes, data.first_bucket_bytes);
  const std::vector<int64_t> facts(6, 8 * StepTrailer::numel(1));
  for (int64_t step = 0; step < 2; ++step) train(step);
  data = parallel.logging_data();
  EXPECT_TRUE(data.rebuilt);
  EXPECT_EQ(data.steps, 2);
  EXPECT_EQ(called_buckets(*log, 0, facts), data.first_bucket_bytes);
  EXPECT_EQ(called_buckets(*log, 1, facts), data.bucket_bytes);
  EXPECT_NE(data.bucket_bytes, data.first_bucket_bytes);
  EXPECT_THAT(data.unused_parameters, ElementsAre("idle.weight", "idle.bias"));
  EXPECT_EQ(data.unused_bytes, 8 * (3 * 7 + 7));
}

TEST(LoggingData, DDP17_times_are_those_of_the_sampled_steps) {
  const auto log = std::make_shared<CallLog>();
  auto model = std::make_shared<SlowImpl>();
  DistributedDataParallel<SlowImpl> parallel(
      model, group().recorded(log), {.find_unused_parameters = true, .bucket_cap_mb = 1e-6, .first_bucket_mb = 1e-6});
  StepTimes sum;
  for (int64_t step = 0; step < 10; ++step) {
    const auto start = Clock::now();
    const auto loss = mean_loss(parallel.forward(batch(group().rank(), step)));
    const auto middle = Clock::now();
    log->clear();
    loss.backward();
    const auto end = Clock::now();
    const auto data = parallel.logging_data();
    EXPECT_EQ(data.sampled_steps, step + 1);
    const auto& times = data.last;
    EXPECT_GE(times.forward, milliseconds(forward_pause));
    EXPECT_LE(times.forward, milliseconds(middle - start));
    EXPECT_GE(times.backward, milliseconds(backward_pause));
    EXPECT_LE(times.backward, milliseconds(end - middle));
    auto leaves = Clock::time_point::max(), back = Clock::time_point::min();
    for (const auto& record : log->records()) {
      if (record.label.bucket < 0) continue;
      leaves = std::min(leaves, record.issued);
      back = std::max(back, record.finished);
    }
    EXPECT_GE(times.communication, milliseconds(back - leaves));
    EXPECT_LE(times.communication, milliseconds(end - middle));
    EXPECT_LE(times.overlap, std::min(times.communication, times.backward));
    // In the first step, the first bucket is one that no rank uses; later buckets are issued as they fill.
    EXPECT_GE(times.overlap, milliseconds(backward_pause))
        << "the first bucket leaves before backward pauses, in step " << step;
    sum.forward += times.forward;
    sum.backward += times.backward;
    sum.communication += times.communication;
    sum.overlap += times.overlap;
  }
  const auto ten = parallel.logging_data();
  EXPECT_NEAR(ten.mean.forward, sum.forward / 10, 1e-9);
  EXPECT_NEAR(ten.mean.backward, sum.backward / 10, 1e-9);
  EXPECT_NEAR(ten.mean.communication, sum.communication / 10, 1e-9);
  EXPECT_NEAR(ten.mean.overlap, sum.overlap / 10, 1e-9);
  mean_loss(parallel.forward(batch(group().rank(), 10))).backward();
  const auto eleven = parallel.logging_data();
  EXPECT_EQ(eleven.steps, 11);
  EXPECT_EQ(eleven.sampled_steps, 10) << "the next one is step 100";
  EXPECT_EQ(eleven.last.forward, ten.last.forward);
}

TEST(LoggingData, DDP17_a_step_that_was_given_up_does_not_count) {
  auto model = std::make_shared<SlowImpl>();
  DistributedDataParallel<SlowImpl> parallel(model, group(), {.find_unused_parameters = true});
  const auto train = [&](int64_t step) { mean_loss(parallel.forward(batch(group().rank(), step))).backward(); };
  train(0);
  model->fails = true;
  EXPECT_THROW(train(1), std::runtime_error);
  model->fails = false;
  train(2);
  const auto data = parallel.logging_data();
  EXPECT_EQ(data.steps, 3);
  EXPECT_EQ(data.sampled_steps, 2);
}

TEST(LoggingData, DDP17_a_forward_that_backward_computes_again_is_not_the_steps_forward) {
  auto model = std::make_shared<SlowImpl>();
  DistributedDataParallel<SlowImpl> parallel(model, group(), {.find_unused_parameters = true});
  const auto x = batch(group().rank(), 0);
  const auto output = parallel.forward(x);
  output.register_hook([&](const at::Tensor&) {
    const at::AutoGradMode records(true);
    model->pause = 20 * forward_pause;
    parallel.forward(x);
  });
  mean_loss(output).backward();
  const auto forward = parallel.logging_data().last.forward;
  EXPECT_GE(forward, milliseconds(forward_pause));
  EXPECT_LT(forward, milliseconds(20 * forward_pause));
}

TEST(LoggingData, DDP17_every_strategy_has_it) {
  const std::vector<std::pair<std::string, std::string>> strategies{{"ddp", "DistributedDataParallel"},
                                                                    {"zero1", "DistributedDataParallel"},
                                                                    {"zero2", "ShardedDataParallel"},
                                                                    {"megatron", "DistributedOptimizer"},
                                                                    {"fsdp", "FullyShardedDataParallel"}};
  for (const auto& [strategy, name] : strategies) {
    for (const bool hooked : {false, true}) {
      SCOPED_TRACE(strategy + (hooked ? " with a hook" : ""));
      const auto log = std::make_shared<CallLog>();
      auto training = Training<MlpImpl>::make<torch::optim::SGD>(
          strategy, seeded(3).ptr(), group().recorded(log), torch::optim::SGDOptions(0.1),
          {.bucket_mb = 1e-3,
           .precision = Precision::float64(),
           .hook = hooked ? std::make_shared<CompressHook>(at::kBFloat16) : nullptr});
      for (int64_t step = 0; step < 3; ++step) {
        log->clear();
        mean_loss(training.forward(batch(group().rank(), step))).backward();
        training.step();
        training.zero_grad();
      }
      const auto data = training.logging_data();
      EXPECT_EQ(data.strategy, name);
      EXPECT_EQ(data.rank, group().rank());
      EXPECT_EQ(data.world_size, group().size());
      EXPECT_EQ(data.communication_hook, hooked ? "bf16" : "");
      const std::map<std::string, std::string> settings(data.settings.begin(), data.settings.end());
      if (strategy == "megatron") {
        EXPECT_EQ(settings.at("scaler"), "no");
      } else {
        EXPECT_EQ(settings.at("precision"), "parameters Double, computes in Double, scaler no");
      }
      constexpr int64_t elements = 12 * 16 + 16 + 16 * 16 + 16 + 16 * 5 + 5;
      EXPECT_EQ(data.trainable_tensors, 6);
      EXPECT_EQ(data.trainable_bytes, 8 * elements);
      EXPECT_EQ(data.steps, 3);
      EXPECT_EQ(data.sampled_steps, 3);
      EXPECT_TRUE(data.unused_parameters.empty());
      // Trailers ride in DDP's buckets; they are separate from other strategies' buckets and from a hook's results.
      std::vector<int64_t> facts;
      if (!hooked && (strategy == "ddp" || strategy == "zero1")) {
        for (const auto& names : training.buckets()) facts.push_back(8 * StepTrailer::numel(names.size()));
      }
      auto called = called_buckets(*log, 2, facts);
      if (hooked) {
        for (auto& bytes : called) bytes *= 4;  // float64 is reduced as bfloat16
      }
      // With one rank, FSDP's hook follows a reduction of its own.
      if (hooked && strategy == "fsdp" && group().size() == 1) called = data.bucket_bytes;
      EXPECT_EQ(called, data.bucket_bytes);
      EXPECT_GT(data.last.backward, 0);
      EXPECT_GT(data.last.communication, 0);
      EXPECT_EQ(data.last.forward > 0, strategy != "megatron") << "which has no wrapper around forward";
    }
  }
}

TEST(LoggingData, DDP17_decentralized_has_it) {
  auto model = std::make_shared<SlowImpl>();
  DecentralizedDataParallel<SlowImpl> parallel(model,
                                               optimizer_recipe<torch::optim::SGD>(torch::optim::SGDOptions(0.1)),
                                               group(), {.topology = make_topology("ring", group().size())});
  for (int64_t step = 0; step < 3; ++step) {
    mean_loss(parallel.forward(batch(group().rank(), step))).backward();
  }
  const auto data = parallel.logging_data();
  EXPECT_EQ(data.strategy, "DecentralizedDataParallel");
  EXPECT_EQ(data.trainable_bytes, 8 * trained_elements);
  EXPECT_THAT(data.settings, ::testing::Contains(std::pair<std::string, std::string>("topology", "ring")));
  ASSERT_EQ(data.bucket_bytes.size(), 1U);
  EXPECT_GE(data.bucket_bytes[0], data.trainable_bytes);
  EXPECT_LT(data.bucket_bytes[0], data.trainable_bytes + 6 * 128);
  EXPECT_THAT(data.unused_parameters, ElementsAre("idle.weight", "idle.bias"));
  EXPECT_EQ(data.steps, 3);
  EXPECT_EQ(data.sampled_steps, 3);
  EXPECT_GE(data.mean.forward, milliseconds(forward_pause));
  EXPECT_GE(data.mean.backward, milliseconds(backward_pause));
  EXPECT_GT(data.mean.communication, 0);
}

TEST(LoggingData, DDP17_prints_as_json_and_as_a_table) {
  auto model = seeded(3);
  DistributedDataParallel<MlpImpl> parallel(model.ptr(), group());
  mean_loss(parallel.forward(batch(group().rank(), 0))).backward();
  const auto data = parallel.logging_data();
  const auto json = nlohmann::json::parse(to_json(data));
  EXPECT_EQ(json["strategy"], data.strategy);
  EXPECT_EQ(json["trainable_bytes"], data.trainable_bytes);
  EXPECT_EQ(json["bucket_bytes"].get<std::vector<int64_t>>(), data.bucket_bytes);
  EXPECT_EQ(json["settings"]["bucket_cap_mb"], "25");
  EXPECT_DOUBLE_EQ(json["mean"]["backward_ms"], data.mean.backward);
  const auto table = to_table(data);
  for (const auto* line : {"strategy                             DistributedDataParallel\n",
                           "settings.static_graph                no\n", "steps                                1\n"}) {
    EXPECT_NE(table.find(line), std::string::npos) << table;
  }
}

}  // namespace
}  // namespace shoal::test::logging_data_test
