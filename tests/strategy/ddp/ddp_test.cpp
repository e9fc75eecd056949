// DistributedDataParallel: results, times and amounts of communication.

#include "shoal/ddp.h"

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "shoal/error.h"
#include "tests/support/models.h"
#include "tests/support/world.h"

namespace shoal::ddp_test {
namespace {

using test::batch;
using test::difference;
using test::group;
using test::mean_loss;
using test::Mlp;
using test::seeded;
using Options = DistributedDataParallelOptions;

// Oracle: one process takes every rank's batch in turn and averages.
void oracle_step(Mlp& model, torch::optim::Optimizer& optimizer, int64_t step, int micros = 1) {
  optimizer.zero_grad();
  for (int rank = 0; rank < group().size(); ++rank) {
    for (int micro = 0; micro < micros; ++micro) {
      (mean_loss(model->forward(batch(rank, step, micro))) / (group().size() * micros)).backward();
    }
  }
  optimizer.step();
}

template <class Optimizer, class OptimizerOptions>
void compare_with_one_process(const OptimizerOptions& optimizer_options, const Options& options) {
  auto model = seeded(1);
  auto reference = seeded(1);
  DistributedDataParallel parallel(model, group(), options);
  Optimizer optimizer(model->parameters(), optimizer_options);
  Optimizer reference_optimizer(reference->parameters(), optimizer_options);
  for (int64_t step = 0; step < 10; ++step) {
    optimizer.zero_grad();
    mean_loss(parallel.forward(batch(group().rank(), step))).backward();
    optimizer.step();
    oracle_step(reference, reference_optimizer, step);
    ASSERT_LT(difference(model->parameters(), reference->parameters()), 1e-12) << "step " << step;
  }
}

TEST(Ddp, DDP02_equals_one_process_with_sgd_momentum) {
  compare_with_one_process<torch::optim::SGD>(torch::optim::SGDOptions(0.05).momentum(0.9), {});
}

TEST(Ddp, DDP02_equals_one_process_with_adamw) {
  compare_with_one_process<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2), {});
}

TEST(Ddp, DDP02_equals_one_process_with_tiny_buckets_and_without_views) {
  compare_with_one_process<torch::optim::SGD>(
      torch::optim::SGDOptions(0.05).momentum(0.9),
      {.bucket_cap_mb = 1e-4, .first_bucket_mb = 1e-4, .gradient_as_bucket_view = false});
  compare_with_one_process<torch::optim::SGD>(torch::optim::SGDOptions(0.05).momentum(0.9),
                                              {.bucket_cap_mb = 1e-4, .first_bucket_mb = 1e-4});
}

TEST(Ddp, DDP03_ranks_start_from_rank_0s_values_in_few_broadcasts) {
  auto log = std::make_shared<CallLog>();
  auto model = seeded(100 + group().rank());
  const auto rank0 = seeded(100);
  DistributedDataParallel parallel(model, group().recorded(log));
  EXPECT_EQ(difference(model->parameters(), rank0->parameters()), 0);
  int64_t bytes = 0;
  for (const auto& parameter : model->parameters()) bytes += static_cast<int64_t>(parameter.nbytes());
  EXPECT_EQ(log->count(Op::broadcast), 1);
  EXPECT_EQ(log->bytes(Op::broadcast), bytes);
}

TEST(Ddp, DDP03_names_the_first_parameter_that_differs_and_both_ranks) {
  if (group().size() == 1) GTEST_SKIP() << "one rank agrees with itself";
  const int odd = group().size() - 1;
  auto model = Mlp(12, group().rank() == odd ? 17 : 16);
  try {
    DistributedDataParallel parallel(model, group());
    FAIL() << "no error";
  } catch (const DisagreeError& error) {
    const std::string text = error.what();
    const std::string place = test::test_device().is_cpu() ? "" : " on cuda";
    EXPECT_NE(text.find("rank 0 has parameter first.weight Double [16, 12]" + place + ", rank " + std::to_string(odd) +
                        " has parameter first.weight Double [17, 12]" + place),
              std::string::npos)
        << text;
  }
}

TEST(Ddp, DDP04_buckets_leave_before_backward_ends) {
  auto log = std::make_shared<CallLog>();
  auto model = seeded(1);
  const auto recorded = group().recorded(log);
  DistributedDataParallel parallel(model, recorded, {.bucket_cap_mb = 1e-4, .first_bucket_mb = 1e-4});
  Clock::time_point last_gradient;
  model->first->weight.register_hook([&](const at::Tensor&) { last_gradient = Clock::now(); });
  for (int64_t step = 0; step < 3; ++step) {
    log->clear();
    mean_loss(parallel.forward(batch(group().rank(), step))).backward();
    const auto records = log->records();
    const auto reductions = log->count(Op::all_reduce);
    EXPECT_EQ(reductions, static_cast<int64_t>(parallel.buckets().size()) + test::trailers_apart());
    EXPECT_GE(reductions, 3);
    const auto first = std::find_if(records.begin(), records.end(),
                                    [](const CallRecord& record) { return record.op == Op::all_reduce; });
    EXPECT_LT(first->issued, last_gradient) << "step " << step;
    EXPECT_EQ(first->label.bucket, 0);
    EXPECT_EQ(first->label.step, step);
  }
}

// Module whose layers are registered in one order and used in another.
struct CrossedImpl : torch::nn::Module {
  CrossedImpl() {
    for (int i = 0; i < 4; ++i) layers.push_back(register_module("l" + std::to_string(i), torch::nn::Linear(8, 8)));
  }
  at::Tensor forward(at::Tensor x) {
    for (const int i : {2, 0, 3, 1}) x = torch::tanh(layers[i](x));
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};

TEST(Ddp, DDP04_rebuilds_buckets_once_in_the_order_of_arrival) {
  auto log = std::make_shared<CallLog>();
  torch::manual_seed(1);
  auto model = std::make_shared<CrossedImpl>();
  DistributedDataParallel parallel(model, group().recorded(log), {.bucket_cap_mb = 1e-5, .first_bucket_mb = 1e-5});
  const auto layer_order = [&] {
    std::string order;
    for (const auto& bucket : parallel.buckets()) {
      const auto digit = bucket.front().substr(1, 1);
      if (order.empty() || order.substr(order.size() - 1) != digit) order += digit;
    }
    return order;
  };
  EXPECT_EQ(layer_order(), "3210");
  for (int step = 0; step < 3; ++step) parallel.forward(at::ones({2, 8})).sum().backward();
  EXPECT_EQ(layer_order(), "1302");
  int64_t orders = 0;
  for (const auto& record : log->records()) orders += record.label.what == "order of gradients" ? 1 : 0;
  EXPECT_EQ(orders, 1);
}

TEST(Ddp, DDP05_gradients_lie_in_the_bucket_whatever_zero_grad_does) {
  for (const bool set_to_none : {false, true}) {
    auto model = seeded(1);
    auto reference = seeded(1);
    DistributedDataParallel parallel(model, group());
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    torch::optim::SGD reference_optimizer(reference->parameters(), 0.1);
    const void* memory = nullptr;
    for (int64_t step = 0; step < 4; ++step) {
      optimizer.zero_grad(set_to_none);
      mean_loss(parallel.forward(batch(group().rank(), step))).backward();
      const auto* now = model->parameters()[0].grad().storage().data();
      EXPECT_TRUE(step < 2 || now == memory) << "nobody has kept a gradient";
      memory = now;
      for (const auto& parameter : model->parameters()) {
        EXPECT_TRUE(parameter.grad().is_alias_of(model->parameters()[0].grad())) << "one bucket holds all";
      }
      optimizer.step();
      oracle_step(reference, reference_optimizer, step);
    }
    EXPECT_LT(difference(model->parameters(), reference->parameters()), 1e-12);
  }
}

TEST(Ddp, DDP05_without_the_option_gradients_are_the_users_own) {
  auto model = seeded(1);
  DistributedDataParallel parallel(model, group(), {.gradient_as_bucket_view = false});
  mean_loss(parallel.forward(batch(group().rank(), 0))).backward();
  EXPECT_FALSE(model->parameters()[0].grad().is_alias_of(model->parameters()[1].grad()));
}

TEST(Ddp, DDP07_no_sync_accumulates_and_equals_one_big_batch) {
  auto log = std::make_shared<CallLog>();
  for (const bool view : {true, false}) {
    auto model = seeded(1);
    auto reference = seeded(1);
    DistributedDataParallel parallel(model, group().recorded(log), {.gradient_as_bucket_view = view});
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    torch::optim::SGD reference_optimizer(reference->parameters(), 0.1);
    for (int64_t step = 0; step < 4; ++step) {
      log->clear();
      optimizer.zero_grad();
      for (int micro = 0; micro < 3; ++micro) {
        const auto local = parallel.no_sync(micro < 2);
        (mean_loss(parallel.forward(batch(group().rank(), step, micro))) / 3).backward();
        EXPECT_EQ(log->count(Op::all_reduce), micro < 2 ? 0 : 1 + test::trailers_apart());
      }
      optimizer.step();
      oracle_step(reference, reference_optimizer, step, 3);
    }
    EXPECT_LT(difference(model->parameters(), reference->parameters()), 1e-12);
  }
}

TEST(Ddp, DDP07_no_sync_ends_with_its_scope_also_by_an_exception) {
  auto log = std::make_shared<CallLog>();
  auto model = seeded(1);
  DistributedDataParallel parallel(model, group().recorded(log));
  try {
    const auto local = parallel.no_sync();
    throw std::runtime_error("user's own");
  } catch (const std::runtime_error&) {
  }
  mean_loss(parallel.forward(batch(group().rank(), 0))).backward();
  EXPECT_EQ(log->count(Op::all_reduce), 1 + test::trailers_apart());
}

TEST(Ddp, BEY19_the_first_step_is_a_real_step) {
  auto model = seeded(1);
  DistributedDataParallel parallel(model, group());
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  const auto before = model->first->weight.clone();
  optimizer.zero_grad();
  mean_loss(parallel.forward(batch(group().rank(), 0))).backward();
  optimizer.step();
  EXPECT_GT((model->first->weight - before).abs().max().item<double>(), 0);
}

}  // namespace
}  // namespace shoal::ddp_test
