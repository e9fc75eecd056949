// Orders of destruction: wrapper, optimizer and module.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>

#include "shoal/error.h"
#include "tests/strategy/fsdp/fsdp_training.h"
#include "tests/support/refusal.h"

namespace shoal::test::fsdp_lifetime_test {
namespace {

using Parallel = FullyShardedDataParallel<MlpImpl>;
using Optimizer = FullyShardedOptimizer<torch::optim::SGD>;

std::vector<Options> strategies() {
  std::vector<Options> list;
  for (const auto strategy : {ShardingStrategy::full_shard, ShardingStrategy::shard_grad_op, ShardingStrategy::no_shard,
                              ShardingStrategy::hybrid_shard, ShardingStrategy::hybrid_shard_grad_op}) {
    auto options = by_layer();
    options.sharding_strategy = strategy;
    const bool hybrid =
        strategy == ShardingStrategy::hybrid_shard || strategy == ShardingStrategy::hybrid_shard_grad_op;
    if (hybrid) options.shard_size = group().size() % 2 == 0 ? 2 : 1;
    list.push_back(options);
  }
  return list;
}

at::Tensor loss_of(MlpImpl& model) {
  return mean_loss(model.forward(batch(group().rank(), 0)));
}

TEST(Fsdp, an_optimizer_that_outlives_its_wrapper_applies_what_has_been_summed_up_and_refuses_what_has_not) {
  auto reference = seeded(1);
  torch::optim::SGD reference_optimizer(reference->parameters(), sgd);
  for (int rank = 0; rank < group().size(); ++rank) {
    (mean_loss(reference->forward(batch(rank, 0))) / group().size()).backward();
  }
  reference_optimizer.step();
  for (const auto& options : strategies()) {
    const auto model = make_mlp();
    std::optional<Parallel> parallel;
    parallel.emplace(model, group(), options);
    Optimizer optimizer(*parallel, sgd);
    mean_loss(parallel->forward(batch(group().rank(), 0))).backward();
    parallel.reset();
    optimizer.step();
    optimizer.zero_grad();
    EXPECT_LT(difference(model->parameters(), reference->parameters()), 1e-12);
    // From now on, the caller runs backwards without the wrapper.
    loss_of(*model).backward();
    EXPECT_TRUE(model->first->weight.grad().defined());
    EXPECT_THAT(refusal([&] { optimizer.step(); }),
                testing::HasSubstr("the wrapper was destroyed before the backward"));
    EXPECT_LT(difference(model->parameters(), reference->parameters()), 1e-12) << "nothing has changed";
  }
}

// After each order, the parameters are the module's own again, if all were in memory.
TEST(Fsdp, wrapper_and_optimizer_may_go_in_any_order_and_at_any_time) {
  for (const auto& options : strategies()) {
    for (const bool optimizer_first : {true, false}) {
      for (const int backwards : {0, 1, 2}) {
        const auto model = make_mlp();
        auto parallel = std::make_unique<Parallel>(model, group(), options);
        auto optimizer = std::make_unique<Optimizer>(*parallel, sgd);
        const bool shared = parallel->shared();
        for (int i = 0; i < backwards; ++i) {
          mean_loss(parallel->forward(batch(group().rank(), i))).backward();
          if (i > 0) optimizer->step();
        }
        if (optimizer_first) {
          optimizer.reset();
          mean_loss(parallel->forward(batch(group().rank(), 0))).backward();
          parallel.reset();
        } else {
          parallel.reset();
          optimizer.reset();
        }
        if (!shared) continue;
        model->zero_grad();
        loss_of(*model).backward();
        EXPECT_TRUE(model->third->weight.grad().defined());
      }
    }
  }
}

TEST(Fsdp, unwrap_gives_the_module_its_parameters_back_and_nothing_of_the_wrapper_works_afterwards) {
  for (auto options : strategies()) {
    for (const bool narrow : {false, true}) {
      if (narrow) options.param_dtype = at::kBFloat16;
      const auto model = std::make_shared<MlpImpl>(12, 16, 5, at::kFloat);
      Parallel parallel(model, group(), options);
      Optimizer optimizer(parallel, sgd);
      const auto x = batch(group().rank(), 0).to(at::kFloat);
      mean_loss(parallel.forward(x)).backward();
      optimizer.step();
      optimizer.zero_grad();
      const auto before = parallel.full_state_dict();
      parallel.unwrap();
      for (const auto& item : model->named_parameters()) {
        EXPECT_EQ(item.value().scalar_type(), at::kFloat) << item.key();
        EXPECT_TRUE(at::equal(item.value(), before.at(item.key()))) << item.key();
        EXPECT_NE(item.value().data_ptr(), nullptr);
      }
      torch::optim::SGD alone(model->parameters(), sgd);
      mean_loss(model->forward(x)).backward();
      alone.step();
      const auto after = model->first->weight.detach().clone();
      const auto refused = [](const auto& act) {
        EXPECT_THAT(refusal(act), testing::HasSubstr("cannot be used after unwrap()"));
      };
      refused([&] { parallel.forward(x); });
      refused([&] {
        const torch::NoGradGuard no_grad;
        parallel.forward(x);
      });
      refused([&] { optimizer.step(); });
      refused([&] { parallel.clip_grad_norm_(1); });
      refused([&] { parallel.full_state_dict(); });
      refused([&] { const auto whole = parallel.summon_full_params(); });
      refused([&] { parallel.unwrap(); });
      EXPECT_TRUE(at::equal(model->first->weight, after)) << "nothing has changed";
      model->zero_grad();
      Parallel again(model, group(), options);  // while the old one is there
      mean_loss(again.forward(x)).backward();
    }
  }
}

// Also with one unit, which is in memory after backward; how many ranks have it there depends on their pace.
TEST(Fsdp, a_module_whose_wrapper_has_gone_is_refused_on_all_ranks_or_goes_on) {
  for (const bool units : {true, false}) {
    const auto model = make_mlp();
    auto parallel = std::make_unique<Parallel>(model, group(), units ? by_layer() : Options());
    auto optimizer = std::make_unique<Optimizer>(*parallel, sgd);
    const bool shared = parallel->shared();
    mean_loss(parallel->forward(batch(group().rank(), 0))).backward();
    parallel.reset();
    optimizer.reset();
    if (shared) {
      Parallel again(model, group());
    } else {
      EXPECT_THAT(refusal([&] { Parallel again(model, group()); }), testing::HasSubstr("call its unwrap() before"));
    }
    group().barrier().wait();
  }
}

// Also destroys the module while autograd's graph exists.
TEST(Fsdp, a_graph_may_outlive_all_of_them) {
  for (const auto& options : strategies()) {
    at::Tensor loss;
    {
      Parallel parallel(make_mlp(), group(), options);
      if (!parallel.shared()) GTEST_SKIP() << "parameters are gone with the wrapper";
      Optimizer optimizer(parallel, sgd);
      loss = mean_loss(parallel.forward(batch(group().rank(), 0)));
    }
    EXPECT_NE(refusal([&] { loss.backward(); }).find("wrapper is gone"), std::string::npos);
  }
}

}  // namespace
}  // namespace shoal::test::fsdp_lifetime_test
