// Passes through the samples: which one a rank is in, whatever numbers the loop gives to epochs.

#include <gtest/gtest.h>

#include "tests/elastic/elastic_join.h"
#include "tests/support/refusal.h"

namespace shoal::elastic_pass_test {
namespace {

using test::JoinJob;
using test::JoinParts;
using test::Net;

constexpr size_t batch_size = 4;

struct Loop : JoinParts {
  // size: samples of the data set.
  Loop(const World& of, size_t size)
      : JoinParts(of),
        world(of),
        optimizer(net->parameters(), torch::optim::AdamOptions(0.01)),
        sampler(size, world.group(), {.shuffle = false}),
        elastic(world, parallel, optimizer, sampler, {.on_change = [](const ElasticChange&) {}}) {
    alarm(30);
  }

  bool step(const std::vector<size_t>& samples, const std::function<void()>& first = nullptr,
            const std::function<void()>& last = nullptr) {
    const auto compute = [&] {
      if (first) first();
      const auto x = test::inputs_of(samples);
      test::loss_of(parallel.forward(x), x).backward();
      if (last) last();
    };
    const bool complete = elastic.step(static_cast<int64_t>(samples.size()), compute, [&] { optimizer.step(); });
    optimizer.zero_grad();
    return complete;
  }

  // One loader's samples, until the ranks change.
  void pass(const std::function<void()>& first = nullptr) {
    auto division = sampler;
    division.reset();
    while (const auto batch = division.next(batch_size)) {
      if (!step(*batch, first)) break;
    }
  }

  World world;
  torch::optim::Adam optimizer;
  DistributedSampler sampler;
  Elastic elastic;
};

// At its step `step`, rank 2 ends.
std::function<void()> death_at(Loop& loop, int64_t step) {
  return [&loop, step, dies = loop.world.rank() == 2] {
    if (dies && loop.elastic.steps() == step) std::raise(SIGKILL);
  };
}

// Rank 1 fails in the commit of the last step of its first pass, which rank 0 has left for the next one. With names,
// the loop leaves each pass after three of five steps.
void finish_a_pass_that_rank_0_has_left(bool with_names) {
  const test::SharedRecord record;
  const size_t steps = with_names ? 3 : 5;
  const int64_t last = with_names ? 2 : 4;
  static bool armed = false;
  WorldOptions options;
  options.while_waiting = [&] {
    if (!armed) return;
    while (record->evaluations[0] == 0) usleep(1000);
    usleep(50'000);
    armed = false;
    throw CommError("as if the wait for the commit had failed");
  };
  const auto body = [&](const World& world) -> std::string {
    Loop loop(world, 40);
    const int rank = world.rank();
    std::string seen;
    const auto first = [&] {
      if (rank == 0 && loop.elastic.steps() == last + 1) record->evaluations[0] = 1;
    };
    const auto commit = [&] {
      const bool here = loop.elastic.steps() == last && loop.elastic.generation() == 1;
      if (here && rank == 0) usleep(400'000);  // rank 1 waits in the commit
      armed = here && rank == 1;
    };
    for (size_t epoch = 0; epoch < 3; ++epoch) {
      if (with_names) loop.sampler.set_epoch(epoch);
      while (loop.elastic.in_epoch()) {
        auto division = loop.sampler;
        division.reset();
        for (size_t i = 0; i < steps; ++i) {
          const auto batch = division.next(batch_size);
          if (!batch || !loop.step(*batch, first, commit)) break;
          seen += fmt::format("{} ", batch->front());
        }
      }
      seen += "| ";
    }
    return fmt::format("{}{} steps{}", seen, loop.elastic.steps(), loop.elastic.generation() > 1 ? "" : ", no change");
  };
  const auto ended = test::run_ranks(2, body, {}, options);
  for (size_t rank = 0; rank < 2; ++rank) {
    std::string pass;
    for (size_t i = 0; i < steps; ++i) pass += fmt::format("{} ", rank + 8 * i);
    EXPECT_EQ(ended[rank].text, fmt::format("{0}| {0}| {0}| {1} steps", pass, 3 * steps));
  }
}

TEST(ElasticPass, ELA05_a_rank_ends_a_pass_that_others_have_left_where_all_epochs_have_one_number) {
  finish_a_pass_that_rank_0_has_left(/*with_names=*/false);
}

TEST(ElasticPass, ELA05_a_rank_ends_a_pass_that_others_have_left_where_the_loop_leaves_samples) {
  finish_a_pass_that_rank_0_has_left(/*with_names=*/true);
}

// As for a batch with NaN in it: the others are in the step before.
TEST(ElasticPass, ELA05_a_batch_that_one_rank_skips_is_found_at_the_end_of_the_pass) {
  const auto ended = test::run_ranks(2, [](const World& world) -> std::string {
    Loop loop(world, 40);
    return test::refusal([&] {
      for (size_t epoch = 0; epoch < 2; ++epoch) {
        loop.sampler.set_epoch(epoch);
        while (loop.elastic.in_epoch()) {
          auto division = loop.sampler;
          division.reset();
          int count = 0;
          while (const auto batch = division.next(batch_size)) {
            if (++count == 2 && epoch == 0 && world.rank() == 1) continue;
            if (!loop.step(*batch)) break;
          }
        }
      }
    });
  });
  for (size_t rank = 0; rank < 2; ++rank) {
    const auto text =
        fmt::format("ranks are in passes 1 to 2 through their samples, and this one is in pass {}", rank + 1);
    EXPECT_NE(ended[rank].text.find(text), std::string::npos) << ended[rank].text;
  }
}

// 60 samples in steps of 12; rank 2 ends in the second pass, after 12 samples.
TEST(ElasticPass, ELA05_set_epoch_within_the_loop_of_in_epoch_is_of_the_same_pass) {
  const auto ended = test::run_ranks(3, [](const World& world) -> std::string {
    Loop loop(world, 60);
    for (size_t epoch = 0; epoch < 3; ++epoch) {
      while (loop.elastic.in_epoch()) {
        loop.sampler.set_epoch(epoch);
        loop.pass(death_at(loop, 6));
      }
    }
    return fmt::format("{} steps", loop.elastic.steps());
  });
  for (const size_t rank : {0, 1}) EXPECT_EQ(ended[rank].text, "20 steps") << "5, 1 and 6, 8";
}

TEST(ElasticPass, ELA05_several_passes_of_one_epoch) {
  const auto ended = test::run_ranks(3, [](const World& world) -> std::string {
    Loop loop(world, 60);
    for (size_t pass = 0; pass < 4; ++pass) {
      loop.sampler.set_epoch(pass / 2);
      while (loop.elastic.in_epoch()) loop.pass(death_at(loop, 6));
    }
    return fmt::format("{} steps", loop.elastic.steps());
  });
  for (const size_t rank : {0, 1}) EXPECT_EQ(ended[rank].text, "28 steps") << "5, 1 and 6, 8, 8";
}

// It would train nothing more, without a word.
TEST(ElasticPass, ELA05_a_loop_without_in_epoch_is_refused_once_the_ranks_have_changed) {
  const auto ended = test::run_ranks(3, [](const World& world) -> std::string {
    Loop loop(world, 60);
    return test::refusal([&] {
      for (size_t epoch = 0; epoch < 2; ++epoch) {
        loop.sampler.set_epoch(epoch);
        auto division = loop.sampler;
        division.reset();
        while (const auto batch = division.next(batch_size)) loop.step(*batch, death_at(loop, 2));
      }
    });
  });
  for (const size_t rank : {0, 1}) {
    EXPECT_NE(ended[rank].text.find("this loop never calls in_epoch()"), std::string::npos) << ended[rank].text;
  }
}

// Two ranks train, to step 30 alone; a third one comes, in their second pass of 24 steps.
std::vector<std::string> join_in_the_second_pass(
    const std::function<void(Loop& loop, const std::function<void()>&)>& train) {
  const test::SharedRecord record;
  const auto body = [&](const World& world) -> std::string {
    Loop loop(world, 192);
    const int self = world.rank();
    const auto first = [&] {
      record->evaluations[self] = static_cast<int>(loop.elastic.steps());
      while (record->last_step != 0 && loop.elastic.steps() >= record->last_step) usleep(200);
    };
    try {
      train(loop, first);
    } catch (const UsageError& error) {
      return error.what();
    }
    return fmt::format("{} steps on {}", loop.elastic.steps(), world.size());
  };
  record->last_step = 30;
  JoinJob job(2, body);
  EXPECT_TRUE(JoinJob::comes_true([&] { return record->evaluations[0] == 30 && record->evaluations[1] == 30; }));
  const int newcomer = job.add(body);
  EXPECT_TRUE(job.comes_to_knock(newcomer));
  record->last_step = 0;
  std::vector<std::string> texts;
  for (const int member : {0, 1, newcomer}) texts.push_back(job.end_of(member).text);
  return texts;
}

// 24 steps, 6 and at least one more, the rest of the pass on three ranks, and 16.
TEST(ElasticPass, ELA06_first_epoch_counts_passes_where_the_loop_names_no_epochs) {
  const auto texts = join_in_the_second_pass([](Loop& loop, const std::function<void()>& first) {
    for (size_t epoch = loop.elastic.first_epoch(); epoch < 3; ++epoch) {
      while (loop.elastic.in_epoch()) loop.pass(first);
    }
  });
  for (const auto& text : texts) EXPECT_EQ(text, "59 steps on 3");
}

TEST(ElasticPass, ELA06_a_newcomer_to_a_loop_that_counts_steps_alone_trains_as_the_others) {
  const auto texts = join_in_the_second_pass([](Loop& loop, const std::function<void()>& first) {
    while (loop.elastic.steps() < 80) {
      while (loop.elastic.in_epoch()) {
        auto division = loop.sampler;
        division.reset();
        while (const auto batch = division.next(batch_size)) {
          if (loop.elastic.steps() == 80 || !loop.step(*batch, first)) break;
        }
      }
    }
  });
  for (const auto& text : texts) EXPECT_EQ(text, "80 steps on 3");
}

// It counts passes within the epoch anew, and would train on it when the others are in the next one.
TEST(ElasticPass, ELA06_a_newcomer_that_stays_in_an_epoch_longer_than_the_others_leaves) {
  const auto texts = join_in_the_second_pass([](Loop& loop, const std::function<void()>& first) {
    for (size_t epoch = loop.elastic.first_epoch(); epoch < 2; ++epoch) {
      for (int pass = 0; pass < 2; ++pass) {
        loop.sampler.set_epoch(epoch);
        while (loop.elastic.in_epoch()) loop.pass(first);
      }
    }
  });
  EXPECT_NE(texts[2].find("ranks are in epochs 0 to 1 of their samplers, and this one is in epoch 0"),
            std::string::npos)
      << texts[2];
  for (const size_t rank : {0, 1}) EXPECT_NE(texts[rank].find(" steps on 2"), std::string::npos) << texts[rank];
  EXPECT_EQ(texts[0], texts[1]);
}

}  // namespace
}  // namespace shoal::elastic_pass_test
