// BEY10: an exception anywhere, on one rank or all, leaves any strategy able to continue. Chunks and pipeline stages
// are in megatron_chunks_test.cpp and megatron_stages_test.cpp, several wrappers in two_wrappers_test.cpp; gossip,
// which has no collectives in a step, is in decentralized_rules_test.cpp, gossip_faults_test.cpp and
// shard_gossip_test.cpp.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <torch/autograd.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <numeric>

#include "shoal/call_log.h"
#include "shoal/ddp.h"
#include "shoal/error.h"
#include "shoal/local_updates.h"
#include "tests/support/models.h"
#include "tests/support/refusal.h"
#include "tests/support/training.h"
#include "tests/support/with_transport.h"
#include "tests/support/world.h"

namespace shoal::faults_test {
namespace {

using test::batch;
using test::difference;
using test::group;

// before_gradients: of a backward that has reached the output. below: behind the module's last gradient.
enum class Point { forward, before_gradients, first_gradient, last_gradient, below, collective };

struct Injected : std::runtime_error {
  Injected() : std::runtime_error("injected") {}
};

struct FaultyImpl : test::MlpImpl {
  at::Tensor forward(at::Tensor x) {
    if (fail == Point::forward) throw Injected();
    if (fail == Point::below) {
      x = x.clone().requires_grad_() * 1;
      fail_in_hook(x, Point::below);
    }
    auto y = test::MlpImpl::forward(std::move(x)).pow(2);
    if (fail == Point::before_gradients) fail_in_hook(y, Point::before_gradients);
    fail_in_hook(third->weight, Point::first_gradient);
    fail_in_hook(first->weight, Point::last_gradient);
    return y.mean();
  }
  std::optional<Point> fail;

 private:
  void fail_in_hook(at::Tensor& tensor, Point point) {
    if (hooked || fail != point) return;
    hooked = true;
    tensor.register_hook([this, point](const at::Tensor&) {
      if (fail == point) throw Injected();
    });
  }
  bool hooked = false;
};

// Transport that fails to issue a bucket's reduction on request; the transport below stays intact.
class FaultyTransport : public Transport {
 public:
  explicit FaultyTransport(std::shared_ptr<Transport> inner) : inner_(std::move(inner)) {}
  std::string name() const override { return inner_->name(); }
  at::Tensor allocate(int64_t numel, const at::TensorOptions& options) override {
    return inner_->allocate(numel, options);
  }
  std::unique_ptr<TransportWork> issue(const Call& call) override {
    if (call.label.bucket == bucket && std::exchange(fail, false)) throw Error("injected");
    return inner_->issue(call);
  }
  bool fail = false;
  int64_t bucket = 1;

 private:
  std::shared_ptr<Transport> inner_;
};

struct Trainer {
  explicit Trainer(const std::string& strategy)
      : training(test::Training<FaultyImpl>::make<torch::optim::SGD>(
            strategy, (torch::manual_seed(1), std::make_shared<FaultyImpl>()),
            test::with_transport(group(),
                                 [this](std::shared_ptr<Transport> inner) {
                                   return transport = std::make_shared<FaultyTransport>(std::move(inner));
                                 }),
            torch::optim::SGDOptions(0.1).momentum(0.9), {.bucket_mb = 1e-4})),
        model(training.model) {
    if (strategy == "megatron_no_overlap") transport->bucket = 0;  // the only one
  }

  void step(int64_t number) {
    training.zero_grad();
    training.forward(batch(group().rank(), number)).backward();
    training.step();
  }

  std::shared_ptr<FaultyTransport> transport;
  test::Training<FaultyImpl> training;
  std::shared_ptr<FaultyImpl> model;
};

// The same steps in one process.
std::vector<at::Tensor> reference(const std::vector<int64_t>& steps) {
  torch::manual_seed(1);
  FaultyImpl model;
  torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (const auto step : steps) {
    optimizer.zero_grad();
    for (int rank = 0; rank < group().size(); ++rank) (model.forward(batch(rank, step)) / group().size()).backward();
    optimizer.step();
  }
  return model.parameters();
}

void break_and_train_on(const std::string& strategy, Point point, const std::vector<int>& faulty, bool explicitly,
                        bool from_the_start) {
  SCOPED_TRACE(fmt::format("{}, point {}, rank {} first, said {}, start {}", strategy, static_cast<int>(point),
                           faulty[0], explicitly, from_the_start));
  Trainer trainer(strategy);
  std::vector<int64_t> good;
  if (!from_the_start) {
    for (const int64_t step : {0, 1, 2}) {
      trainer.step(step);
      good.push_back(step);
    }
  }
  const bool here = std::count(faulty.begin(), faulty.end(), group().rank()) > 0;
  if (here && point == Point::collective) trainer.transport->fail = true;
  if (here && point != Point::collective) trainer.model->fail = point;
  try {
    trainer.step(10);
    ADD_FAILURE() << "the step succeeded";
  } catch (const StepAbandoned& error) {
    EXPECT_FALSE(here) << error.what();
    EXPECT_NE(std::string(error.what()).find(fmt::format("rank {}", faulty[0])), std::string::npos) << error.what();
  } catch (const std::exception& error) {
    EXPECT_TRUE(here) << error.what();
    EXPECT_NE(std::string(error.what()).find("injected"), std::string::npos) << error.what();
  }
  trainer.model->fail.reset();
  // DistributedOptimizer sees no forward, so that the failing rank must call abandon_step(); wrappers know.
  const bool say_so = strategy.starts_with("megatron") ? here : explicitly;
  if (say_so) trainer.training.abandon_step();
  for (const int64_t step : {20, 21, 22}) {
    trainer.step(step);
    good.push_back(step);
  }
  EXPECT_LT(difference(trainer.model->parameters(), reference(good)), 1e-12);
}

// no_shard and hybrid strategies reduce over groups of their own, whose transport this test does not replace;
// hook_faults_test.cpp covers no_shard.
bool sums_over_its_group(const std::string& strategy) {
  return strategy != "fsdp_no_shard" && !strategy.starts_with("fsdp_hybrid");
}

void try_all(const std::string& strategy, const std::vector<int>& faulty) {
  for (const auto point : {Point::forward, Point::first_gradient, Point::last_gradient, Point::collective}) {
    if (point == Point::collective && !sums_over_its_group(strategy)) continue;
    for (const bool explicitly : {true, false}) {
      for (const bool from_the_start : {true, false}) {
        break_and_train_on(strategy, point, faulty, explicitly, from_the_start);
      }
    }
  }
  for (const auto point : {Point::before_gradients, Point::below}) {
    for (const bool from_the_start : {true, false}) {
      break_and_train_on(strategy, point, faulty, /*explicitly=*/false, from_the_start);
    }
  }
}

// Whether forwards gather parameters, so that all ranks must call as many.
bool gathers(const std::string& strategy) {
  return strategy.starts_with("fsdp") && strategy != "fsdp_no_shard" && group().transport() != "host";
}

class Faults : public testing::TestWithParam<std::string> {};

TEST_P(Faults, BEY10_an_exception_on_one_rank_ends_the_step_on_all_and_training_goes_on) {
  try_all(GetParam(), {0});
  try_all(GetParam(), {group().size() - 1});
}

TEST_P(Faults, BEY10_an_exception_on_all_ranks_is_everybodys_own) {
  std::vector<int> all(group().size());
  std::iota(all.begin(), all.end(), 0);
  try_all(GetParam(), all);
}

TEST_P(Faults, BEY10_an_exception_in_a_local_backward_loses_only_that_step) {
  Trainer trainer(GetParam());
  trainer.step(0);
  trainer.training.zero_grad();
  if (group().rank() == 0) trainer.model->fail = Point::last_gradient;
  {
    const auto local = trainer.training.no_sync(true);
    const auto backward = [&] { trainer.training.forward(batch(group().rank(), 10)).backward(); };
    if (group().rank() == 0) {
      EXPECT_THROW(backward(), Injected);
    } else {
      backward();
    }
  }
  trainer.model->fail.reset();
  if (!GetParam().starts_with("megatron")) trainer.training.abandon_step();  // on all ranks
  trainer.step(1);
  EXPECT_LT(difference(trainer.model->parameters(), reference({0, 1})), 1e-12);
}

TEST_P(Faults, BEY10_micro_batches_after_a_step_that_failed_are_a_step_of_their_own) {
  for (const auto& [point, broken] : std::vector<std::pair<Point, int64_t>>{
           {Point::forward, 0}, {Point::last_gradient, 0}, {Point::forward, 1}, {Point::last_gradient, 1}}) {
    SCOPED_TRACE(fmt::format("point {} of micro-batch {}", static_cast<int>(point), broken));
    Trainer trainer(GetParam());
    const bool fails = group().rank() == 0;
    for (const int64_t step : {0, 1, 2}) {
      try {
        trainer.training.zero_grad();
        for (const int64_t micro : {0, 1}) {
          if (fails && step == 1 && micro == broken) trainer.model->fail = point;
          const auto local = trainer.training.no_sync(micro == 0);
          trainer.training.forward(batch(group().rank(), step, micro)).backward();
        }
        trainer.training.step();
        EXPECT_NE(step, 1);
      } catch (const std::runtime_error& error) {
        EXPECT_EQ(step, 1) << error.what();
        trainer.model->fail.reset();
        // DistributedOptimizer sees no forward; and an exception under no_sync may be of a micro-batch that is left
        // out.
        if (fails && (GetParam().starts_with("megatron") || broken == 0)) trainer.training.abandon_step();
      }
    }
    torch::manual_seed(1);
    FaultyImpl model;
    torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (const int64_t step : {0, 2}) {
      optimizer.zero_grad();
      for (int rank = 0; rank < group().size(); ++rank) {
        for (const int64_t micro : {0, 1}) (model.forward(batch(rank, step, micro)) / group().size()).backward();
      }
      optimizer.step();
    }
    EXPECT_LT(difference(trainer.model->parameters(), model.parameters()), 1e-12);
  }
}

TEST_P(Faults, BEY10_a_backward_after_one_that_failed_is_refused_until_the_step_is_abandoned) {
  if (GetParam() == "megatron_no_overlap") GTEST_SKIP() << "its backwards are local: they only add to grad()";
  Trainer trainer(GetParam());
  trainer.step(0);
  trainer.training.zero_grad();
  trainer.model->fail = Point::last_gradient;
  const auto loss = trainer.training.forward(batch(group().rank(), 10));
  EXPECT_THROW(loss.backward({}, /*keep_graph=*/true), Injected);
  trainer.model->fail.reset();
  const auto text = test::refusal([&] { loss.backward(); });
  EXPECT_NE(text.find("the last backward failed in the middle of a step"), std::string::npos) << text;
  trainer.training.abandon_step();
  trainer.step(1);
  EXPECT_LT(difference(trainer.model->parameters(), reference({0, 1})), 1e-12);
}

TEST_P(Faults, BEY10_a_backward_that_failed_before_its_first_gradient_may_be_run_again) {
  Trainer trainer(GetParam());
  trainer.step(0);
  trainer.training.zero_grad();
  const bool here = group().rank() == 0;
  if (here) trainer.model->fail = Point::before_gradients;
  const auto loss = trainer.training.forward(batch(group().rank(), 1));
  if (here) EXPECT_THROW(loss.backward({}, /*keep_graph=*/true), Injected);
  trainer.model->fail.reset();
  loss.backward();
  trainer.training.step();
  trainer.step(2);
  EXPECT_LT(difference(trainer.model->parameters(), reference({0, 1, 2})), 1e-12);
}

TEST_P(Faults, BEY10_an_evaluation_in_a_hook_of_backward_changes_nothing) {
  Trainer trainer(GetParam());
  trainer.step(0);
  trainer.model->second->weight.register_hook([&](const at::Tensor&) {
    const torch::NoGradGuard no_grad;
    trainer.training.forward(batch(group().rank(), 10));
  });
  for (const int64_t step : {1, 2}) trainer.step(step);
  EXPECT_LT(difference(trainer.model->parameters(), reference({0, 1, 2})), 1e-12);
}

TEST_P(Faults, BEY10_an_exception_in_the_loss_ends_the_step_on_all_where_abandon_step_is_called) {
  for (const int faulty : {0, group().size() - 1}) {
    Trainer trainer(GetParam());
    trainer.step(0);
    trainer.training.zero_grad();
    auto output = trainer.training.forward(batch(group().rank(), 10));
    if (group().rank() == faulty) {
      output.reset();
      trainer.training.abandon_step();
    } else {
      const auto rest = [&] {
        output.backward();
        trainer.training.step();
      };
      EXPECT_THROW(rest(), StepAbandoned);
    }
    trainer.step(1);
    EXPECT_LT(difference(trainer.model->parameters(), reference({0, 1})), 1e-12);
  }
}

// As programs do that skip a bad batch: in one handler on all ranks.
TEST_P(Faults, BEY10_all_ranks_may_call_abandon_step_in_one_handler) {
  Trainer trainer(GetParam());
  int abandoned = 0;
  for (int64_t step = 0; step < 6; ++step) {
    try {
      trainer.training.zero_grad();
      auto output = trainer.training.forward(batch(group().rank(), step));
      if (step == 2 && group().rank() == group().size() - 1) {
        output.reset();
        throw Injected();
      }
      output.backward();
      trainer.training.step();
    } catch (const std::exception&) {
      ++abandoned;
      trainer.training.abandon_step();
    }
  }
  EXPECT_EQ(abandoned, 1);
  EXPECT_LT(difference(trainer.model->parameters(), reference({0, 1, 3, 4, 5})), 1e-12);
}

// A step leaves sums, the next one fails, and zero_grad() follows, in either form. Where the failing rank says so
// first, which OSS needs before its step(), the loop goes on to step(): with zeros, momentum moves the parameters, on
// all ranks alike.
void zero_after_a_failure(const std::string& strategy, Point point, const std::vector<int>& faulty, bool says_so,
                          bool to_none) {
  SCOPED_TRACE(
      fmt::format("point {}, {} ranks, said {}, to none {}", static_cast<int>(point), faulty.size(), says_so, to_none));
  const bool here = std::count(faulty.begin(), faulty.end(), group().rank()) > 0;
  const bool updates = says_so || strategy == "ddp" || strategy == "fsdp";
  Trainer trainer(strategy);
  trainer.step(0);
  if (here) trainer.model->fail = point;
  EXPECT_ANY_THROW(trainer.training.forward(batch(group().rank(), 10)).backward());
  trainer.model->fail.reset();
  if (here && (says_so || strategy.starts_with("megatron"))) trainer.training.abandon_step();
  trainer.training.optimizer().zero_grad(to_none);
  if (updates) trainer.training.step();
  trainer.training.forward(batch(group().rank(), 1)).backward();
  trainer.training.step();

  torch::manual_seed(1);
  FaultyImpl model;
  torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (const int64_t step : {0, 1}) {
    for (int rank = 0; rank < group().size(); ++rank) (model.forward(batch(rank, step)) / group().size()).backward();
    optimizer.step();
    if (step == 0) optimizer.zero_grad(to_none);
    if (step == 0 && updates) optimizer.step();
  }
  EXPECT_LT(difference(trainer.model->parameters(), model.parameters()), 1e-12);
}

TEST_P(Faults, BEY10_zero_grad_after_a_failed_step_holds_for_what_was_before_it) {
  if (GetParam() == "megatron_no_overlap") GTEST_SKIP() << "other ranks do not hear of it before step()";
  if (GetParam() == "megatron_in_grads")
    GTEST_SKIP() << "nothing can be added to gradients that have given their memory";
  std::vector<int> all(group().size());
  std::iota(all.begin(), all.end(), 0);
  const std::vector<int> last{group().size() - 1};
  for (const bool to_none : {true, false}) {
    zero_after_a_failure(GetParam(), Point::last_gradient, all, /*says_so=*/false, to_none);
    zero_after_a_failure(GetParam(), Point::last_gradient, last, /*says_so=*/false, to_none);
    zero_after_a_failure(GetParam(), Point::last_gradient, last, /*says_so=*/true, to_none);
    zero_after_a_failure(GetParam(), Point::forward, last, /*says_so=*/true, to_none);
  }
}

TEST_P(Faults, BEY10_ranks_that_are_a_step_apart_are_refused) {
  if (GetParam().starts_with("megatron")) GTEST_SKIP() << "DistributedOptimizer sees no forward";
  if (group().size() == 1) GTEST_SKIP() << "needs other ranks";
  if (gathers(GetParam())) GTEST_SKIP() << "its gathers notice it first";
  Trainer trainer(GetParam());
  trainer.step(0);
  trainer.training.zero_grad();
  const int behind = group().size() - 1;
  if (group().rank() == behind) trainer.training.forward(batch(behind, 10));  // as if its loss had thrown
  const auto expect_refusal = [&](int64_t step) {
    const auto text = test::refusal([&] { trainer.step(step); });
    EXPECT_THAT(text, testing::AllOf(testing::HasSubstr(fmt::format("rank {} ran a forward whose result", behind)),
                                     testing::HasSubstr("may have met"), testing::HasSubstr("NoGradGuard"),
                                     testing::HasSubstr("call abandon_step()")));
  };
  expect_refusal(11);
  expect_refusal(12);  // without communication: the ranks stay apart
}

// As programs do on rank 0 that forget NoGradGuard.
TEST_P(Faults, BEY10_an_evaluation_on_one_rank_needs_no_backward) {
  Trainer trainer(GetParam());
  for (const int64_t step : {0, 1, 2}) trainer.step(step);
  trainer.model->eval();
  if (group().rank() == 0 && !gathers(GetParam())) trainer.training.forward(batch(0, 10));
  trainer.model->train();
  trainer.step(3);
  EXPECT_LT(difference(trainer.model->parameters(), reference({0, 1, 2, 3})), 1e-12);
}

TEST_P(Faults, BEY10_forwards_that_all_ranks_drop_or_use_in_different_numbers_are_right) {
  Trainer trainer(GetParam());
  trainer.step(0);
  for (int again = 0; again < 70; ++again) trainer.training.forward(batch(group().rank(), 10));
  trainer.step(1);
  trainer.training.zero_grad();
  const int parts = gathers(GetParam()) ? 2 : group().rank() + 1;
  at::Tensor sum;
  for (int part = 0; part < parts; ++part) {
    const auto loss = trainer.training.forward(batch(group().rank(), 2)) / parts;
    sum = part == 0 ? loss : sum + loss;
  }
  sum.backward();
  trainer.training.step();
  EXPECT_LT(difference(trainer.model->parameters(), reference({0, 1, 2})), 1e-12);
}

TEST_P(Faults, dropping_a_strategy_removes_its_hooks) {
  const bool pairs = GetParam().starts_with("fsdp_hybrid") && group().size() % 2 == 0;
  const bool pages = group().size() > 1 && group().transport() != "host" &&
                     (GetParam() == "fsdp" || GetParam() == "fsdp_grad_op" || pairs);
  if (pages) GTEST_SKIP() << "the parameters of a wrapper that has gone are on all ranks in parts";
  auto model = (torch::manual_seed(1), std::make_shared<FaultyImpl>());
  auto log = std::make_shared<CallLog>();
  const auto make = [&](const Group& on) {
    return test::Training<FaultyImpl>::make<torch::optim::SGD>(GetParam(), model, on, torch::optim::SGDOptions(0.1));
  };
  make(group().recorded(log));
  log->clear();
  model->forward(batch(0, 0)).backward();
  EXPECT_EQ(log->records().size(), 0U);
  auto again = make(group());
  again.zero_grad();
  model->zero_grad();
  again.forward(batch(group().rank(), 0)).backward();
  again.step();
}

TEST_P(Faults, BEY10_a_backward_whose_wrapper_is_gone_is_refused) {
  if (GetParam().starts_with("megatron")) GTEST_SKIP() << "DistributedOptimizer sees no forward";
  if (gathers(GetParam())) GTEST_SKIP() << "the parameters of a wrapper that has gone are on all ranks in parts";
  const auto x = batch(group().rank(), 0).requires_grad_();
  const auto loss = Trainer(GetParam()).training.forward(x);
  EXPECT_TRUE(torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true).front().defined());
  const auto text = test::refusal([&] { loss.backward(); });
  EXPECT_THAT(text, testing::AllOf(testing::HasSubstr("wrapper is gone by now"), testing::HasSubstr("first.weight"),
                                   testing::HasSubstr("Keep the wrapper")));
}

// Steps without collectives: the failing rank still takes part in exchanges, with its present values.
TEST(LocalFaults, BEY10_local_updates_count_a_step_that_failed_on_a_rank) {
  for (const auto point : {Point::forward, Point::first_gradient, Point::last_gradient}) {
    const auto make = [] { return (torch::manual_seed(1), std::make_shared<FaultyImpl>()); };
    const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
    auto model = make();
    torch::optim::SGD optimizer(model->parameters(), options);
    LocalUpdates local(std::static_pointer_cast<torch::nn::Module>(model), optimizer, group(), {.every = 2});
    std::vector<std::shared_ptr<FaultyImpl>> simulated;
    std::vector<std::unique_ptr<torch::optim::SGD>> optimizers;
    for (int rank = 0; rank < group().size(); ++rank) {
      simulated.push_back(make());
      optimizers.push_back(std::make_unique<torch::optim::SGD>(simulated.back()->parameters(), options));
    }
    for (int64_t step = 0; step < 6; ++step) {
      const auto fails = [&](int rank) { return rank == 0 && step == 2; };
      if (fails(group().rank())) model->fail = point;
      bool good = true;
      try {
        model->forward(batch(group().rank(), step)).backward();
      } catch (const Injected&) {
        good = false;
      }
      EXPECT_EQ(good, !fails(group().rank()));
      model->fail.reset();
      local.step(good);
      local.zero_grad();
      for (int rank = 0; rank < group().size(); ++rank) {
        if (fails(rank)) continue;
        optimizers[rank]->zero_grad();
        simulated[rank]->forward(batch(rank, step)).backward();
        optimizers[rank]->step();
      }
      const torch::NoGradGuard no_grad;
      for (size_t i = 0; step % 2 == 1 && i < model->parameters().size(); ++i) {
        auto mean = at::zeros_like(model->parameters()[i]);
        for (const auto& one : simulated) mean += one->parameters()[i] / group().size();
        for (const auto& one : simulated) one->parameters()[i].copy_(mean);
      }
      ASSERT_LT(difference(model->parameters(), simulated[group().rank()]->parameters()), 1e-12) << "step " << step;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Strategies, Faults,
                         testing::Values("ddp", "zero1", "zero2", "megatron", "megatron_in_grads",
                                         "megatron_no_overlap", "megatron_late_gather", "fsdp", "fsdp_grad_op",
                                         "fsdp_no_shard", "fsdp_hybrid", "fsdp_hybrid_grad_op"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace shoal::faults_test
