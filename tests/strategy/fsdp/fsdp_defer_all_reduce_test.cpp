// Micro-batches whose gradients are reduce-scattered within a host, and summed across hosts once a step (row BEY08).

#include <torch/optim/sgd.h>
#include <torch/types.h>

#include "engine/buckets/step_trailer.h"
#include "shoal/call_log.h"
#include "shoal/error.h"
#include "tests/strategy/all/even.h"
#include "tests/strategy/fsdp/fsdp_training.h"

namespace shoal::test::fsdp_defer_all_reduce_test {
namespace {

// "Hosts" of two ranks each if the number of ranks is even, else of one.
int host_size() {
  return group().size() % 2 == 0 ? 2 : 1;
}
bool several_hosts() {
  return group().size() > host_size();
}

enum class Way { at_end, each, deferred };

struct Trained {
  explicit Trained(bool whole = false, std::shared_ptr<CommunicationHook> hook = nullptr,
                   ShardingStrategy strategy = ShardingStrategy::hybrid_shard)
      : log(std::make_shared<CallLog>()), model(std::make_shared<EvenImpl>()) {
    auto options = by_layer();
    options.sharding_strategy = strategy;
    if (strategy == ShardingStrategy::hybrid_shard) options.shard_size = host_size();
    options.shard_by_parameter = whole;
    options.communication_hook = std::move(hook);
    parallel = std::make_unique<FullyShardedDataParallel<EvenImpl>>(model, group().recorded(log), options);
    optimizer = std::make_unique<FullyShardedOptimizer<torch::optim::SGD>>(*parallel, sgd);
  }

  // One micro-batch; weighted: by its number of samples, which differs between ranks.
  void run(Way way, bool last, int64_t step, int64_t micro, bool weighted = false) {
    const auto local = parallel->no_sync(way == Way::at_end && !last);
    const auto deferred = parallel->defer_all_reduce(way == Way::deferred && !last);
    const auto samples = weighted ? 1 + (group().rank() + 2 * micro + step) % 4 : 4;
    const auto y = parallel->forward(batch(group().rank(), step, micro, samples, 16)).pow(2);
    weighted ? parallel->backward(y.sum(), static_cast<double>(samples)) : y.mean().backward();
  }
  void train(Way way, int64_t micros, bool weighted = false) {
    for (int64_t step = 0; step < 3; ++step) {
      if (step == 2) log->clear();
      for (int64_t micro = 0; micro < micros; ++micro) run(way, micro + 1 == micros, step, micro, weighted);
      if (step == 2) cost = {bytes(Op::reduce_scatter) + bytes(Op::reduce), bytes(Op::all_reduce)};
      optimizer->step();
      optimizer->zero_grad();
    }
  }
  int64_t bytes(Op op) const {
    int64_t sum = 0;
    for (const auto& record : log->records()) sum += record.op == op ? record.bytes : 0;
    return sum;
  }

  std::shared_ptr<CallLog> log;
  std::shared_ptr<EvenImpl> model;
  std::unique_ptr<FullyShardedDataParallel<EvenImpl>> parallel;
  std::unique_ptr<FullyShardedOptimizer<torch::optim::SGD>> optimizer;
  struct Cost {
    int64_t within = 0;  // bytes
    int64_t across = 0;
  } cost;
};

class Deferred : public testing::TestWithParam<bool> {};

TEST_P(Deferred, BEY08_gradients_cross_between_hosts_once_a_step) {
  const int64_t facts = StepTrailer::numel(even_gradients) * 8;  // of every backward that communicates, in float64
  for (const int64_t micros : {1, 2, 4, 8}) {
    Trained at_end(GetParam()), each(GetParam()), deferred(GetParam());
    at_end.train(Way::at_end, micros);
    each.train(Way::each, micros);
    deferred.train(Way::deferred, micros);
    // With whole parameters each rank has some: the mean over ranks.

    const int64_t crosses = several_hosts() ? even_payload / host_size() : 0;
    const auto all_of_host = [&](const Trained& training, int64_t times_facts) {
      auto sum = at::full({1}, training.cost.across - times_facts * facts, at::kLong);
      group().all_reduce(sum).wait();
      return sum.item<int64_t>() / group().size();
    };
    EXPECT_EQ(at_end.cost.within, even_payload);
    EXPECT_EQ(each.cost.within, micros * even_payload);
    EXPECT_EQ(deferred.cost.within, micros * even_payload);
    EXPECT_EQ(all_of_host(at_end, 1), crosses);
    EXPECT_EQ(all_of_host(each, micros), micros * crosses);
    EXPECT_EQ(all_of_host(deferred, micros), crosses);
    EXPECT_LT(difference(deferred.model->parameters(), at_end.model->parameters()), 1e-12) << micros;
    EXPECT_LT(difference(deferred.model->parameters(), each.model->parameters()), 1e-12) << micros;
  }
}

TEST_P(Deferred, BEY04_weights_of_all_micro_batches_count) {
  Trained at_end(GetParam()), deferred(GetParam());
  at_end.train(Way::at_end, 3, /*weighted=*/true);
  deferred.train(Way::deferred, 3, /*weighted=*/true);
  EXPECT_LT(difference(deferred.model->parameters(), at_end.model->parameters()), 1e-12);
}

// Hook that counts calls, and sums as without a hook.
struct CountingHook : SumHook {
  PendingExchange begin(const GradientBucket& bucket) override {
    ++calls;
    return SumHook::begin(bucket);
  }
  int64_t calls = 0;
};

TEST_P(Deferred, FSDP14_a_hook_sees_what_crosses) {
  if (!several_hosts()) GTEST_SKIP() << "nothing crosses";
  const auto hook = std::make_shared<CountingHook>();
  Trained at_end(GetParam()), deferred(GetParam(), hook);
  at_end.train(Way::at_end, 4);
  deferred.train(Way::deferred, 4);
  const auto total = at::full({1}, hook->calls, at::kLong);
  group().all_reduce(total).wait();
  EXPECT_EQ(total.item<int64_t>(), 3 * even_gradients * group().size() / (GetParam() ? host_size() : 1))
      << "once a step";
  EXPECT_LT(difference(deferred.model->parameters(), at_end.model->parameters()), 1e-12);
}

TEST_P(Deferred, BEY10_a_rank_that_fails_ends_the_step_on_all_and_what_was_deferred_is_void) {
  for (const auto failing : {0, 1, 2}) {  // micro-batch
    Trained broken(GetParam()), plain(GetParam());
    for (int64_t micro = 0; micro < 3; ++micro) {
      broken.model->fails = micro == failing && group().rank() == group().size() - 1;
      if (micro < failing) broken.run(Way::deferred, false, 0, micro);
      if (micro != failing) continue;
      if (broken.model->fails) {
        EXPECT_THROW(broken.run(Way::deferred, micro == 2, 0, micro), std::runtime_error);
        broken.model->fails = false;
        broken.parallel->abandon_step();
      } else {
        EXPECT_THROW(broken.run(Way::deferred, micro == 2, 0, micro), StepAbandoned);
      }
    }
    broken.optimizer->zero_grad();
    broken.train(Way::deferred, 3);
    plain.train(Way::at_end, 3);
    EXPECT_LT(difference(broken.model->parameters(), plain.model->parameters()), 1e-12) << failing;
  }
}

TEST_P(Deferred, BEY08_a_step_before_all_is_summed_up_is_refused_and_zero_grad_drops) {
  Trained training(GetParam()), plain(GetParam());
  training.run(Way::deferred, false, 7, 0);
  EXPECT_THROW(training.optimizer->step(), UsageError);
  EXPECT_THROW(training.parallel->clip_grad_norm_(1), UsageError);
  training.optimizer->zero_grad();
  training.train(Way::deferred, 2);
  plain.train(Way::at_end, 2);
  EXPECT_LT(difference(training.model->parameters(), plain.model->parameters()), 1e-12);
}

TEST_P(Deferred, BEY08_where_all_ranks_divide_the_model_it_adds_up_all_the_same) {
  Trained at_end(GetParam(), nullptr, ShardingStrategy::full_shard);
  Trained deferred(GetParam(), nullptr, ShardingStrategy::full_shard);
  at_end.train(Way::at_end, 3, /*weighted=*/true);
  deferred.train(Way::deferred, 3, /*weighted=*/true);
  EXPECT_LT(difference(deferred.model->parameters(), at_end.model->parameters()), 1e-12);
}

TEST_P(Deferred, BEY03_it_is_refused_in_a_join_scope) {
  Trained training(GetParam());
  Join join({*training.parallel});
  while (join.next(true)) {
    EXPECT_THROW(auto scope = training.parallel->defer_all_reduce(), UsageError);
    break;
  }
}

INSTANTIATE_TEST_SUITE_P(Owns, Deferred, testing::Bool(),
                         [](const auto& info) { return info.param ? "shard_by_parameter" : "ranges"; });

}  // namespace
}  // namespace shoal::test::fsdp_defer_all_reduce_test
