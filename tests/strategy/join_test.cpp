// Join: ranks with different numbers of batches, under every strategy (BEY03, DDP13).

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <functional>
#include <set>

#include "comm/group_state.h"
#include "comm/world_state.h"
#include "shoal/base/error.h"
#include "shoal/module/sync_batch_norm.h"
#include "tests/support/models.h"
#include "tests/support/training.h"
#include "tests/support/world.h"

namespace shoal {
namespace {

using test::batch;
using test::difference;
using test::mean_loss;
using test::Training;
using test::world;
using Mlp = test::MlpImpl;

const Group& group() {
  return world().group();
}

const torch::optim::SGDOptions sgd = torch::optim::SGDOptions(0.1).momentum(0.9);

// Batches of each rank.
using Counts = std::function<int64_t(int rank)>;

int64_t five_and_rank(int rank) {
  return 5 + rank;
}

int64_t most(const Counts& counts) {
  int64_t most = 0;
  for (int rank = 0; rank < group().size(); ++rank) most = std::max(most, counts(rank));
  return most;
}

template <class Module>
Training<Module> make_of(const std::string& strategy, std::shared_ptr<Module> model,
                         const test::TrainingOptions& options = {.bucket_mb = 1e-3}, const Group& on = group()) {
  return Training<Module>::template make<torch::optim::SGD>(strategy, std::move(model), on, sgd, options);
}

Training<Mlp> make(const std::string& strategy, const test::TrainingOptions& options = {.bucket_mb = 1e-3},
                   const Group& on = group()) {
  return make_of(strategy, test::seeded(3).ptr(), options, on);
}

// The whole scope in one process.
std::vector<at::Tensor> reference(const Counts& counts, const std::function<double(int64_t step)>& divisor,
                                  int64_t steps = -1) {
  auto model = test::seeded(3);
  torch::optim::SGD optimizer(model->parameters(), sgd);
  for (int64_t step = 0; step < (steps < 0 ? most(counts) : steps); ++step) {
    optimizer.zero_grad();
    for (int rank = 0; rank < group().size(); ++rank) {
      if (step < counts(rank)) (mean_loss(model->forward(batch(rank, step))) / divisor(step)).backward();
    }
    optimizer.step();
  }
  return model->parameters();
}

double initial(int64_t) {
  return group().size();
}

std::function<double(int64_t)> active(const Counts& counts) {
  return [counts](int64_t step) {
    double ranks = 0;
    for (int rank = 0; rank < group().size(); ++rank) ranks += step < counts(rank) ? 1 : 0;
    return ranks;
  };
}

// Every bit as on rank 0.
void expect_same_on_all_ranks(const std::vector<at::Tensor>& tensors) {
  for (const auto& tensor : tensors) {
    auto first = tensor.detach().clone();
    group().broadcast(first, 0).wait();
    EXPECT_TRUE(at::equal(first, tensor.detach()));
  }
}

template <class Module>
void pass(Training<Module>& training, const Join& join, int64_t number) {
  if (join.active()) {
    mean_loss(training.forward(batch(group().rank(), number))).backward();
  } else {
    training.shadow();
  }
}

template <class Module>
int64_t run(Training<Module>& training, Join& join, int64_t batches) {
  int64_t number = 0;
  for (; join.next(number < batches); ++number) {
    pass(training, join, number);
    training.step();
    training.zero_grad();
  }
  return number;
}

class JoinStrategies : public testing::TestWithParam<std::string> {};

TEST_P(JoinStrategies, BEY03_uneven_inputs_equal_one_process) {
  for (const bool by_initial : {true, false}) {
    auto training = make(GetParam());
    Join join({training}, {.divide_by_initial_world_size = by_initial});
    EXPECT_EQ(run(training, join, five_and_rank(group().rank())), most(five_and_rank));
    const auto expected = reference(five_and_rank, by_initial ? initial : active(five_and_rank));
    EXPECT_LT(difference(training.model->parameters(), expected), 1e-12) << "divided by initial: " << by_initial;
    expect_same_on_all_ranks(training.model->parameters());
    if (group().size() == 1) continue;
    const auto other = reference(five_and_rank, by_initial ? active(five_and_rank) : initial);
    EXPECT_GT(difference(training.model->parameters(), other), 1e-9) << "the test can tell the divisors apart";
  }
}

TEST_P(JoinStrategies, BEY03_a_rank_may_have_no_batch_at_all) {
  for (const int without : {0, group().size() - 1}) {
    const Counts counts = [&](int rank) { return rank == without ? 0 : 3; };
    auto training = make(GetParam());
    Join join({training}, {.divide_by_initial_world_size = false});
    run(training, join, counts(group().rank()));
    EXPECT_LT(difference(training.model->parameters(), reference(counts, active(counts))), 1e-12) << "rank " << without;
    expect_same_on_all_ranks(training.model->parameters());
  }
}

TEST_P(JoinStrategies, BEY03_nobody_has_a_batch_and_the_next_epoch_has) {
  auto training = make(GetParam());
  Join join({training});
  EXPECT_EQ(run(training, join, 0), 0);
  run(training, join, five_and_rank(group().rank()));
  EXPECT_LT(difference(training.model->parameters(), reference(five_and_rank, initial)), 1e-12);
}

// Rank 0 has no batch at first, and has some later.
TEST_P(JoinStrategies, BEY03_a_rank_may_come_late) {
  for (const bool static_graph : {false, true}) {
    auto training = make(GetParam(), {.static_graph = static_graph, .bucket_mb = 1e-3});
    Join join({training});
    const auto has = [](int rank, int64_t step) { return rank > 0 || step == 1 || step >= 3; };
    auto model = test::seeded(3);
    torch::optim::SGD optimizer(model->parameters(), sgd);
    for (int64_t step = 0; join.next(step < 6 && has(group().rank(), step)); ++step) {
      pass(training, join, step);
      training.step();
      training.zero_grad();
      optimizer.zero_grad();
      for (int rank = 0; rank < group().size(); ++rank) {
        if (has(rank, step)) (mean_loss(model->forward(batch(rank, step))) / group().size()).backward();
      }
      optimizer.step();
    }
    EXPECT_LT(difference(training.model->parameters(), model->parameters()), 1e-12);
  }
}

// Weights say what the divisor is, whatever the option.
TEST_P(JoinStrategies, BEY03_weights_of_ranks_that_have_run_out_are_zero) {
  const auto samples = [](int rank) { return 1 + 2 * rank; };
  for (const bool by_initial : {true, false}) {
    auto training = make(GetParam());
    Join join({training}, {.divide_by_initial_world_size = by_initial});
    auto model = test::seeded(3);
    torch::optim::SGD optimizer(model->parameters(), sgd);
    const auto mine = samples(group().rank());
    for (int64_t step = 0; join.next(step < five_and_rank(group().rank())); ++step) {
      if (join.active()) {
        training.backward(training.forward(batch(group().rank(), step, 0, mine)).pow(2).sum(), mine);
      } else {
        training.shadow();
      }
      training.step();
      training.zero_grad();
      double count = 0;
      for (int rank = 0; rank < group().size(); ++rank) count += step < five_and_rank(rank) ? samples(rank) : 0;
      optimizer.zero_grad();
      for (int rank = 0; rank < group().size(); ++rank) {
        if (step >= five_and_rank(rank)) continue;
        (model->forward(batch(rank, step, 0, samples(rank))).pow(2).sum() / count).backward();
      }
      optimizer.step();
    }
    EXPECT_LT(difference(training.model->parameters(), model->parameters()), 1e-12);
  }
}

// Two passes make a step; rank r runs out after 5 + r passes, which may be in the middle of one.
TEST_P(JoinStrategies, BEY03_a_rank_may_run_out_between_micro_batches) {
  for (const bool by_initial : {true, false}) {
    auto training = make(GetParam());
    Join join({training}, {.divide_by_initial_world_size = by_initial});
    auto model = test::seeded(3);
    torch::optim::SGD optimizer(model->parameters(), sgd);
    optimizer.zero_grad();
    for (int64_t number = 0; join.next(number < five_and_rank(group().rank())); ++number) {
      const bool accumulate = number % 2 == 0;
      {
        const auto local = training.no_sync(accumulate);
        pass(training, join, number);
      }
      double took_part = 0;
      for (int rank = 0; rank < group().size(); ++rank) took_part += number / 2 * 2 < five_and_rank(rank) ? 1 : 0;
      for (int rank = 0; rank < group().size(); ++rank) {
        if (number >= five_and_rank(rank)) continue;
        (mean_loss(model->forward(batch(rank, number))) / (by_initial ? group().size() : took_part)).backward();
      }
      if (accumulate) continue;
      training.step();
      training.zero_grad();
      optimizer.step();
      optimizer.zero_grad();
    }
    EXPECT_LT(difference(training.model->parameters(), model->parameters()), 1e-12) << "by initial: " << by_initial;
  }
}

TEST_P(JoinStrategies, BEY03_all_stop_when_the_first_runs_out) {
  auto training = make(GetParam());
  {
    Join join({training}, {.throw_on_early_termination = true});
    try {
      run(training, join, five_and_rank(group().rank()));
      EXPECT_EQ(group().size(), 1) << "nobody else has batches left";
    } catch (const InputsExhausted& error) {
      EXPECT_GT(group().size(), 1);
      EXPECT_STREQ(error.what(),
                   "rank 0 has no batch left after 5 steps, other ranks have: all stop (throw_on_early_termination)");
    }
  }
  EXPECT_LT(difference(training.model->parameters(), reference(five_and_rank, initial, 5)), 1e-12);
  expect_same_on_all_ranks(training.model->parameters());
  // Outside, everybody has batches again.
  mean_loss(training.forward(batch(group().rank(), 5))).backward();
  training.step();
  EXPECT_LT(difference(training.model->parameters(), reference([](int) { return 6; }, initial)), 1e-12);
}

struct NormImpl : torch::nn::Module {
  NormImpl() {
    first = register_module("first", torch::nn::Linear(12, 6));
    norm = register_module("norm", torch::nn::BatchNorm1d(6));
    last = register_module("last", torch::nn::Linear(6, 2));
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) { return last(norm(first(x))); }
  torch::nn::Linear first{nullptr}, last{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};

std::shared_ptr<NormImpl> seeded_norm() {
  torch::manual_seed(7);
  return std::make_shared<NormImpl>();
}

// While training, the lowest rank with a batch counts (Megatron, FSDP: every rank for itself); at the end the last
// joiner.
TEST_P(JoinStrategies, BEY03_buffers_are_the_last_joiners) {
  const Counts counts = [](int rank) { return 5 + 2 * (rank % 2) - (rank == 0 ? 5 : 0); };  // 0, 7, 5, 7
  auto training = make_of(GetParam(), seeded_norm());
  Join join({training});
  run(training, join, counts(group().rank()));
  auto model = seeded_norm();
  torch::optim::SGD optimizer(model->parameters(), sgd);
  std::vector<std::vector<at::Tensor>> of_rank(group().size());
  const auto copy = [&] {
    std::vector<at::Tensor> list;
    for (const auto& buffer : model->buffers()) list.push_back(buffer.clone());
    return list;
  };
  const auto set = [&](const std::vector<at::Tensor>& values) {
    for (size_t i = 0; i < values.size(); ++i) model->buffers()[i].copy_(values[i]);
  };
  for (auto& buffers : of_rank) buffers = copy();
  int lead = 0;
  for (int64_t step = 0; step < most(counts); ++step) {
    lead = 0;
    while (step >= counts(lead)) ++lead;
    if (GetParam() == "ddp" || GetParam().starts_with("zero")) {
      for (auto& buffers : of_rank) buffers = of_rank[lead];
    }
    optimizer.zero_grad();
    for (int rank = 0; rank < group().size(); ++rank) {
      if (step >= counts(rank)) continue;
      set(of_rank[rank]);
      (mean_loss(model->forward(batch(rank, step))) / group().size()).backward();
      of_rank[rank] = copy();
    }
    optimizer.step();
  }
  EXPECT_LT(difference(training.model->parameters(), model->parameters()), 1e-10);
  EXPECT_LT(difference(training.model->buffers(), of_rank[lead]), 1e-10);
  expect_same_on_all_ranks(training.model->parameters());
  expect_same_on_all_ranks(training.model->buffers());
}

// The second one learns from what the first one gives.
TEST_P(JoinStrategies, BEY03_several_wrappers_in_one_scope) {
  const auto make_pair = [] { return std::pair(test::Mlp(12, 8, 12), test::Mlp(12, 8, 3)); };
  torch::manual_seed(5);
  const auto [a, b] = make_pair();
  torch::manual_seed(5);
  auto [reference_a, reference_b] = make_pair();
  auto first = make_of(GetParam(), a.ptr());
  auto second = make_of(GetParam(), b.ptr());
  torch::optim::SGD optimizer_a(reference_a->parameters(), sgd);
  torch::optim::SGD optimizer_b(reference_b->parameters(), sgd);
  Join join({first, second});
  for (int64_t step = 0; join.next(step < five_and_rank(group().rank())); ++step) {
    if (join.active()) {
      const auto between = first.forward(batch(group().rank(), step));
      mean_loss(between).backward();
      mean_loss(second.forward(between.detach())).backward();
    } else {
      first.shadow();
      second.shadow();
    }
    for (auto* training : {&first, &second}) {
      training->step();
      training->zero_grad();
    }
    optimizer_a.zero_grad();
    optimizer_b.zero_grad();
    for (int rank = 0; rank < group().size(); ++rank) {
      if (step >= five_and_rank(rank)) continue;
      const auto between = reference_a->forward(batch(rank, step));
      (mean_loss(between) / group().size()).backward();
      (mean_loss(reference_b->forward(between.detach())) / group().size()).backward();
    }
    optimizer_a.step();
    optimizer_b.step();
  }
  EXPECT_LT(difference(a->parameters(), reference_a->parameters()), 1e-12);
  EXPECT_LT(difference(b->parameters(), reference_b->parameters()), 1e-12);
}

struct Injected : std::runtime_error {
  Injected() : std::runtime_error("injected") {}
};

// The last rank, alone with its batches in the end, fails in two of its steps; the shadows are told.
TEST_P(JoinStrategies, BEY03_a_failure_ends_the_step_for_shadows_too) {
  const std::set<int64_t> bad{2, 5 + group().size() - 2};
  auto training = make(GetParam());
  bool fails = false;
  training.model->first->weight.register_hook([&](const at::Tensor&) {
    if (fails) throw Injected();
  });
  Join join({training});
  int64_t given_up = 0;
  for (int64_t step = 0; join.next(step < five_and_rank(group().rank())); ++step) {
    try {
      fails = group().rank() == group().size() - 1 && bad.count(step) > 0;
      pass(training, join, step);
    } catch (const Injected&) {
      if (GetParam().starts_with("megatron")) training.reset();
      ++given_up;
    } catch (const StepAbandoned&) {
      ++given_up;
    }
    if (bad.count(step) == 0) training.step();
    training.zero_grad();
  }
  EXPECT_EQ(given_up, 2);
  expect_same_on_all_ranks(training.model->parameters());
}

TEST_P(JoinStrategies, BEY03_one_small_collective_a_step_and_the_same_on_all_ranks) {
  auto log = std::make_shared<CallLog>();
  auto training = make(GetParam(), test::TrainingOptions(), group().recorded(log));
  log->clear();
  Join join({training});
  const auto passes = run(training, join, five_and_rank(group().rank()));
  int64_t asked = 0;
  int64_t asked_bytes = 0;
  std::vector<int64_t> calls;
  for (const auto& record : log->records()) {
    if (record.label.what == "who has a batch") {
      EXPECT_EQ(record.op, Op::all_gather);
      ++asked;
      asked_bytes += record.bytes;
    }
    calls.push_back(static_cast<int64_t>(record.op) * 1'000'000 + record.bytes);
  }
  EXPECT_EQ(asked, passes + 1);
  EXPECT_LE(asked_bytes, (passes + 1) * group().size() * 8);
  const auto mine = at::tensor(calls, at::kLong);
  expect_same_on_all_ranks({at::tensor({mine.numel()}, at::kLong)});
  expect_same_on_all_ranks({mine});
}

// Notes how much shared memory this process has when collectives leave.
class MeteredTransport : public Transport {
 public:
  explicit MeteredTransport(std::shared_ptr<Transport> inner) : inner_(std::move(inner)) {}
  std::string name() const override { return inner_->name(); }
  at::Tensor allocate(int64_t numel, const at::TensorOptions& options) override {
    return inner_->allocate(numel, options);
  }
  std::unique_ptr<TransportWork> issue(const Call& call) override {
    most = std::max(most, bytes());
    return inner_->issue(call);
  }
  static int64_t bytes() { return static_cast<int64_t>(state_of(group())->world->memory->bytes_in_use()); }
  int64_t most = 0;

 private:
  std::shared_ptr<Transport> inner_;
};

struct DeepImpl : torch::nn::Module {
  static constexpr int64_t layers = 32;
  static constexpr int64_t width = 384;
  static constexpr int64_t layer_bytes = width * width * 8;
  DeepImpl() {
    for (int64_t i = 0; i < layers; ++i) {
      all.push_back(
          register_module(std::to_string(i), torch::nn::Linear(torch::nn::LinearOptions(width, width).bias(false))));
    }
    to(at::kDouble);
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : all) x = layer(x);
    return x;
  }
  std::vector<torch::nn::Linear> all;
};

// Memory of buckets that only help others to sum up comes and goes, as in a backward. Rank 0 has no batch.
TEST(JoinMemory, SDP02_a_shadow_holds_its_share_and_few_buckets_more) {
  if (group().transport() != "host") GTEST_SKIP() << "what is metered is memory that ranks share";
  std::shared_ptr<MeteredTransport> transport;
  const auto metered = with_transport(group(), [&](std::shared_ptr<Transport> inner) {
    return transport = std::make_shared<MeteredTransport>(std::move(inner));
  });
  auto training = make_of("zero2", std::make_shared<DeepImpl>(), {.bucket_mb = 0.5}, metered);
  Join join({training});
  const auto before = MeteredTransport::bytes();  // with the share
  for (int64_t step = 0; join.next(group().rank() > 0 && step < 3); ++step) {
    transport->most = 0;
    if (join.active()) {
      training.forward(at::ones({1, DeepImpl::width}, at::kDouble)).sum().backward();
    } else {
      training.shadow();
      EXPECT_LE(transport->most - before, 6 * DeepImpl::layer_bytes);
      EXPECT_GE(transport->most - before, DeepImpl::layer_bytes);
    }
    training.step();
    training.zero_grad();
  }
}

INSTANTIATE_TEST_SUITE_P(All, JoinStrategies,
                         testing::Values("ddp", "zero1", "zero2", "megatron", "megatron_in_grads", "fsdp",
                                         "fsdp_grad_op", "fsdp_no_shard", "fsdp_hybrid"),
                         [](const auto& info) { return info.param; });

// Chunks of one model, whose buckets leave in turns, and reductions that wait for step().
TEST(JoinMegatron, BEY03_several_chunks_and_late_reductions) {
  for (const bool overlap : {true, false}) {
    auto model = test::seeded(3);
    DistributedOptimizer<torch::optim::SGD> optimizer(
        DistributedOptimizerCore::Modules{model->first.ptr(), model->second.ptr(), model->third.ptr()}, sgd, group(),
        {.overlap_grad_reduce = overlap, .bucket_size = 100});
    Join join({optimizer}, {.divide_by_initial_world_size = false});
    for (int64_t step = 0; join.next(step < five_and_rank(group().rank())); ++step) {
      if (join.active()) {
        mean_loss(model->forward(batch(group().rank(), step))).backward();
      } else {
        optimizer.shadow();
      }
      optimizer.DistributedOptimizerCore::step();
      optimizer.zero_grad();
    }
    EXPECT_LT(difference(model->parameters(), reference(five_and_rank, active(five_and_rank))), 1e-12)
        << "overlap " << overlap;
  }
}

// Layers that are used in the reverse order of their registration.
struct BackwardsImpl : test::MlpImpl {
  BackwardsImpl() : test::MlpImpl(12, 12, 12) {}
  at::Tensor forward(at::Tensor x) { return first(torch::tanh(second(torch::tanh(third(x))))); }
};

TEST(JoinUse, DDP04_the_order_of_arrival_is_that_of_a_rank_with_a_batch) {
  DistributedDataParallel parallel(std::make_shared<BackwardsImpl>(), group(),
                                   {.bucket_cap_mb = 1e-3, .first_bucket_mb = 1e-3});
  Join join({parallel});
  for (int64_t step = 0; join.next(group().rank() == group().size() - 1 && step < 3); ++step) {
    if (join.active()) {
      mean_loss(parallel.forward(batch(group().rank(), step))).backward();
    } else {
      parallel.shadow();
    }
    parallel->zero_grad();
  }
  const auto buckets = parallel.buckets();
  ASSERT_EQ(buckets.size(), 3U);
  EXPECT_EQ(buckets.front().front().substr(0, 5), "first");
  EXPECT_EQ(buckets.back().front().substr(0, 5), "third");
}

void expect_refused(const std::function<void()>& act, const std::string& because) {
  try {
    act();
    ADD_FAILURE() << because;
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find(because), std::string::npos) << error.what();
  }
}

TEST(JoinUse, BEY03_refuses_what_cannot_work) {
  auto training = make("ddp");
  expect_refused([&] { Join({}); }, "at least one wrapper");
  expect_refused([&] { training.shadow(); }, "Join scope");
  Join join({training});
  ASSERT_TRUE(join.next(true));
  EXPECT_EQ(join.active_ranks(), group().size());
  expect_refused([&] { training.shadow(); }, "this rank has no batch");

  torch::nn::Sequential norm(torch::nn::Linear(12, 4), SyncBatchNorm(4, group()));
  DistributedDataParallel parallel(norm, group());
  expect_refused([&] { Join({parallel}); }, "1 is a SyncBatchNorm");
  EXPECT_NO_THROW(Join({parallel}, {.throw_on_early_termination = true}));

  if (group().size() == 1) return;
  auto alone = make("ddp", test::TrainingOptions(), group().subgroup({group().rank()}));
  expect_refused([&] { Join({training, alone}); }, "of 1 in another");
}

}  // namespace
}  // namespace shoal
