// What an elastic loop may do, and what it is told.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/data.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/utils/clip_grad.h>

#include <set>
#include <thread>

#include "shoal/fsdp.h"
#include "shoal/metrics.h"
#include "shoal/optimizer_in_backward.h"
#include "shoal/sync_batch_norm.h"
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

// What is wrong with `act`, which must throw a UsageError with `text`; empty: nothing.
std::string fault_of_refusal(const std::string& text, const std::function<void()>& act) {
  try {
    act();
  } catch (const UsageError& error) {
    const std::string thrown = error.what();
    return thrown.find(text) == std::string::npos ? thrown + "\n" : "";
  }
  return "no error instead of: " + text + "\n";
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

TEST(ElasticLoop, ELA10_fewer_than_min_ranks_is_a_lost_job) {
  const test::SharedRecord record;
  const auto ended = test::run_ranks(3, [&](const World& world) {
    return test::train(world, *record, 1, {{1, test::Moment::in_backward, 2}}, {.min_ranks = 3});
  });
  expect_texts(ended, "error: 2 of 3 ranks are left, and this elastic job needs min_ranks = 3", 1);
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
        return test::train(world, *record, 2, {{2, test::Moment::before_forward, 30}});
      },
      [&](const std::vector<pid_t>& pids) {
        while (record->started < 3) usleep(1000);
        kill(pids[1], SIGSTOP);
        std::this_thread::sleep_for(std::chrono::seconds(6));  // more than WorldOptions::stopped_timeout_seconds
        kill(pids[1], SIGCONT);
      });
  for (const int rank : {0, 1}) {
    EXPECT_TRUE(WIFEXITED(ended[rank].status));
    EXPECT_EQ(ended[rank].text, "");
  }
  const auto verdict = test::run_ranks(1, [&](const World&) { return test::judge(*record, 2); }).front();
  EXPECT_EQ(verdict.text, "");
}

TEST(ElasticLoop, ELA01_what_is_not_supported_is_refused_by_name) {
  const auto ended = test::run_ranks(2, [&](const World& world) -> std::string {
    std::string all;
    const auto note = [&](const auto& make) {
      try {
        make();
        all += "no error\n";
      } catch (const UsageError& error) {
        all += std::string(error.what()) + "\n";
      }
    };
    const auto net = [] { return std::make_shared<test::Net>(); };
    using Adam = torch::optim::Adam;
    const torch::optim::AdamOptions rate(0.01);
    note([&] {
      auto model = net();
      FullyShardedDataParallel parallel(model, world.group());
      Adam optimizer(model->parameters(), rate);
      Elastic elastic(world, parallel, optimizer);
    });
    note([&] {
      auto model = net();
      FullyShardedDataParallel parallel(model, world.group(), {.sharding_strategy = ShardingStrategy::no_shard});
      FullyShardedOptimizer<Adam> optimizer(parallel, rate);
      Elastic elastic(world, parallel, optimizer);
    });
    note([&] {
      auto model = net(), other = net();
      FullyShardedDataParallel parallel(model, world.group()), another(other, world.group());
      FullyShardedOptimizer<Adam> optimizer(another, rate);
      Elastic elastic(world, parallel, optimizer);
    });
    note([&] {
      auto model = net();
      OSS<Adam> optimizer(model->parameters(), rate, world.group());
      ShardedDataParallel parallel(model, optimizer, world.group(), {.log_sizes = false});
      Adam other(model->parameters(), rate);
      Elastic elastic(world, parallel, other);
    });
    note([&] {
      auto model = net();
      OSS<Adam> first(model->first->parameters(), rate, world.group());
      OSS<Adam> rest(
          std::vector<torch::optim::OptimizerParamGroup>{torch::optim::OptimizerParamGroup(model->second->parameters()),
                                                         torch::optim::OptimizerParamGroup(model->third->parameters())},
          rate, world.group());
      ShardedDataParallel parallel(model, {&first, &rest}, world.group(), {.log_sizes = false});
      Elastic elastic(world, parallel, first);
    });
    note([&] {
      auto model = net();
      OSS<Adam> optimizer(model->parameters(), rate, world.group(), {.broadcast_fp16 = true});
      DistributedDataParallel parallel(model, world.group());
      Elastic elastic(world, parallel, optimizer);
    });
    note([&] {
      auto model = net();
      DistributedOptimizer<Adam> optimizer(model, rate, world.group(), {.reuse_grad_buf_for_param_gather = true});
      Elastic elastic(world, optimizer);
    });
    note([&] {
      const DistributedOptimizerCore::Modules chunks{net(), net()};
      DistributedOptimizer<Adam> optimizer(chunks, rate, world.group());
      Elastic elastic(world, optimizer);
    });
    note([&] {
      auto model = net();
      DistributedOptimizer<Adam> optimizer(model, rate, world.group(), {.overlap_grad_reduce = false});
      optimizer.all_reduce_grads({model->third->bias}, world.group());
      Elastic elastic(world, optimizer);
    });
    note([&] {
      auto model = net();
      DistributedOptimizer<Adam> optimizer(model, rate, world.group(), {.overlap_grad_reduce = false});
      Elastic elastic(world, optimizer);
      optimizer.all_reduce_grads({model->third->bias}, world.group());
    });
    note([&] {
      auto model = net();
      FullyShardedDataParallel<torch::nn::LinearImpl> inner(model->second.ptr(), world.group());
      FullyShardedDataParallel parallel(model, world.group());
      FullyShardedOptimizer<Adam> optimizer(parallel, rate);
      Elastic elastic(world, parallel, optimizer);
    });
    note([&] {
      auto model = net();
      DistributedOptimizer<Adam> optimizer(model, rate, world.group(), {.model_parallel_group = world.group()});
      Elastic elastic(world, optimizer);
    });
    note([&] {
      auto model = net(), other = net();
      DistributedOptimizer<Adam> optimizer(model, rate, world.group());
      DistributedDataParallel parallel(other, world.group());
      Elastic elastic(world, parallel, optimizer);
    });
    note([&] {
      auto model = net();
      DistributedDataParallel parallel(model, world.group());
      Adam optimizer(model->parameters(), rate);
      OptimizerInBackward in_backward(parallel, optimizer);
      Elastic elastic(world, parallel, optimizer);
    });
    note([&] {
      torch::nn::Sequential model(torch::nn::Linear(4, 4),
                                  SyncBatchNorm(torch::nn::BatchNormOptions(4), world.group()));
      DistributedDataParallel parallel(model, world.group());
      Adam optimizer(model->parameters(), rate);
      Elastic elastic(world, parallel, optimizer);
    });
    note([&] {
      auto model = net();
      DistributedDataParallel parallel(model, world.group());
      Adam optimizer(model->parameters(), rate);
      Elastic elastic(world, parallel, optimizer, {.min_ranks = 3});
    });
    note([&] {
      auto model = net();
      DistributedDataParallel parallel(model, world.group());
      Adam optimizer(model->parameters(), rate);
      DistributedSampler sampler(60, 3, 0);
      Elastic elastic(world, parallel, optimizer, sampler);
    });
    return all;
  });
  for (const auto* text :
       {"FullyShardedDataParallel with torch::optim::Adam is not supported",
        "sharding_strategy no_shard is not supported", "the optimizer is not the one of this FullyShardedDataParallel",
        "the optimizer is not the one of this ShardedDataParallel", "with several optimizers",
        "broadcast_fp16 is not supported", "reuse_grad_buf_for_param_gather leaves parameters",
        "of several chunks is not supported", "model_parallel_group has ranks",
        "all_reduce_grads() keeps groups of its own", "which do not follow when",
        "sub-modules with a wrapper of their own are not supported", "or DistributedOptimizer without a wrapper",
        "OptimizerInBackward", "1 is a SyncBatchNorm", "min_ranks is 3: give 1 to 2", "the sampler is rank 0 of 3's"}) {
    expect_texts(ended, text);
  }
  for (const auto& rank : ended) EXPECT_EQ(rank.text.find("no error"), std::string::npos) << rank.text;
}

// Without shared memory, what a rank owns ends with it.
TEST(ElasticLoop, ELA01_sharded_optimizers_over_sockets_are_refused_by_name) {
  for (const auto sharding :
       {test::Sharding::zero1, test::Sharding::zero2, test::Sharding::megatron, test::Sharding::fsdp}) {
    SCOPED_TRACE(static_cast<int>(sharding));
    WorldOptions options;
    options.transport = "tcp";
    const auto train = [&](const World& world) -> std::string {
      alarm(30);
      const auto net = std::make_shared<test::Net>();
      const auto wrapped = test::wrap_as({.sharding = sharding}, net, world.group());
      return fault_of_refusal("over the transport", [&] { wrapped.elastic(world); }) + "end";
    };
    for (const auto& rank : test::run_ranks(2, train, {}, options)) EXPECT_EQ(rank.text, "end");
  }
}

TEST(ElasticLoop, ELA02_ELA03_what_a_sharded_update_must_not_do_is_refused_by_name) {
  const auto ended = test::run_ranks(2, [&](const World& world) -> std::string {
    alarm(30);
    auto net = std::make_shared<test::Net>();
    net->third->bias.set_requires_grad(false);
    OSS<torch::optim::Adam> optimizer(net->parameters(), torch::optim::AdamOptions(0.01), world.group());
    DistributedDataParallel parallel(net, world.group());
    auto made = std::make_unique<Elastic>(world, parallel, optimizer);
    auto& elastic = *made;
    const auto x = test::inputs_of({1, 2});
    std::string all;
    const auto expect = [&](const std::string& text, const std::function<void()>& act) {
      all += fault_of_refusal(text, act);
    };
    const auto step = [&](const std::function<void()>& update) {
      const auto compute = [&] {
        optimizer.zero_grad();
        test::loss_of(parallel.forward(x), x).backward();
        optimizer.clip_grad_norm(0.1);
      };
      if (!elastic.step(2, compute, update)) all += "a step was not complete\n";
    };
    const auto usual = [&] { optimizer.step(); };
    step(usual);
    expect("is for the second function of Elastic::step()", usual);
    expect("clip with clip_grad_norm() in the first function", [&] {
      step([&] {
        GradScaler scaler;
        optimizer.step(scaler);
      });
    });
    expect("gradients were changed in the second function", [&] {
      step([&] {
        torch::nn::utils::clip_grad_norm_(net->parameters(), 0.01);
        optimizer.step();
      });
    });
    step(usual);
    net->third->bias.set_requires_grad(true);
    expect("were unfrozen, converted or added", [&] { step(usual); });
    net->third->bias.set_requires_grad(false);
    step(usual);
    optimizer.load_state_dict(*net, optimizer.state_dict(*net));
    expect("was loaded or replaced", [&] { step(usual); });
    made.reset();
    optimizer.zero_grad();
    test::loss_of(parallel.forward(x), x).backward();
    optimizer.clip_grad_norm(0.1);
    optimizer.step();
    return all + "end";
  });
  for (const auto& rank : ended) EXPECT_EQ(rank.text, "end");
}

// Rank 1 alone does what is refused, or leaves step() out. It leaves the job, and the others update for it and go on.
TEST(ElasticLoop, ELA02_ELA03_a_rank_that_alone_does_not_update_leaves_and_the_others_go_on) {
  for (const bool changes : {true, false}) {
    const auto ended = test::run_ranks(3, [&](const World& world) -> std::string {
      alarm(30);
      auto net = std::make_shared<test::Net>();
      OSS<torch::optim::Adam> optimizer(net->parameters(), torch::optim::AdamOptions(0.01), world.group());
      DistributedDataParallel parallel(net, world.group());
      Elastic elastic(world, parallel, optimizer);
      const auto x = test::inputs_of({1, 2});
      const auto compute = [&] {
        optimizer.zero_grad();
        test::loss_of(parallel.forward(x), x).backward();
      };
      const bool differs = world.rank() == 1;
      const auto update = [&] {
        if (differs && changes) torch::nn::utils::clip_grad_norm_(net->parameters(), 0.01);
        if (!differs || changes) optimizer.step();
      };
      const auto usual = [&] { optimizer.step(); };
      if (!elastic.step(2, compute, usual)) return "the first step was not complete";
      if (differs) {
        const auto* text =
            changes ? "gradients were changed in the second function" : "did not update, as it did on another rank";
        auto faults = fault_of_refusal(text, [&] { elastic.step(2, compute, update); });
        faults += fault_of_refusal("it has left the job", [&] { elastic.step(2, compute, usual); });
        return faults + "has left";
      }
      if (!elastic.step(2, compute, update)) return "the step was not complete";
      while (world.size() == 3) elastic.step(2, compute, usual);
      return std::to_string(world.size());
    });
    for (size_t rank = 0; rank < ended.size(); ++rank) EXPECT_EQ(ended[rank].text, rank == 1 ? "has left" : "2");
  }
}

// As after an overflow that a program looks for itself. The late rank is not killed before twice the limit.
TEST(ElasticLoop, ELA02_ELA08_a_late_rank_of_a_step_that_nobody_updates_is_waited_for) {
  const auto ended = test::run_ranks(3, [&](const World& world) -> std::string {
    alarm(30);
    auto net = std::make_shared<test::Net>();
    OSS<torch::optim::Adam> optimizer(net->parameters(), torch::optim::AdamOptions(0.01), world.group());
    DistributedDataParallel parallel(net, world.group());
    Elastic elastic(world, parallel, optimizer, {.straggler_seconds = 1});
    const auto x = test::inputs_of({1, 2});
    const auto compute = [&] {
      optimizer.zero_grad();
      test::loss_of(parallel.forward(x), x).backward();
    };
    const auto late = [&] { usleep(world.rank() == 0 ? 1'400'000 : 0); };
    const auto usual = [&] { optimizer.step(); };
    for (const auto& update : std::vector<std::function<void()>>{usual, late, usual}) {
      while (!elastic.step(2, compute, update)) {
      }
    }
    return std::to_string(world.size());
  });
  for (const auto& rank : ended) EXPECT_EQ(rank.text, "3");
}

// It comes after the update, so it cannot be taken for one that has changed nothing.
TEST(ElasticLoop, ELA02_ELA03_a_second_update_in_a_step_ends_the_rank) {
  const auto ended = test::run_ranks(2, [&](const World& world) -> std::string {
    alarm(30);
    auto net = std::make_shared<test::Net>();
    OSS<torch::optim::Adam> optimizer(net->parameters(), torch::optim::AdamOptions(0.01), world.group());
    DistributedDataParallel parallel(net, world.group());
    Elastic elastic(world, parallel, optimizer);
    const auto x = test::inputs_of({1, 2});
    const auto compute = [&] { test::loss_of(parallel.forward(x), x).backward(); };
    const auto twice = [&] {
      optimizer.step();
      optimizer.step();
    };
    auto faults = fault_of_refusal("is for the second function of Elastic::step(), once in each step",
                                   [&] { elastic.step(2, compute, twice); });
    faults += fault_of_refusal("it has left the job", [&] { elastic.step(2, compute, twice); });
    return faults + "end";
  });
  for (const auto& rank : ended) EXPECT_EQ(rank.text, "end");
}

TEST(ElasticLoop, ELA02_ELA03_what_an_update_by_range_must_not_do_is_refused_by_name) {
  const auto refused = [](test::Sharding sharding, at::ScalarType dtype) {
    SCOPED_TRACE(fmt::format("{}, {}", static_cast<int>(sharding), c10::toString(dtype)));
    const auto ended = test::run_ranks(2, [&](const World& world) -> std::string {
      alarm(30);
      auto net = std::make_shared<test::Net>();
      const test::Trained trained{.sharding = sharding, .optimizer = "adamw", .dtype = dtype};
      net->to_dtype(trained.module_dtype());
      const auto wrapped = test::wrap_as(trained, net, world.group());
      auto made = wrapped.elastic(world);
      const auto x = test::inputs_of({1, 2});
      std::string all;
      const auto expect = [&](const std::string& text, const std::function<void()>& act) {
        all += fault_of_refusal(text, act);
        wrapped.optimizer->zero_grad();
      };
      const auto compute = [&] { test::loss_of(wrapped.forward(x), x).backward(); };
      const auto step = [&](const std::function<void()>& update) {
        if (!made->step(2, compute, update)) all += "a step was not complete\n";
        wrapped.optimizer->zero_grad();
      };
      const auto usual = [&] { wrapped.step(); };
      step(usual);
      expect("is for the second function of Elastic::step()", usual);
      for (const bool to_none : {true, false}) {
        expect("gradients were changed in the second function", [&] {
          step([&] {
            wrapped.optimizer->zero_grad(to_none);
            usual();
          });
        });
      }
      step(usual);
      // Values that the program writes count, also in the copies that the optimizer updates.
      const auto norm = [&] { return net->second->weight.norm().item<double>(); };
      const auto before = norm();
      {
        const torch::NoGradGuard no_grad;
        net->second->weight.mul_(4);
      }
      step(usual);
      if (norm() < 3 * before) all += "a written value is lost\n";
      wrapped.by_range()->load_state_dict(wrapped.by_range()->state_dict());
      expect("was loaded or replaced", [&] { step(usual); });
      made.reset();
      compute();
      usual();
      return all + "end";
    });
    for (const auto& rank : ended) EXPECT_EQ(rank.text, "end");
  };
  for (const auto sharding : {test::Sharding::megatron, test::Sharding::fsdp}) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) refused(sharding, dtype);
  }
}

TEST(ElasticLoop, ELA01_an_update_that_communicates_is_refused) {
  const auto ended = test::run_ranks(3, [&](const World& world) -> std::string {
    alarm(30);
    auto model = std::make_shared<test::Net>();
    DistributedDataParallel parallel(model, world.group());
    torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(0.01));
    Elastic elastic(world, parallel, optimizer);
    const auto x = test::inputs_of({1, 2});
    while (elastic.steps() < 5) {
      elastic.step(
          2, [&] { test::loss_of(parallel.forward(x), x).backward(); },
          [&] {
            optimizer.step();
            world.all_reduce(1.0);
          });
      optimizer.zero_grad();
    }
    return "no error";
  });
  for (const auto& rank : ended) {
    EXPECT_THAT(rank.text,
                testing::AllOf(testing::HasSubstr("all_reduce(sum, 2 x Double)"),
                               testing::HasSubstr("in the second function of Elastic::step(), which could")));
  }
}

// Of FullyShardedDataParallel it adds up the norm.
TEST(ElasticLoop, ELA01_clipping_that_communicates_is_refused_in_an_update) {
  const auto ended = test::run_ranks(2, [&](const World& world) -> std::string {
    alarm(30);
    const auto net = std::make_shared<test::Net>();
    const auto wrapped = test::wrap_as({.sharding = test::Sharding::fsdp}, net, world.group());
    const auto elastic = wrapped.elastic(world);
    const auto x = test::inputs_of({1, 2});
    const auto step = [&] {
      const auto compute = [&] { test::loss_of(wrapped.forward(x), x).backward(); };
      elastic->step(2, compute, [&] {
        wrapped.clip(*net, 1e-3);
        wrapped.step();
      });
    };
    auto all = fault_of_refusal("norm of the gradients in the second function of Elastic::step()", step);
    all += fault_of_refusal("it has left the job", step);
    return all + "end";
  });
  for (const auto& rank : ended) EXPECT_EQ(rank.text, "end");
}

// Nor is there a step to finish for others where there are none.
TEST(ElasticLoop, ELA01_the_update_of_a_rank_that_is_alone_may_communicate) {
  const auto ended = test::run_ranks(1, [&](const World& world) -> std::string {
    auto model = std::make_shared<test::Net>();
    DistributedDataParallel parallel(model, world.group());
    torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(0.01));
    Elastic elastic(world, parallel, optimizer);
    const auto x = test::inputs_of({1, 2});
    double sum = 0;
    elastic.step(
        2, [&] { test::loss_of(parallel.forward(x), x).backward(); },
        [&] {
          optimizer.step();
          sum = world.all_reduce(1.0);
        });
    return fmt::format("{} of {} steps", sum, elastic.steps());
  });
  EXPECT_EQ(ended.front().text, "1 of 1 steps");
}

}  // namespace
}  // namespace shoal::elastic_loop_test
