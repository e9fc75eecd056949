// DistributedDataParallel: what it computes, when it communicates, what it moves.

#include "shoal/strategy/ddp.h"

#include <torch/torch.h>

#include "shoal/base/error.h"
#include "tests/support/models.h"
#include "tests/support/world.h"

namespace shoal {
namespace {

using test::batch;
using test::difference;
using test::Mlp;
using test::world;
using Options = DistributedDataParallelOptions;

const Group& group() {
  return world().group();
}

at::Tensor mean_loss(const at::Tensor& output) {
  return output.pow(2).mean();
}

// The oracle: one process takes every rank's batch in turn and averages.
void oracle_step(Mlp& model, torch::optim::Optimizer& optimizer, int64_t step, int micros = 1) {
  optimizer.zero_grad();
  for (int rank = 0; rank < group().size(); ++rank) {
    for (int micro = 0; micro < micros; ++micro) {
      (mean_loss(model->forward(batch(rank, step, micro))) / (group().size() * micros)).backward();
    }
  }
  optimizer.step();
}

Mlp seeded(int seed) {
  torch::manual_seed(seed);
  return Mlp();
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
    EXPECT_NE(text.find("rank 0 has parameter first.weight Double [16, 12], rank " + std::to_string(odd) +
                        " has parameter first.weight Double [17, 12]"),
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
    EXPECT_EQ(reductions, static_cast<int64_t>(parallel.buckets().size()));
    EXPECT_GE(reductions, 3);
    const auto first = std::find_if(records.begin(), records.end(),
                                    [](const CallRecord& record) { return record.op == Op::all_reduce; });
    EXPECT_LT(first->issued, last_gradient) << "step " << step;
    EXPECT_EQ(first->label.bucket, 0);
    EXPECT_EQ(first->label.step, step);
  }
}

// Registered in one order, used in another.
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
    for (int64_t step = 0; step < 4; ++step) {
      optimizer.zero_grad(set_to_none);
      mean_loss(parallel.forward(batch(group().rank(), step))).backward();
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
        EXPECT_EQ(log->count(Op::all_reduce), micro < 2 ? 0 : 1);
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
  EXPECT_EQ(log->count(Op::all_reduce), 1);
}

struct NormImpl : torch::nn::Module {
  NormImpl() {
    linear = register_module("linear", torch::nn::Linear(12, 6));
    norm = register_module("norm", torch::nn::BatchNorm1d(6));
    to(at::kDouble);
  }
  at::Tensor forward(at::Tensor x) { return norm(linear(x)); }
  torch::nn::Linear linear{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};

TEST(Ddp, DDP09_buffers_follow_rank_0_before_each_forward) {
  torch::manual_seed(3);
  auto model = std::make_shared<NormImpl>();
  torch::manual_seed(3);
  const auto alone = std::make_shared<NormImpl>();
  DistributedDataParallel parallel(model, group());
  for (int64_t step = 0; step < 3; ++step) {
    parallel.forward(batch(group().rank(), step)).pow(2).sum().backward();
    alone->forward(batch(0, step));  // rank 0's statistics come from its own batches
  }
  static_cast<torch::nn::Module&>(*model).eval();
  parallel.forward(batch(group().rank(), 9));
  const auto expected = alone->buffers();
  const auto buffers = model->buffers();
  for (size_t i = 0; i < buffers.size(); ++i) EXPECT_TRUE(at::allclose(buffers[i], expected[i])) << i;
}

TEST(Ddp, DDP09_is_skipped_under_no_sync_and_without_gradients) {
  auto log = std::make_shared<CallLog>();
  auto model = std::make_shared<NormImpl>();
  DistributedDataParallel parallel(model, group().recorded(log));
  log->clear();
  {
    const auto local = parallel.no_sync();
    parallel.forward(batch(0, 3));
  }
  {
    const torch::NoGradGuard no_grad;
    parallel.forward(batch(0, 3));
  }
  EXPECT_EQ(log->count(Op::broadcast), 0);
  parallel.forward(batch(0, 3));
  std::set<at::ScalarType> dtypes;
  for (const auto& buffer : model->buffers()) dtypes.insert(buffer.scalar_type());
  EXPECT_EQ(log->count(Op::broadcast), static_cast<int64_t>(dtypes.size()));
}

TEST(Ddp, DDP09_can_be_switched_off) {
  auto log = std::make_shared<CallLog>();
  auto model = std::make_shared<NormImpl>();
  DistributedDataParallel parallel(model, group().recorded(log), {.broadcast_buffers = false});
  log->clear();
  parallel.forward(batch(group().rank(), 0));
  EXPECT_EQ(log->count(Op::broadcast), 0);
}

TEST(Ddp, DDP15_frozen_parameters_take_no_part) {
  auto log = std::make_shared<CallLog>();
  auto model = seeded(1);
  model->first->weight.requires_grad_(false);
  model->first->bias.requires_grad_(false);
  DistributedDataParallel parallel(model, group().recorded(log));
  log->clear();
  mean_loss(parallel.forward(batch(group().rank(), 0))).backward();
  EXPECT_FALSE(model->first->weight.grad().defined());
  // Pieces begin at multiples of 16 doubles; the tail carries 4 flags and the weight.
  EXPECT_EQ(log->bytes(Op::all_reduce), (16 * 5 + 16 + 16 * 16 + 16 + 4 + 1) * 8);
}

TEST(Ddp, DDP15_ignored_names_are_left_alone) {
  auto model = seeded(50 + group().rank());
  const auto own = model->second->weight.clone();
  DistributedDataParallel parallel(model, group(), {.ignored = {"second.weight"}});
  EXPECT_TRUE(at::equal(model->second->weight, own)) << "not broadcast";
  mean_loss(parallel.forward(batch(group().rank(), 0))).backward();
  for (const auto& bucket : parallel.buckets()) {
    EXPECT_EQ(std::count(bucket.begin(), bucket.end(), "second.weight"), 0);
  }
  EXPECT_THROW(DistributedDataParallel(model, group(), {.ignored = {"secnd.weight"}}), UsageError);
}

TEST(Ddp, DDP15_a_model_without_trainable_parameters_is_an_error) {
  auto model = seeded(1);
  for (auto& parameter : model->parameters()) parameter.requires_grad_(false);
  EXPECT_THROW(DistributedDataParallel(model, group()), UsageError);
}

TEST(Ddp, DDP16_runs_on_a_part_of_the_world) {
  std::vector<int> mine;
  for (int rank = group().rank() % 2; rank < group().size(); rank += 2) mine.push_back(rank);
  const auto half = group().subgroup(mine);
  auto model = seeded(1);
  auto reference = seeded(1);
  DistributedDataParallel parallel(model, half);
  mean_loss(parallel.forward(batch(group().rank(), 0))).backward();
  for (const int rank : mine) (mean_loss(reference->forward(batch(rank, 0))) / half.size()).backward();
  EXPECT_LT(difference(test::gradients(*model), test::gradients(*reference)), 1e-12);
}

TEST(Ddp, BEY04_weighted_backward_gives_sum_over_sum) {
  // Rank r sums over r + 1 samples, in two micro-batches; the mean of means would be another number.
  for (const bool view : {true, false}) {
    auto model = seeded(1);
    auto reference = seeded(1);
    DistributedDataParallel parallel(model, group(), {.gradient_as_bucket_view = view});
    for (int64_t step = 0; step < 3; ++step) {
      model->zero_grad();
      const auto samples = group().rank() + 1;
      {
        const auto local = parallel.no_sync();
        parallel.backward(parallel.forward(batch(group().rank(), step, 0, samples)).pow(2).sum(), samples);
      }
      parallel.backward(parallel.forward(batch(group().rank(), step, 1, 2)).pow(2).sum(), 2);
    }
    double weight = 0;
    for (int rank = 0; rank < group().size(); ++rank) {
      reference->forward(batch(rank, 2, 0, rank + 1)).pow(2).sum().backward();
      reference->forward(batch(rank, 2, 1, 2)).pow(2).sum().backward();
      weight += rank + 3;
    }
    for (auto& parameter : reference->parameters()) parameter.mutable_grad().div_(weight);
    EXPECT_LT(difference(test::gradients(*model), test::gradients(*reference)), 1e-12);
  }
}

TEST(Ddp, BEY04_losses_over_five_tokens_and_one_token) {
  if (group().size() != 2) GTEST_SKIP() << "the row's own example has two ranks";
  auto model = std::make_shared<torch::nn::LinearImpl>(torch::nn::LinearOptions(1, 1).bias(false));
  DistributedDataParallel parallel(model, group());
  // Gradients of 1 for each of rank 0's five tokens, 3 for rank 1's only one: (5 * 1 + 3) / 6, not (1 + 3) / 2.
  const int tokens = group().rank() == 0 ? 5 : 1;
  const auto x = at::full({tokens, 1}, group().rank() == 0 ? 1.0 : 3.0);
  parallel.backward(parallel.forward(x).sum(), tokens);
  EXPECT_NEAR(model->weight.grad().item<double>(), 1.3333333, 1e-6);
}

TEST(Ddp, BEY04_a_rank_without_samples_takes_part_with_weight_0) {
  auto model = seeded(1);
  auto reference = seeded(1);
  DistributedDataParallel parallel(model, group());
  const bool has = group().rank() == 0;
  parallel.backward(has ? parallel.forward(batch(0, 0)).sum() : (parallel.forward(batch(0, 0)), at::Tensor()),
                    has ? 4 : 0);
  (reference->forward(batch(0, 0)).sum() / 4).backward();
  EXPECT_LT(difference(test::gradients(*model), test::gradients(*reference)), 1e-12);
}

TEST(Ddp, BEY04_refuses_wrong_weights_and_mixtures) {
  auto model = seeded(1);
  DistributedDataParallel parallel(model, group());
  const auto loss = [&] { return parallel.forward(batch(group().rank(), 0)).sum(); };
  EXPECT_THROW(parallel.backward(loss(), -1), UsageError);
  EXPECT_THROW(parallel.backward(loss(), NAN), UsageError);
  {
    const auto local = parallel.no_sync();
    parallel.backward(loss(), 4);
  }
  EXPECT_THROW(loss().backward(), UsageError);
  parallel.reset();
  model->zero_grad();
  parallel.backward(loss(), 4);
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

TEST(DdpOptions, ValidateListsAllFaults) {
  const Options options{
      .find_unused_parameters = true, .static_graph = true, .bucket_cap_mb = 0, .first_bucket_mb = -1};
  try {
    options.validate();
    FAIL() << "no error";
  } catch (const UsageError& error) {
    const std::string text = error.what();
    for (const auto* part : {"bucket_cap_mb is 0", "first_bucket_mb is -1", "static_graph"}) {
      EXPECT_NE(text.find(part), std::string::npos) << text;
    }
  }
}

}  // namespace
}  // namespace shoal
