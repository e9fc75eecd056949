// What an elastic loop may do, and what it is told.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/data.h>

#include <set>
#include <thread>

#include "shoal/zero.h"
#include "tests/elastic/elastic_run.h"

namespace shoal::elastic_loop_test {
namespace {

class Numbers : public torch::data::datasets::Dataset<Numbers> {
 public:
  torch::data::Example<> get(size_t index) override {
    return {test::inputs_of({index})[0], at::tensor(static_cast<int64_t>(index))};
  }
  std::optional<size_t> size() const override { return 60; }
};

void expect_texts(const std::vector<test::RankEnded>& ended, const std::string& text, int except = -1) {
  for (size_t rank = 0; rank < ended.size(); ++rank) {
    if (static_cast<int>(rank) == except) continue;
    EXPECT_TRUE(WIFEXITED(ended[rank].status)) << "rank " << rank;
    EXPECT_NE(ended[rank].text.find(text), std::string::npos) << "rank " << rank << ": " << ended[rank].text;
  }
}

// The loop of the header's comment, with a libtorch loader whose threads read ahead.
TEST(ElasticLoop, ELA01_a_data_loader_with_threads) {
  const test::SharedRecord record;
  const auto ended = test::run_ranks(3, [&](const World& world) -> std::string {
    alarm(30);
    auto model = std::make_shared<test::Net>();
    DistributedDataParallel parallel(model, world.group());
    torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(0.01));
    auto dataset = Numbers();
    DistributedSampler sampler(60, world.group());
    std::string told;
    const int self = world.rank();
    Elastic elastic(world, parallel, optimizer, sampler,
                    {.min_ranks = 2, .on_change = [&](const ElasticChange& change) { told = change.text(); }});
    std::multiset<int64_t> seen;
    for (size_t epoch = 0; epoch < 2; ++epoch) {
      sampler.set_epoch(epoch);
      while (elastic.in_epoch()) {
        auto loader = torch::data::make_data_loader(dataset.map(torch::data::transforms::Stack<>()), sampler,
                                                    torch::data::DataLoaderOptions(4).workers(2));
        for (auto& batch : *loader) {
          const auto compute = [&] {
            if (self == 1 && elastic.steps() == 2) std::raise(SIGKILL);
            optimizer.zero_grad();
            test::loss_of(parallel.forward(batch.data), batch.data).backward();
          };
          if (!elastic.step(batch.data.size(0), compute, [&] { optimizer.step(); })) break;
          auto all = at::empty({world.size() * batch.target.size(0)}, at::kLong);
          elastic.together([&] { world.group().all_gather(all, batch.target.contiguous()).wait(); });
          if (epoch > 0) continue;
          for (int64_t i = 0; i < all.numel(); ++i) seen.insert(all[i].item<int64_t>());
        }
      }
    }
    // Two steps of 3 ranks and 4 samples, then 36 samples for 2 ranks.
    if (seen.size() != 60 || std::set(seen.begin(), seen.end()).size() != 60) return "not every sample once";
    if (elastic.steps() != 2 + 5 + 8 || elastic.generation() < 2) return fmt::format("{} steps", elastic.steps());
    return told;
  });
  expect_texts(ended, "rank 1 has ended; 2 ranks go on after step 2,", 1);
}

// libtorch's examples make their loader once. Its copy of the sampler does until ranks change.
TEST(ElasticLoop, ELA05_a_loader_from_before_the_ranks_changed_is_refused) {
  for (const bool dies : {false, true}) {
    const auto ended = test::run_ranks(3, [&](const World& world) -> std::string {
      alarm(30);
      auto model = std::make_shared<test::Net>();
      DistributedDataParallel parallel(model, world.group());
      torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.01));
      auto dataset = Numbers().map(torch::data::transforms::Stack<>());
      DistributedSampler sampler(60, world.group());
      const auto early = sampler;
      Elastic elastic(world, parallel, optimizer, sampler, {.on_change = [](const ElasticChange&) {}});
      auto loader = torch::data::make_data_loader(dataset, sampler, torch::data::DataLoaderOptions(4));
      const bool falls = dies && world.rank() == 2;
      int64_t samples = 0;
      try {
        for (size_t epoch = 0; epoch < 2; ++epoch) {
          sampler.set_epoch(epoch);
          while (elastic.in_epoch()) {
            for (auto& batch : *loader) {
              if (falls && elastic.steps() == 2) std::raise(SIGKILL);
              const auto compute = [&] { test::loss_of(parallel.forward(batch.data), batch.data).backward(); };
              if (!elastic.step(batch.data.size(0), compute, [&] { optimizer.step(); })) break;
              optimizer.zero_grad();
              samples += batch.data.size(0);
            }
          }
        }
      } catch (const UsageError& error) {
        auto own = early;
        own.redistribute(3, 1);
        auto again = sampler;
        const auto left = fmt::format("{} and {} left", own.remaining(), again.remaining());
        own.reset();
        again.reset();
        return fmt::format("after {} samples: {}; {}", samples, error.what(), left);
      }
      return fmt::format("{} samples", samples);
    });
    for (int rank = 0; rank < (dies ? 2 : 3); ++rank) {
      const auto& text = ended[static_cast<size_t>(rank)].text;
      const auto refused = fmt::format(
          "after 8 samples: DistributedSampler: this copy, as rank {} of 3, has the division of the job's former "
          "ranks, and "
          "Elastic has divided the sampler anew: make the data loader, or the copy, within while (elastic.in_epoch()); "
          "20 and "
          "18 left",
          rank);
      EXPECT_EQ(text, dies ? refused : "40 samples");
    }
  }
}

// Rank 1 has its gradients and fails before it knows that rank 0 went on to its update.
TEST(ElasticLoop, ELA02_a_step_that_one_rank_has_completed_is_finished_by_the_others) {
  const test::SharedRecord record;
  static bool armed = false;
  WorldOptions options;
  options.while_waiting = [&] {
    if (!armed) return;
    while (record->evaluations[0] < 3) usleep(1000);
    armed = false;
    throw CommError("as if the wait for the commit had failed");
  };
  const auto body = [&](const World& world) -> std::string {
    alarm(30);
    auto model = std::make_shared<test::Net>();
    DistributedDataParallel parallel(model, world.group());
    torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(0.01));
    bool finished = false;
    Elastic elastic(world, parallel, optimizer,
                    {.on_change = [&](const ElasticChange& change) { finished = change.finished_step; }});
    const int rank = world.rank();
    const auto x = test::inputs_of({1, 2});
    int updates = 0;
    while (elastic.steps() < 6) {
      const auto compute = [&] {
        test::loss_of(parallel.forward(x), x).backward();
        if (elastic.steps() == 2 && rank == 0) usleep(400'000);  // rank 1 waits in the commit
        armed = elastic.steps() == 2 && rank == 1;
      };
      elastic.step(2, compute, [&] {
        optimizer.step();
        ++updates;
        if (rank == 0) record->evaluations[0] = updates;
      });
      optimizer.zero_grad();
    }
    if (finished != (rank == 1)) return "finished by the wrong rank";
    return fmt::format("{} updates, {}", updates, test::hash_of(optimizer, *model));
  };
  const auto ended = test::run_ranks(2, body, {}, options);
  expect_texts(ended, "6 updates, ");
  EXPECT_EQ(ended[0].text, ended[1].text);
}

// Rank 1 fails in the all-reduce before the commit, which rank 0 has passed.
TEST(ElasticLoop, ELA02_ELA03_a_sharded_step_is_committed_on_all_ranks_or_on_none) {
  const test::SharedRecord record;
  static bool signals = false;
  static bool fails = false;
  WorldOptions options;
  options.while_waiting = [&] {
    if (std::exchange(signals, false)) record->evaluations[0] = 1;
    if (!fails) return;
    while (record->evaluations[0] == 0) usleep(1000);
    fails = false;
    throw CommError("as if the wait before the commit had failed");
  };
  const auto body = [&](const World& world) -> std::string {
    alarm(30);
    auto model = std::make_shared<test::Net>();
    OSS<torch::optim::Adam> optimizer(model->parameters(), torch::optim::AdamOptions(0.01), world.group());
    DistributedDataParallel parallel(model, world.group());
    bool finished = false;
    Elastic elastic(world, parallel, optimizer,
                    {.on_change = [&](const ElasticChange& change) { finished = change.finished_step; }});
    const int rank = world.rank();
    const auto x = test::inputs_of({1, 2});
    int updates = 0;
    while (elastic.steps() < 6) {
      const bool here = elastic.steps() == 2 && elastic.generation() == 1;
      const auto compute = [&] {
        optimizer.zero_grad();
        test::loss_of(parallel.forward(x), x).backward();
        if (here && rank == 0) usleep(400'000);  // rank 1 waits in the all-reduce
        (rank == 0 ? signals : fails) = here;
      };
      elastic.step(2, compute, [&] {
        optimizer.step();
        ++updates;
      });
    }
    if (finished || elastic.generation() == 1) return "the step was not undone";
    return fmt::format("{} updates, {}", updates, test::hash_of(optimizer.state_dict(*model), *model));
  };
  const auto ended = test::run_ranks(2, body, {}, options);
  expect_texts(ended, "6 updates, ");
  EXPECT_EQ(ended[0].text, ended[1].text);
}

// Rank 1 fails in its wait for rank 0: the first time when rank 0 has gone on, then in the middle of the work.
TEST(ElasticLoop, ELA01_what_ranks_do_together_runs_again_on_all_of_them_or_on_none) {
  const test::SharedRecord record;
  static bool armed = false;
  static int until = 0;
  WorldOptions options;
  options.while_waiting = [&] {
    if (!armed) return;
    while (record->evaluations[0] < until) usleep(1000);
    armed = false;
    throw CommError("as if the wait had failed");
  };
  const auto body = [&](const World& world) -> std::string {
    alarm(30);
    auto model = std::make_shared<test::Net>();
    DistributedDataParallel parallel(model, world.group());
    torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(0.01));
    Elastic elastic(world, parallel, optimizer, {.on_change = [](const ElasticChange&) {}});
    const int rank = world.rank();
    int runs = 0;
    const auto work = [&](bool fails_in_it) {
      runs = 0;
      return elastic.together([&] {
        const bool is_first = runs++ == 0;
        const auto fail_at = [&](int value) {
          if (rank == 0) usleep(400'000);  // rank 1 waits
          until = value;
          armed = rank == 1;
        };
        if (is_first && fails_in_it) fail_at(2);
        const auto sum = world.all_reduce(rank + 1.0);
        if (is_first && fails_in_it && rank == 0) record->evaluations[0] = 2;
        if (is_first && !fails_in_it) fail_at(1);  // in the barrier
        return sum;
      });
    };
    std::string told = fmt::format("{}", work(false));
    if (rank == 0) record->evaluations[0] = 1;
    told += fmt::format(" in {} run, ", runs);
    elastic.together([&] { world.group().barrier().wait(); });
    told += fmt::format("{}", work(true));
    told += fmt::format(" in {} runs", runs);
    return told + (elastic.generation() < 3 ? ", too few changes" : "");
  };
  for (const auto& rank : test::run_ranks(2, body, {}, options)) EXPECT_EQ(rank.text, "3 in 1 run, 3 in 2 runs");
}

// As a loop that resumes in the middle of an epoch does, and evaluates first.
TEST(ElasticLoop, ELA05_a_rank_ends_before_the_first_step_of_an_epoch_that_was_begun_elsewhere) {
  const auto ended = test::run_ranks(3, [&](const World& world) -> std::string {
    alarm(30);
    const auto net = std::make_shared<test::Net>();
    DistributedDataParallel<test::Net> parallel(net, world.group());
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
    DistributedSampler sampler(90, world.group(), {.seed = 3});
    sampler.set_epoch(3);
    sampler.seek(10);
    Elastic elastic(world, parallel, optimizer, sampler, {.on_change = [](const ElasticChange&) {}});
    const bool dies = world.rank() == 2;
    elastic.together([&] {
      if (dies) std::raise(SIGKILL);
      world.barrier();
    });
    double samples = 0;
    while (elastic.in_epoch()) {
      auto division = sampler;
      division.reset();
      while (const auto batch = division.next(5)) {
        const auto x = test::inputs_of(*batch);
        if (!elastic.step(
                static_cast<int64_t>(batch->size()), [&] { test::loss_of(parallel.forward(x), x).backward(); },
                [&] { optimizer.step(); })) {
          break;
        }
        optimizer.zero_grad();
        samples += static_cast<double>(batch->size());
      }
    }
    return fmt::format("{} samples", world.group().all_reduce(samples));
  });
  expect_texts(ended, "60 samples", 2);
}

TEST(ElasticLoop, ELA10_fewer_than_min_ranks_is_a_lost_job_which_says_what_of_its_shards_is_lost) {
  for (const auto& trained : {test::Trained(), test::sharded[0], test::sharded[3], test::sharded[6]}) {
    const test::SharedRecord record;
    const auto ended = test::run_ranks(3, [&](const World& world) {
      return test::train(world, *record, 1, {{1, test::Moment::in_backward, 2}}, {.min_ranks = 3}, trained);
    });
    const std::string left =
        trained.sharding == test::Sharding::none ? "each rank that is left has" : "the ranks that are left have";
    expect_texts(ended,
                 "error: 2 of 3 ranks are left, and this elastic job needs min_ranks = 3: start it again from its last "
                 "checkpoint; no shard is lost: " +
                     left + " all parameters and their state",
                 1);
  }
}

// Rank 2 notices the death only after rank 0 has ended of it, and finds itself alone.
TEST(ElasticLoop, ELA10_a_rank_that_notices_late_names_the_same_cause) {
  const test::SharedRecord record;
  const auto ended = test::run_ranks(
      3, [&](const World& world) { return test::train(world, *record, 100, {}, {.min_ranks = 3}); },
      [&](const std::vector<pid_t>& pids) {
        while (record->complete[2].empty()) usleep(100);
        kill(pids[2], SIGSTOP);
        kill(pids[1], SIGKILL);
        siginfo_t ended{};
        waitid(P_PID, static_cast<id_t>(pids[0]), &ended, WEXITED | WNOWAIT);
        kill(pids[2], SIGCONT);
      });
  expect_texts(ended, "error: 2 of 3 ranks are left, and this elastic job needs min_ranks = 3", 1);
}

TEST(ElasticLoop, ELA01_a_former_group_names_its_end_and_does_not_disturb_the_others) {
  const test::SharedRecord record;
  const auto ended = test::run_ranks(3, [&](const World& world) -> std::string {
    const World copy = world;
    const auto former = world.group();
    const auto said = test::train(world, *record, 1, {{0, test::Moment::in_backward, 2}});
    if (!said.empty()) return said;
    if (copy.size() != 2 || copy.rank() != world.rank() || copy.local_size() != 2) return "the copy does not follow";
    if (world.group().all_reduce(1.0) != 2) return "the new group does not work";
    former.barrier().wait();
    return "no error";
  });
  expect_texts(ended, "ended with generation 1 of this elastic job; take world.group() again", 0);
}

TEST(ElasticLoop, ELA08_a_rank_that_is_stopped_is_waited_for) {
  const test::SharedRecord record;
  const auto ended = test::run_ranks(
      3,
      [&](const World& world) {
        return test::train(world, *record, 2, {{2, test::Moment::before_forward, 15}});  // in the second epoch
      },
      [&](const std::vector<pid_t>& pids) {
        while (record->started < 3) usleep(1000);
        kill(pids[1], SIGSTOP);
        std::this_thread::sleep_for(std::chrono::seconds(6));  // more than WorldOptions::stopped_timeout_seconds
        kill(pids[1], SIGCONT);
      });
  EXPECT_TRUE(WIFSIGNALED(ended[2].status)) << "rank 2 did not come to its end";
  for (const int rank : {0, 1}) {
    EXPECT_TRUE(WIFEXITED(ended[rank].status));
    EXPECT_EQ(ended[rank].text, "");
  }
  const auto verdict = test::run_ranks(1, [&](const World&) { return test::judge(*record, 2); }).front();
  EXPECT_EQ(verdict.text, "");
}

}  // namespace
}  // namespace shoal::elastic_loop_test
