// LocalUpdates: results and communication (row BEY22).

#include "shoal/local_updates.h"

#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <cmath>

#include "shoal/ddp.h"
#include "shoal/error.h"
#include "tests/strategy/local_updates/local_updates_simulation.h"
#include "tests/support/world.h"

namespace shoal::local_updates_test {
namespace {

using test::batch;
using test::difference;
using test::group;
using test::mean_loss;
using test::Mlp;
using test::seeded;
using Options = LocalUpdatesOptions;

struct Injected : std::runtime_error {
  Injected() : std::runtime_error("injected") {}
};

// Model under LocalUpdates.
struct Trainer {
  explicit Trainer(const Options& options, int seed = 1 + group().rank(), const Group& over = group())
      : model(seeded(seed)), optimizer(test::two_rates(model)), local(model, *optimizer, over, options) {}

  void step(int64_t number) {
    mean_loss(model->forward(batch(group().rank(), number))).backward();
    local.step();
    local.zero_grad();
    test::lower_rates(*optimizer);
  }

  Mlp model;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  LocalUpdates local;
};

test::Simulation simulation_of(const Trainer& trainer, const Options& options, const test::Outer& outer) {
  return {group().size(),
          {.every = options.every,
           .outer = outer,
           .fragments = trainer.local.fragments(),
           .delay = options.delay,
           .alpha = options.alpha.value_or(options.delay > 0 ? 0.5 : 0),
           .warmup = options.warmup_steps}};
}

void expect_simulated(const Options& options, const test::Outer& outer) {
  SCOPED_TRACE(testing::Message() << "every " << options.every << ", fragments " << options.fragments << ", delay "
                                  << options.delay << ", outer " << options.outer.index());
  Trainer trainer(options);
  auto simulation = simulation_of(trainer, options, outer);
  for (int64_t step = 0; step < 20; ++step) {
    trainer.step(step);
    simulation.step(step);
    ASSERT_LT(difference(trainer.model->parameters(), simulation.parameters(group().rank())), 1e-11) << step;
  }
  EXPECT_EQ(trainer.local.steps(), 20);
}

TEST(LocalUpdates, BEY22_local_sgd_equals_a_simulation) {
  for (const int64_t every : {1, 4, 7}) expect_simulated({.every = every}, test::averaging());
}

TEST(LocalUpdates, BEY22_slowmo_equals_a_simulation) {
  expect_simulated({.every = 4, .outer = SlowMo{.slow_lr = 0.9, .slow_momentum = 0.6}}, test::slow_momentum(0.9, 0.6));
}

TEST(LocalUpdates, BEY22_diloco_equals_a_simulation) {
  expect_simulated({.every = 5, .outer = OuterNesterov{}}, test::outer_sgd(0.7, 0.9));
}

TEST(LocalUpdates, BEY22_streamed_fragments_equal_a_simulation) {
  for (const auto& [fragments, delay, alpha] : std::vector<std::tuple<int, int64_t, std::optional<double>>>{
           {3, 0, std::nullopt}, {1, 2, std::nullopt}, {2, 4, 0.25}, {5, 1, 0.0}}) {
    const auto with = [&, fragments = fragments, delay = delay, alpha = alpha](decltype(Options::outer) outer) {
      return Options{.every = 5, .outer = outer, .fragments = fragments, .delay = delay, .alpha = alpha};
    };
    expect_simulated(with(Averaging{}), test::averaging());
    expect_simulated(with(SlowMo{.slow_lr = 0.9, .slow_momentum = 0.6}), test::slow_momentum(0.9, 0.6));
    expect_simulated(with(OuterNesterov{.lr = 0.5, .momentum = 0.8}), test::outer_sgd(0.5, 0.8));
  }
}

TEST(LocalUpdates, BEY22_a_warm_up_has_the_mean_gradients) {
  expect_simulated({.every = 4, .outer = OuterNesterov{}, .fragments = 2, .warmup_steps = 6},
                   test::outer_sgd(0.7, 0.9));
}

TEST(LocalUpdates, BEY22_averaging_after_every_step_of_sgd_is_ddp) {
  Trainer trainer({.every = 1});
  auto model = seeded(1);
  DistributedDataParallel parallel(model, group());
  const auto optimizer = test::two_rates(model);
  for (int64_t step = 0; step < 20; ++step) {
    trainer.step(step);
    mean_loss(parallel.forward(batch(group().rank(), step))).backward();
    optimizer->step();
    optimizer->zero_grad();
    test::lower_rates(*optimizer);
    ASSERT_LT(difference(trainer.model->parameters(), model->parameters()), 1e-11) << step;
  }
}

TEST(LocalUpdates, BEY22_slowmo_without_momentum_is_local_sgd) {
  Trainer averaged({.every = 4});
  Trainer slow({.every = 4, .outer = SlowMo{.slow_lr = 1, .slow_momentum = 0}});
  for (int64_t step = 0; step < 20; ++step) {
    averaged.step(step);
    slow.step(step);
    ASSERT_LT(difference(slow.model->parameters(), averaged.model->parameters()), 1e-11) << step;
  }
}

TEST(LocalUpdates, BEY22_exchanges_are_as_many_and_as_large_as_the_formula_says) {
  const std::vector<std::pair<std::optional<at::ScalarType>, int64_t>> wires{
      {std::nullopt, 8}, {at::kFloat, 4}, {at::kBFloat16, 2}};
  for (const auto& [dtype, element_bytes] : wires) {
    for (const int fragments : {1, 3}) {
      const auto log = std::make_shared<CallLog>();
      constexpr int64_t every = 5;
      Trainer trainer({.every = every, .outer = OuterNesterov{}, .fragments = fragments, .reduce_dtype = dtype}, 1,
                      group().recorded(log));
      log->clear();
      for (int64_t step = 0; step < 4 * every; ++step) trainer.step(step);
      std::vector<int64_t> fragment_bytes;
      int64_t whole = 0;
      for (const auto& names : trainer.local.fragments()) {
        fragment_bytes.push_back(0);
        for (const auto& name : names) {
          fragment_bytes.back() += element_bytes * trainer.model->named_parameters()[name].numel();
        }
        whole += fragment_bytes.back();
      }
      int64_t parameter_bytes = 0;
      for (const auto& parameter : trainer.model->parameters()) parameter_bytes += element_bytes * parameter.numel();
      EXPECT_EQ(whole, parameter_bytes) << "every parameter is in one fragment";
      EXPECT_EQ(log->count(Op::all_reduce), 4 * fragments);
      EXPECT_EQ(log->bytes(Op::all_reduce), 4 * parameter_bytes);
      EXPECT_EQ(log->records().size(), static_cast<size_t>(4 * fragments)) << "nothing else";
      for (const auto& record : log->records()) {
        const auto fragment = record.label.bucket;
        EXPECT_EQ(record.bytes, fragment_bytes.at(fragment));
        EXPECT_EQ(record.label.step % every, (fragment + 1) * every / fragments % every);
      }
    }
  }
}

TEST(LocalUpdates, BEY22_with_a_delay_steps_do_not_wait) {
  const auto log = std::make_shared<CallLog>();
  Trainer trainer({.every = 4, .outer = OuterNesterov{}, .delay = 2}, 1, group().recorded(log));
  log->clear();
  const auto in_flight = [&] {
    const auto record = log->records().at(0);
    return record.finished == record.issued;
  };
  for (int64_t step = 0; step < 4; ++step) trainer.step(step);
  EXPECT_TRUE(in_flight());
  trainer.step(4);
  EXPECT_TRUE(in_flight());
  trainer.step(5);
  EXPECT_FALSE(in_flight());
  EXPECT_EQ(log->records().size(), 1U);
}

TEST(LocalUpdates, BEY22_a_narrow_dtype_rounds_the_movement_alone) {
  constexpr int64_t every = 4;
  const auto start = seeded(1)->parameters();
  Trainer exact({.every = every}, 1);
  Trainer rounded({.every = every, .reduce_dtype = at::kBFloat16}, 1);
  for (int64_t step = 0; step + 1 < every; ++step) {
    exact.step(step);
    rounded.step(step);
  }
  EXPECT_EQ(difference(exact.model->parameters(), rounded.model->parameters()), 0);
  exact.step(every - 1);
  rounded.step(every - 1);
  for (size_t i = 0; i < start.size(); ++i) {
    const auto a = exact.model->parameters()[i].detach();
    const auto b = rounded.model->parameters()[i].detach();
    // Ranks move by about the same distance.
    const double moved = (a - start[i].detach()).abs().max().item<double>();
    EXPECT_LT((a - b).abs().max().item<double>(), moved / 16) << i;
    EXPECT_GT((a - b).abs().max().item<double>(), 0) << i;
    auto first = b.clone();
    group().broadcast(first, 0).wait();
    EXPECT_TRUE(at::equal(first, b)) << "ranks are equal to the last bit";
  }
}

enum class Point { forward, backward, optimizer, no_batch };

TEST(LocalUpdates, BEY22_a_rank_that_fails_or_has_no_batch_takes_the_step_without_an_update) {
  const int last = group().size() - 1;
  for (const auto point : {Point::forward, Point::backward, Point::optimizer, Point::no_batch}) {
    SCOPED_TRACE(static_cast<int>(point));
    struct Sgd : torch::optim::SGD {
      using SGD::SGD;
      at::Tensor step(LossClosure closure) override {
        if (fail) throw Injected();
        return SGD::step(std::move(closure));
      }
      bool fail = false;
    };
    const Options options{.every = 4, .outer = OuterNesterov{}, .fragments = 2, .delay = 1};
    auto model = seeded(1);
    const auto rates = test::two_rates(model);
    Sgd optimizer(rates->param_groups(), torch::optim::SGDOptions(0.1));
    LocalUpdates local(model, optimizer, group(), options);
    test::Simulation simulation(
        group().size(),
        {.every = 4, .outer = test::outer_sgd(0.7, 0.9), .fragments = local.fragments(), .delay = 1, .alpha = 0.5});
    bool fails = false;
    model->first->weight.register_hook([&](const at::Tensor&) {
      if (fails && point == Point::backward) throw Injected();
    });
    for (int64_t step = 0; step < 16; ++step) {
      const bool due = step % 3 == 1;
      fails = due && group().rank() == last;
      optimizer.fail = fails && point == Point::optimizer;
      try {
        if (fails && (point == Point::forward || point == Point::no_batch)) throw Injected();
        mean_loss(model->forward(batch(group().rank(), step))).backward();
        local.step();
        EXPECT_FALSE(fails);
      } catch (const std::exception& error) {
        ASSERT_TRUE(fails) << error.what();
        local.step(/*update=*/false);
      }
      local.zero_grad();
      test::lower_rates(optimizer);
      simulation.step(step, due ? last : -1);
      ASSERT_LT(difference(model->parameters(), simulation.parameters(group().rank())), 1e-11) << step;
    }
  }
}

TEST(LocalUpdates, BEY22_an_exception_in_the_warm_up_voids_the_step_on_all_ranks) {
  const int last = group().size() - 1;
  const Options options{.every = 3, .warmup_steps = 4};
  Trainer trainer(options);
  auto simulation = simulation_of(trainer, options, test::averaging());
  bool fails = false;
  trainer.model->first->weight.register_hook([&](const at::Tensor&) {
    if (fails) throw Injected();
  });
  for (int64_t step = 0; step < 9; ++step) {
    if (step == 2) {
      fails = group().rank() == last;
      const auto backward = [&] { mean_loss(trainer.model->forward(batch(group().rank(), step))).backward(); };
      if (fails) {
        EXPECT_ANY_THROW(backward());
        EXPECT_THROW(trainer.local.step(), UsageError);
      } else {
        EXPECT_THROW(backward(), StepAbandoned);
      }
      fails = false;
      trainer.local.zero_grad();
    }
    trainer.step(step);
    simulation.step(step);
    ASSERT_LT(difference(trainer.model->parameters(), simulation.parameters(group().rank())), 1e-11) << step;
  }
}

}  // namespace
}  // namespace shoal::local_updates_test
