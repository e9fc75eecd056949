// Join with buffers, with several wrappers or chunks, and in other orders; its memory and its errors.

#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "comm/group/group_state.h"
#include "comm/rendezvous/world_state.h"
#include "shoal/error.h"
#include "shoal/sync_batch_norm.h"
#include "tests/strategy/all/join_training.h"
#include "tests/support/with_transport.h"

namespace shoal::test::join_modules_test {
namespace {

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

// While training, the lowest rank with a batch counts (Megatron, FSDP: each rank has its own); at the end, the last
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

// The second model trains on the first one's outputs.
TEST_P(JoinStrategies, BEY03_several_wrappers_in_one_scope) {
  const auto make_pair = [] { return std::pair(Mlp(12, 8, 12), Mlp(12, 8, 3)); };
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

// Transport that records this process's shared memory when collectives are issued.
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

// Buckets that only help other ranks' sums are allocated and freed as in a backward. Rank 0 has no batch.
TEST(JoinMemory, SDP02_a_shadow_holds_its_share_and_few_buckets_more) {
  if (group().transport() != "host") GTEST_SKIP() << "what is metered is memory that ranks share";
  std::shared_ptr<MeteredTransport> transport;
  const auto metered = with_transport(group(), [&](std::shared_ptr<Transport> inner) {
    return transport = std::make_shared<MeteredTransport>(std::move(inner));
  });
  auto training = make_of("zero2", std::make_shared<DeepImpl>(), {.bucket_mb = 0.5}, metered);
  Join join({training});
  const auto before = MeteredTransport::bytes();  // includes the share
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

// Chunks of one model, whose buckets take turns, and reductions that wait for step().
TEST(JoinMegatron, BEY03_several_chunks_and_late_reductions) {
  for (const bool overlap : {true, false}) {
    auto model = seeded(3);
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

// Model that uses its layers in the reverse order of their registration.
struct BackwardsImpl : MlpImpl {
  BackwardsImpl() : MlpImpl(12, 12, 12) {}
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
  expect_refused([&] { training.shadow(); }, "outside a Join scope");
  Join join({training});
  ASSERT_TRUE(join.next(true));
  EXPECT_EQ(join.active_ranks(), group().size());
  expect_refused([&] { training.shadow(); }, "this rank has a batch");

  torch::nn::Sequential norm(torch::nn::Linear(12, 4), SyncBatchNorm(4, group()));
  DistributedDataParallel parallel(norm, group());
  expect_refused([&] { Join({parallel}); }, "1 is a SyncBatchNorm");
  EXPECT_NO_THROW(Join({parallel}, {.throw_on_early_termination = true}));

  if (group().size() == 1) return;
  auto alone = make("ddp", TrainingOptions(), group().subgroup({group().rank()}));
  expect_refused([&] { Join({training, alone}); }, "of 1 in another");
}

}  // namespace
}  // namespace shoal::test::join_modules_test
