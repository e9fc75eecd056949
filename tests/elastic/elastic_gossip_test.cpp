// Elastic jobs of hosts that average their parameters: a rank ends in each moment of a step, and neither its host nor
// the job ends with it.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <utility>

#include "tests/elastic/elastic_hosts.h"
#include "tests/support/refusal.h"

namespace shoal::elastic_gossip_test {
namespace {

using test::ForkedHosts;
using test::Kind;
using test::Moment;
using test::name_of;
using test::over;
using test::quick;
using test::Sharding;
using test::Trained;

class ElasticGossip : public test::OnHosts {};

const std::vector<Trained> gossips{
    {.sharding = Sharding::gossip, .optimizer = "adamw", .micro_batches = 2},
    {.sharding = Sharding::gossip, .optimizer = "adamw", .dtype = at::kBFloat16, .clip = 0.3},
    {.sharding = Sharding::gossip, .optimizer = "sgd", .dtype = at::kHalf},
    {.sharding = Sharding::gossip, .optimizer = "sgd", .width = 258},
    {.sharding = Sharding::gossip, .optimizer = "lamb"}};

TEST_F(ElasticGossip, ELA12_without_deaths_the_state_is_that_of_one_process) {
  const std::vector<std::vector<int>> divisions{{2, 2}, {1, 1, 1}, {3}};
  size_t left_out = 0;
  for (const auto& trained : gossips) {
    SCOPED_TRACE(name_of(trained));
    for (const size_t more : {1, 2}) {
      test::die_on_hosts({divisions[(left_out + more) % divisions.size()], "auto"}, {}, trained);
    }
    ++left_out;
  }
}

TEST_F(ElasticGossip, ELA12_a_rank_ends_at_each_moment_of_a_step) {
  test::die_at_each_moment(gossips);
}

// As many ranks of each host own shards as the smallest has; in the end the host is gone.
TEST_F(ElasticGossip, ELA12_ranks_of_one_host_end_one_after_the_other) {
  for (const auto& trained : gossips) {
    SCOPED_TRACE(name_of(trained));
    test::die_on_hosts({{3, 3}, "auto"},
                       {{4, Moment::spoilt_update, 3}, {3, Moment::in_backward, 4}, {5, Moment::before_update, 6}},
                       trained);
  }
}

TEST_F(ElasticGossip, ELA12_heirs_end_while_they_finish_an_update) {
  for (const auto& trained : gossips) {
    SCOPED_TRACE(name_of(trained));
    test::die_on_hosts({{3, 3}, "auto"}, {{3, Moment::spoilt_update, 4}, {4, Moment::finishing, 4}}, trained);
  }
}

TEST_F(ElasticGossip, ELA12_ranks_and_hosts_end_at_random_moments) {
  test::kill_on_hosts_at_random({{{2, 2}, "auto"}, {{3, 3}, "auto"}, {{2, 2, 2}, "auto"}, {{1, 1, 1}, "auto"}}, gossips,
                                [](const Kind&, const Trained&) { return true; });
}

TEST_F(ElasticGossip, ELA12_what_would_not_outlive_a_rank_is_refused_by_name) {
  ForkedHosts hosts({2, 2}, [](const World& world) -> std::string {
    alarm(30);
    const auto fault = [&](const Group& inside, const Group& across, const ShardGossipOptions& gossip,
                           const ElasticOptions& options) {
      const auto net = std::make_shared<test::Net>();
      FullyShardedDataParallel<test::Net> parallel(net, inside);
      ShardGossipOptimizer<torch::optim::SGD> optimizer(parallel, torch::optim::SGDOptions(0.1), across, gossip);
      return test::refusal([&] {
        DistributedSampler sampler(64, world.group());
        const Elastic elastic(world, parallel, optimizer, sampler, options);
      });
    };
    const auto of = host_groups(world.group());
    const auto pairs = host_groups(world.group(), 1);
    return fault(of.inside, of.across, {.overlap = false}, {}) + "|" + fault(pairs.inside, pairs.across, {}, {}) + "|" +
           fault(of.inside, of.across, {}, {.keep_global_batch = 8});
  });
  for (const auto& one : hosts.wait(30)) {
    EXPECT_THAT(one.text,
                testing::AllOf(testing::HasSubstr("overlap is off"),
                               testing::HasSubstr("make them with host_groups(world.group())"),
                               testing::HasSubstr("with ShardGossipOptimizer each host, updates with its own")));
  }
}

uint64_t hash_of_parameters(const torch::nn::Module& module) {
  test::Hash hash;
  for (const auto& parameter : module.parameters()) hash.add(parameter);
  return hash.value;
}

// A rank ends while parameters hold the mean, or while some may: the values of its host are those from before.
TEST_F(ElasticGossip, ELA12_a_rank_ends_while_the_mean_of_the_hosts_is_held) {
  for (const auto& trained : gossips) {
    for (const bool early : {false, true}) {
      SCOPED_TRACE(fmt::format("{}, {}", name_of(trained), early ? "before it has given its part" : "within"));
      ForkedHosts hosts(
          {2, 2},
          [&](const World& world) -> std::string {
            alarm(30);
            const int self = world.rank();
            const auto net = std::make_shared<test::Net>(trained.width);
            const auto wrapped = test::wrap_as(trained, net, world.group());
            auto& optimizer = dynamic_cast<ShardGossipOptimizerCore&>(*wrapped.optimizer);
            const auto elastic = wrapped.elastic(world, quick);
            const auto x = test::inputs_of({static_cast<size_t>(self), 9});
            const auto step = [&] {
              const bool complete = elastic->step(
                  2, [&] { wrapped.backward(test::loss_of(wrapped.forward(x), x)); }, [&] { wrapped.step(); });
              optimizer.zero_grad();
              return complete;
            };
            for (int i = 0; i < 3; ++i) step();
            const auto before = hash_of_parameters(*net);
            std::vector<int64_t> hashes;
            elastic->together([&] {
              if (early && self == 2) std::raise(SIGKILL);
              const auto mean = optimizer.mean_parameters();
              if (self == 2) std::raise(SIGKILL);
              const auto own = static_cast<int64_t>(hash_of_parameters(*net) >> 1);
              auto all = at::empty({world.size()}, at::kLong);
              world.group().all_gather(all, at::full({1}, own, at::kLong)).wait();
              hashes.assign(all.const_data_ptr<int64_t>(), all.const_data_ptr<int64_t>() + all.numel());
            });
            if (hashes.size() != 3 || hashes[0] != hashes[1] || hashes[0] != hashes[2]) return "no mean";
            if (hashes[0] == static_cast<int64_t>(before >> 1)) return "the mean is the host's own values";
            if (hash_of_parameters(*net) != before) return "the values are not those from before";
            return step() ? "" : "no step";
          },
          over("auto"));
      const auto ended = hosts.wait(40);
      for (const int rank : {0, 1, 3}) EXPECT_EQ(ended[static_cast<size_t>(rank)].text, "") << "rank " << rank;
      EXPECT_TRUE(WIFSIGNALED(ended[2].status));
    }
  }
}

// A step that all ranks refuse alike changes nothing, and what was gathered for it serves the next one.
TEST_F(ElasticGossip, ELA12_a_program_goes_on_after_an_error_of_the_meeting) {
  ForkedHosts hosts({2, 2}, [](const World& world) -> std::string {
    alarm(30);
    const auto net = std::make_shared<test::Net>();
    const auto wrapped = test::wrap_as(gossips[0], net, world.group());
    const auto& optimizer = dynamic_cast<const ShardGossipOptimizerCore&>(*wrapped.optimizer);
    DistributedSampler sampler(64, world.group());
    const auto elastic = wrapped.elastic(world, sampler, quick);
    elastic->in_epoch();
    const auto x = test::inputs_of({static_cast<size_t>(world.rank()), 2});
    const auto step = [&](int64_t samples) {
      const bool complete = elastic->step(
          samples, [&] { test::loss_of(wrapped.forward(x), x).backward(); }, [&] { wrapped.step(); });
      wrapped.optimizer->zero_grad();
      return complete;
    };
    step(2);
    const auto said = test::refusal([&] { step(world.rank() == 3 ? 1 : 2); });
    wrapped.optimizer->zero_grad();
    if (!step(2) || !step(2)) return "a step was not complete";
    return fmt::format("{}, {} skipped", said, optimizer.statistics().skipped);
  });
  for (const auto& one : hosts.wait(30)) {
    EXPECT_THAT(one.text, testing::AllOf(testing::HasSubstr("ranks have 1 to 2 samples in one step"),
                                         testing::HasSubstr(", 0 skipped")));
  }
}

// One host has a rank, the other two, of which one owns nothing.
TEST_F(ElasticGossip, ELA12_plain_steps_go_on_after_an_elastic_loop_that_has_lost_a_rank) {
  ForkedHosts job({2, 2}, [](const World& world) -> std::string {
    alarm(30);
    const int self = world.rank();
    const auto net = std::make_shared<test::Net>();
    const auto wrapped = test::wrap_as(gossips[3], net, world.group());
    auto& optimizer = dynamic_cast<ShardGossipOptimizerCore&>(*wrapped.optimizer);
    const auto x = test::inputs_of({static_cast<size_t>(self)});
    const auto backward = [&] { wrapped.backward(test::loss_of(wrapped.forward(x), x)); };
    {
      const auto elastic = wrapped.elastic(world, quick);
      while (elastic->steps() < 4) {
        if (self == 3 && elastic->steps() == 2) std::raise(SIGKILL);
        elastic->step(1, backward, [&] { wrapped.step(); });
        optimizer.zero_grad();
      }
    }
    for (int step = 0; step < 3; ++step) {
      backward();
      wrapped.step();
      optimizer.zero_grad();
    }
    if (optimizer.consensus_distance() <= 0) return "no distance";
    { const auto mean = optimizer.mean_parameters(); }
    optimizer.global_avg();
    auto text =
        fmt::format("{} ranks, {} near", world.size(), optimizer.consensus_distance() < 1e-5 ? "are" : "are not");
    // One of the two others has no shards; both learn that the second host has gone.
    if (world.rank() == 2) std::raise(SIGKILL);
    for (int look = 0; look < 100 && optimizer.remaining(world.group()).size() == 3; ++look) usleep(50'000);
    return text + fmt::format(", {} left", optimizer.remaining(world.group()).size());
  });
  const auto ended = job.wait(40);
  for (const int rank : {0, 1}) EXPECT_EQ(ended[static_cast<size_t>(rank)].text, "3 ranks, are near, 2 left");
}

// It has given its part to the commit, and its values to its peer on the other host, which is late and comes to a step
// without it. The losses are zero, so that the step does nothing but average.
TEST_F(ElasticGossip, ELA12_a_rank_that_ends_after_its_part_of_the_commit_is_averaged) {
  struct Shared {
    std::atomic<int64_t> at;  // when rank 3 ends, in microseconds
  };
  auto* shared =
      static_cast<Shared*>(mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  const auto now = [] {
    return std::chrono::duration_cast<std::chrono::microseconds>(Clock::now().time_since_epoch()).count();
  };
  const auto wait_until = [now](int64_t when) {
    while (now() < when) std::this_thread::yield();
  };
  for (const int late : {0, 1000, 3000, 6000, 10000, 15000, 20000, 30000}) {
    shared->at = 0;
    ForkedHosts hosts(
        {2, 2},
        [&](const World& world) -> std::string {
          alarm(40);
          const int self = world.rank();
          const auto net = std::make_shared<test::Net>(24);
          const auto of = host_groups(world.group());
          FullyShardedDataParallelOptions options;
          options.auto_wrap_policy = wrap_type<torch::nn::LinearImpl>();
          FullyShardedDataParallel<test::Net> parallel(net, of.inside, options);
          ShardGossipOptimizer<torch::optim::SGD> optimizer(parallel, torch::optim::SGDOptions(0.05), of.across);
          Elastic elastic(world, parallel, optimizer);
          const auto x = test::inputs_of({static_cast<size_t>(self), 9});
          const auto step = [&](double scale, const std::function<void()>& before_end) {
            elastic.step(
                2,
                [&] {
                  (test::loss_of(parallel.forward(x), x) * scale).backward();
                  before_end();
                },
                [&] { optimizer.step(); });
            optimizer.zero_grad();
          };
          for (int number = 0; number < 4; ++number) step(self < 2 ? 1 : 3, [] {});
          const auto values = [&] {
            const torch::NoGradGuard no_grad;
            std::vector<at::Tensor> list;
            for (const auto& parameter : net->parameters()) list.push_back(parameter.detach().reshape({-1}));
            return at::cat(list);
          };
          const auto own = values();
          auto all = at::empty({int64_t{4} * own.numel()});
          elastic.together([&] { world.group().all_gather(all, own).wait(); });
          bool first = true;
          while (elastic.steps() < 5) {
            step(0, [&] {
              if (std::exchange(first, false) && self == 3) {
                shared->at = now() + 15000;
                std::thread([&] {
                  wait_until(shared->at);
                  std::raise(SIGKILL);
                }).detach();
              } else if (self == 1 && world.size() == 4) {
                while (shared->at == 0) usleep(50);
                wait_until(shared->at + late);
              }
            });
          }
          const auto mean = (all.chunk(4)[0] + all.chunk(4)[3]) / 2;
          return (values() - mean).abs().max().item<double>() < 1e-5 ? "averaged" : "not averaged";
        },
        over("auto"));
    const auto ended = hosts.wait(45);
    for (const int rank : {0, 1, 2})
      EXPECT_EQ(ended[static_cast<size_t>(rank)].text, "averaged") << rank << " " << late;
  }
  munmap(shared, sizeof(Shared));
}

TEST_F(ElasticGossip, ELA12_a_mean_that_stays_is_refused_within_the_job_and_there_after_it) {
  ForkedHosts hosts({2, 2}, [](const World& world) -> std::string {
    alarm(30);
    const auto net = std::make_shared<test::Net>();
    const auto of = host_groups(world.group());
    FullyShardedDataParallel<test::Net> parallel(net, of.inside);
    ShardGossipOptimizer<torch::optim::SGD> optimizer(parallel, torch::optim::SGDOptions(0.1), of.across);
    const auto x = test::inputs_of({static_cast<size_t>(world.rank())});
    std::string said;
    {
      Elastic elastic(world, parallel, optimizer);
      for (int step = 0; step < 3; ++step) {
        elastic.step(
            1, [&] { test::loss_of(parallel.forward(x), x).backward(); }, [&] { optimizer.step(); });
        optimizer.zero_grad();
      }
      said = test::refusal([&] { optimizer.global_avg(); }) + test::refusal([&] { optimizer.step_without_update(); });
      {
        const auto mean = optimizer.mean_parameters();
        said += test::refusal([&] {
          elastic.step(
              1, [&] { test::loss_of(parallel.forward(x), x).backward(); }, [&] { optimizer.step(); });
        });
      }
      if (elastic.together([&] { return optimizer.consensus_distance(); }) <= 0) return "no distance";
    }
    optimizer.zero_grad();
    test::loss_of(parallel.forward(x), x).backward();
    optimizer.step();
    optimizer.global_avg();
    return optimizer.consensus_distance() < 1e-6 ? said : "no mean";
  });
  for (const auto& one : hosts.wait(30)) {
    EXPECT_THAT(one.text, testing::AllOf(testing::HasSubstr("global_avg() in an elastic job"),
                                         testing::HasSubstr("step_without_update() in an elastic job"),
                                         testing::HasSubstr("a step within a scope of mean_parameters()")));
  }
}

}  // namespace
}  // namespace shoal::elastic_gossip_test
