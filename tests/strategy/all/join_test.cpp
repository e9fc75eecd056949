// Join: ranks with different numbers of batches, under every strategy (BEY03, DDP13).

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <set>

#include "shoal/error.h"
#include "tests/strategy/all/join_training.h"

namespace shoal::test::join_test {
namespace {

TEST_P(JoinStrategies, DDP13_BEY03_uneven_inputs_equal_one_process) {
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

// Rank 0 has no batch at first, but has some later.
TEST_P(JoinStrategies, BEY03_a_rank_may_come_late) {
  for (const bool static_graph : {false, true}) {
    auto training = make(GetParam(), {.static_graph = static_graph, .bucket_mb = 1e-3});
    Join join({training});
    const auto has = [](int rank, int64_t step) { return rank > 0 || step == 1 || step >= 3; };
    auto model = seeded(3);
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

// Weights determine the divisor, whatever the option.
TEST_P(JoinStrategies, BEY03_weights_of_ranks_that_have_run_out_are_zero) {
  const auto samples = [](int rank) { return 1 + 2 * rank; };
  constexpr double each = 0.1;  // weight of a sample; float32 would round sums of it
  for (const bool by_initial : {true, false}) {
    auto training = make(GetParam());
    Join join({training}, {.divide_by_initial_world_size = by_initial});
    auto model = seeded(3);
    torch::optim::SGD optimizer(model->parameters(), sgd);
    const auto mine = samples(group().rank());
    for (int64_t step = 0; join.next(step < five_and_rank(group().rank())); ++step) {
      if (join.active()) {
        training.backward(training.forward(batch(group().rank(), step, 0, mine)).pow(2).sum() * each, mine * each);
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

// Two passes make a step; rank r runs out after 5 + r passes, possibly in the middle of a step.
TEST_P(JoinStrategies, BEY03_a_rank_may_run_out_between_micro_batches) {
  for (const bool by_initial : {true, false}) {
    auto training = make(GetParam());
    Join join({training}, {.divide_by_initial_world_size = by_initial});
    auto model = seeded(3);
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

TEST_P(JoinStrategies, BEY03_gradients_add_up_over_steps_of_different_ranks) {
  for (const bool by_initial : {true, false}) {
    auto training = make(GetParam());
    Join join({training}, {.divide_by_initial_world_size = by_initial});
    auto model = seeded(3);
    torch::optim::SGD optimizer(model->parameters(), sgd);
    for (int64_t step = 0; join.next(step < five_and_rank(group().rank())); ++step) {
      pass(training, join, step);
      int took_part = 0;
      for (int rank = 0; rank < group().size(); ++rank) took_part += step < five_and_rank(rank) ? 1 : 0;
      for (int rank = 0; rank < group().size(); ++rank) {
        if (step >= five_and_rank(rank)) continue;
        (mean_loss(model->forward(batch(rank, step))) / (by_initial ? group().size() : took_part)).backward();
      }
    }
    training.step();
    optimizer.step();
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
      EXPECT_STREQ(
          error.what(),
          "rank 0 has no batch left after 5 steps, but other ranks have; all ranks stop (throw_on_early_termination)");
    }
  }
  EXPECT_LT(difference(training.model->parameters(), reference(five_and_rank, initial, 5)), 1e-12);
  expect_same_on_all_ranks(training.model->parameters());
  // Outside the scope, all ranks have batches again.
  mean_loss(training.forward(batch(group().rank(), 5))).backward();
  training.step();
  EXPECT_LT(difference(training.model->parameters(), reference([](int) { return 6; }, initial)), 1e-12);
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
      if (GetParam().starts_with("megatron")) training.abandon_step();
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

// As a data loader that throws after next(true).
TEST_P(JoinStrategies, BEY03_a_batch_that_cannot_be_made_ends_the_step_on_all_if_the_rank_says_so) {
  const int faulty = group().size() - 1;
  auto training = make(GetParam());
  Join join({training});
  for (int64_t step = 0; join.next(step < 5); ++step) {
    try {
      if (group().rank() == faulty && step % 3 == 0) throw Injected();
      pass(training, join, step);
      training.step();
      EXPECT_NE(step % 3, 0);
    } catch (const Injected&) {
      training.abandon_step();
    } catch (const StepAbandoned& error) {
      EXPECT_EQ(step % 3, 0) << error.what();
      EXPECT_NE(std::string(error.what()).find(fmt::format("rank {} failed", faulty)), std::string::npos);
    }
    training.zero_grad();
  }
  auto model = seeded(3);
  torch::optim::SGD optimizer(model->parameters(), sgd);
  for (const int64_t step : {1, 2, 4}) {
    optimizer.zero_grad();
    for (int rank = 0; rank < group().size(); ++rank) {
      (mean_loss(model->forward(batch(rank, step))) / group().size()).backward();
    }
    optimizer.step();
  }
  EXPECT_LT(difference(training.model->parameters(), model->parameters()), 1e-12);
}

TEST_P(JoinStrategies, BEY03_one_small_collective_a_step_and_the_same_on_all_ranks) {
  auto log = std::make_shared<CallLog>();
  auto training = make(GetParam(), TrainingOptions(), group().recorded(log));
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
    // Calls of subgroups have no common place in the order of all ranks.
    if (record.group == group().name()) calls.push_back(static_cast<int64_t>(record.op) * 1'000'000 + record.bytes);
  }
  EXPECT_EQ(asked, passes + 1);
  EXPECT_LE(asked_bytes, (passes + 1) * group().size() * 8);
  const auto mine = at::tensor(calls, at::kLong);
  expect_same_on_all_ranks({at::tensor({mine.numel()}, at::kLong)});
  expect_same_on_all_ranks({mine});
}

INSTANTIATE_TEST_SUITE_P(All, JoinStrategies,
                         testing::Values("ddp", "zero1", "zero2", "megatron", "megatron_in_grads", "fsdp",
                                         "fsdp_grad_op", "fsdp_no_shard", "fsdp_hybrid"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace shoal::test::join_test
