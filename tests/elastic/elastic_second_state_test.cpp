// What both owners of a shard have in an elastic job, whatever a program does to gradients, parameters and steps.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/elastic/elastic_second.h"
#include "tests/support/refusal.h"

namespace shoal::elastic_second_state_test {
namespace {

using test::backward_of;
using test::ElasticSecondOwner;
using test::ForkedHosts;
using test::fsdp_of;
using test::fully_sharded;
using test::group_of;
using test::module_of;
using test::name_of;
using test::over;
using test::quick;
using test::Trained;

// What both owners have, whatever was done to gradients and parameters: the state of all ranks is the same without
// either of them.
struct Done {
  const char* what;
  std::function<void(const test::Wrapped& wrapped, const at::Tensor& x)> compute;
  std::function<void(const test::Wrapped& wrapped)> between{};
  bool of_fsdp = false;
  bool of_wrapper = false;  // DistributedOptimizer clips by an option
  bool of_oss = false;
};

// Whether ranks have the sums of their own parameters alone.
bool has_owners_gradients(const test::Wrapped& wrapped) {
  return dynamic_cast<const ShardedDataParallelCore*>(wrapped.parallel.get()) != nullptr;
}

const std::vector<Done> things_done{
    {"a backward", backward_of},
    {"two backwards that synchronise",
     [](const auto& wrapped, const auto& x) {
       backward_of(wrapped, x);
       backward_of(wrapped, x);
     }},
    {"a weight",
     [](const auto& wrapped, const auto& x) {
       wrapped.weighted_backward(test::loss_of(wrapped.forward(x), x), group_of(wrapped).rank() + 1);
     }},
    {"clipping by hand",
     [](const auto& wrapped, const auto& x) {
       backward_of(wrapped, x);
       wrapped.clip(module_of(wrapped), 0.1);
     },
     {},
     /*of_fsdp=*/false,
     /*of_wrapper=*/true},
    {"clipping after two backwards",
     [](const auto& wrapped, const auto& x) {
       backward_of(wrapped, x);
       backward_of(wrapped, x);
       wrapped.clip(module_of(wrapped), 0.1);
     },
     {},
     /*of_fsdp=*/false,
     /*of_wrapper=*/true},
    {"gradients that are unscaled by hand",
     [](const auto& wrapped, const auto& x) {
       wrapped.backward(1024 * test::loss_of(wrapped.forward(x), x));
       const bool all = !has_owners_gradients(wrapped);
       for (const auto& parameter : all ? module_of(wrapped).parameters() : wrapped.oss()->local_params()) {
         parameter.mutable_grad().div_(1024);
       }
       wrapped.clip(module_of(wrapped), 0.1);
     },
     {},
     /*of_fsdp=*/false,
     /*of_wrapper=*/false,
     /*of_oss=*/true},
    {"a gradient that is zeroed",
     [](const auto& wrapped, const auto& x) {
       backward_of(wrapped, x);
       module_of(wrapped).parameters()[0].mutable_grad().zero_();
     }},
    {"a gradient that is dropped",
     [](const auto& wrapped, const auto& x) {
       backward_of(wrapped, x);
       module_of(wrapped).parameters()[0].mutable_grad().reset();
     }},
    {"a parameter that is written", backward_of,
     [](const auto& wrapped) {
       const torch::NoGradGuard no_grad;
       module_of(wrapped).parameters()[0].mul_(2);
     }},
    {"parameters that are written in a scope", backward_of,
     [](const auto& wrapped) {
       const auto full = fsdp_of(wrapped).summon_full_params();
       const torch::NoGradGuard no_grad;
       for (auto& parameter : module_of(wrapped).parameters()) parameter.add_(0.5);
     },
     /*of_fsdp=*/true},
    {"a parameter that is replaced", backward_of,
     [](const auto& wrapped) {
       auto parameter = module_of(wrapped).parameters()[0];
       parameter.set_data(at::full(parameter.sizes(), 0.25, parameter.options().requires_grad(false)));
     }},
    {"all parameters are clamped", backward_of,
     [](const auto& wrapped) {
       const torch::NoGradGuard no_grad;
       for (auto& parameter : module_of(wrapped).parameters()) parameter.clamp_(-0.1, 0.1);
     }},
    {"a parameter is frozen", backward_of,
     [](const auto& wrapped) { module_of(wrapped).parameters()[2].requires_grad_(false); }}};

bool is_possible(const Done& done, const Trained& trained) {
  if (done.of_fsdp && !trained.is_fsdp()) return false;
  if (done.of_oss && (trained.is_fsdp() || trained.is_megatron())) return false;
  return !done.of_wrapper || !trained.is_megatron();
}

std::string lose_a_rank(const World& world, const Done& done, const Trained& trained, int victim) {
  alarm(30);
  const auto net = std::make_shared<test::Net>();
  net->to_dtype(trained.module_dtype());
  const auto wrapped = test::wrap_as(trained, net, world.group());
  auto options = quick;
  options.on_change = [](const ElasticChange&) {};
  const auto elastic = wrapped.elastic(world, options);
  const auto x = test::inputs_of({1, 2, 3, static_cast<size_t>(world.rank())});
  const auto state = [&] { return test::hash_of(wrapped.state(*net), *net); };
  const auto step = [&] {
    const auto compute = [&] { done.compute(wrapped, x); };
    while (!elastic->step(4, compute, [&] { wrapped.step(); })) {
    }
    wrapped.optimizer->zero_grad();
  };
  for (int i = 0; i < 3; ++i) {
    step();
    if (done.between) done.between(wrapped);
  }
  step();
  const auto before = elastic->together(state);
  if (world.rank() == victim) std::raise(SIGKILL);
  try {
    world.group().barrier().wait();
  } catch (const CommError&) {
    elastic->recover();
  }
  if (elastic->together(state) != before) return "the state has changed";
  step();
  return world.size() == 2 ? "" : fmt::format("{} ranks", world.size());
}

void expect_equal_owners(const Done& done, const Trained& trained, int victim) {
  SCOPED_TRACE(fmt::format("{}, {}, rank {}", done.what, name_of(trained), victim));
  ForkedHosts hosts(
      {1, 1, 1}, [&](const World& world) { return lose_a_rank(world, done, trained, victim); }, over("tcp"));
  const auto ended = hosts.wait(30);
  for (int rank = 0; rank < 3; ++rank) {
    const auto& one = ended[static_cast<size_t>(rank)];
    EXPECT_EQ(WIFSIGNALED(one.status), rank == victim) << one.text;
    EXPECT_EQ(one.text, "");
  }
}

TEST_F(ElasticSecondOwner, ELA02_ELA04_second_owners_have_what_the_first_ones_have) {
  int number = 0;
  for (const auto& done : things_done) {
    for (const size_t kind : {0, 1, 3, 4, 5, 6, 7}) {
      const auto& strategy = fully_sharded[kind];
      if (kind != 1 && kind < 5 && number % 2 != 0) continue;
      if (is_possible(done, strategy)) expect_equal_owners(done, strategy, ++number % 3);
    }
  }
}

// With sums in float32, of which the optimizer gets rounded ones, and two param groups.
TEST_F(ElasticSecondOwner, ELA02_ELA04_second_owners_of_16_bits_have_what_the_first_ones_have) {
  Trained trained{.optimizer = "adamw", .dtype = at::kBFloat16, .in_groups = true};
  int number = 0;
  for (const auto& done : things_done) {
    if (!done.of_oss && done.what != things_done.front().what) continue;
    for (const auto sharding : {test::Sharding::zero1, test::Sharding::zero2}) {
      trained.sharding = sharding;
      expect_equal_owners(done, trained, ++number % 3);
    }
  }
}

// The state once a rank has ended before the next commit; victim: -1 for none.
std::string write_then_lose_a_rank(const World& world, const Done& done, const Trained& trained, int victim,
                                   int steps = 3) {
  alarm(30);
  const auto net = std::make_shared<test::Net>();
  net->to_dtype(trained.module_dtype());
  const auto wrapped = test::wrap_as(trained, net, world.group());
  auto options = quick;
  options.on_change = [](const ElasticChange&) {};
  const auto elastic = wrapped.elastic(world, options);
  const auto x = test::inputs_of({1, 2, 3, static_cast<size_t>(world.rank())});
  for (int i = 0; i < steps; ++i) {
    torch::manual_seed(static_cast<uint64_t>(i));
    elastic->step(
        4, [&] { done.compute(wrapped, x); }, [&] { wrapped.step(); });
    wrapped.optimizer->zero_grad();
    if (done.between) done.between(wrapped);
  }
  if (victim >= 0) {
    if (world.rank() == victim) std::raise(SIGKILL);
    try {
      world.group().barrier().wait();
    } catch (const CommError&) {
      elastic->recover();
    }
  }
  return elastic->together([&] { return fmt::format("{:x}", test::hash_of(wrapped.state(*net), *net)); });
}

TEST_F(ElasticSecondOwner, ELA02_ELA04_what_is_written_before_a_rank_ends_is_not_lost) {
  int number = 0;
  for (const auto& done : things_done) {
    if (!done.between) continue;
    for (const auto& trained :
         {fully_sharded[0], fully_sharded[1], fully_sharded[5], fully_sharded[6], fully_sharded[7]}) {
      if (!is_possible(done, trained)) continue;
      const int victim = ++number % 3;
      SCOPED_TRACE(fmt::format("{}, {}, rank {}", done.what, name_of(trained), victim));
      const auto run = [&](int dies) {
        ForkedHosts hosts(
            {1, 1, 1}, [&](const World& world) { return write_then_lose_a_rank(world, done, trained, dies); },
            over("tcp"));
        return hosts.wait(30);
      };
      const auto expected = run(-1);
      const auto ended = run(victim);
      EXPECT_THAT(expected[0].text, testing::MatchesRegex("[0-9a-f]+"));
      for (int rank = 0; rank < 3; ++rank) {
        EXPECT_EQ(expected[static_cast<size_t>(rank)].text, expected[0].text);
        if (rank != victim) EXPECT_EQ(ended[static_cast<size_t>(rank)].text, expected[0].text) << "rank " << rank;
      }
    }
  }
}

TEST_F(ElasticSecondOwner, ELA10_values_that_only_first_owners_have_end_the_job_with_a_rank) {
  const Done written{"own parameters are written", backward_of, [](const auto& wrapped) {
                       for (const auto& values : fsdp_of(wrapped).own_parameters()) values.detach().fill_(100);
                     }};
  ForkedHosts hosts(
      {1, 1, 1},
      [&](const World& world) {
        return test::refusal<JobLost>(
            [&] { write_then_lose_a_rank(world, written, fully_sharded[0], /*victim=*/1, /*steps=*/1); });
      },
      over("tcp"));
  const auto ended = hosts.wait(30);
  for (const int rank : {0, 2})
    EXPECT_THAT(ended[static_cast<size_t>(rank)].text,
                testing::HasSubstr("the two owners of shards of first.weight and"));
}

// Step 1 has no update on rank `by`, or on all (-1). takes_part: false: no rank makes this step at all.
std::string skip_a_step(const World& world, const Trained& trained, int steps, int by, bool takes_part = true) {
  alarm(30);
  const auto net = std::make_shared<test::Net>();
  net->to_dtype(trained.module_dtype());
  const auto wrapped = test::wrap_as(trained, net, world.group());
  auto options = quick;
  options.on_change = [](const ElasticChange&) {};
  const auto elastic = wrapped.elastic(world, options);
  const auto x = test::inputs_of({1, 2, 3, static_cast<size_t>(world.rank())});
  for (int i = 0; i < steps; ++i) {
    if (i == 1 && !takes_part) continue;
    torch::manual_seed(static_cast<uint64_t>(i));
    const bool skips = i == 1 && (by < 0 || world.rank() == by);
    const auto update = [&] {
      if (!skips) wrapped.step();
    };
    elastic->step(
        4, [&] { backward_of(wrapped, x); }, update);
    wrapped.optimizer->zero_grad();
    const auto said = i == 1 ? test::refusal([&] { wrapped.step(); }) : "second function";
    if (said.find("second function") == std::string::npos) return "an update outside of a step: " + said;
  }
  if (world.rank() == 2) std::raise(SIGKILL);
  return elastic->together([&] { return fmt::format("{:x}", test::hash_of(wrapped.state(*net), *net)); });
}

TEST_F(ElasticSecondOwner, ELA01_a_step_that_all_ranks_skip_in_their_update_changes_nothing) {
  std::string expected;
  for (const bool takes_part : {false, true}) {
    ForkedHosts hosts(
        {1, 1, 1}, [&](const World& world) { return skip_a_step(world, fully_sharded[0], 4, -1, takes_part); },
        over("tcp"));
    const auto ended = hosts.wait(30);
    if (!takes_part) expected = ended[0].text;
    for (const int rank : {0, 1}) EXPECT_EQ(ended[static_cast<size_t>(rank)].text, expected);
  }
  EXPECT_EQ(expected.find("error"), std::string::npos) << expected;
}

// In the next step, or at the end of what they do together.
TEST_F(ElasticSecondOwner, ELA02_a_step_that_some_ranks_skip_is_an_error_on_all) {
  for (const auto& [steps, kind] : {std::pair(2, 0), {3, 0}, {3, 4}, {3, 6}, {3, 7}}) {
    const auto& trained = fully_sharded[static_cast<size_t>(kind)];
    SCOPED_TRACE(fmt::format("{}, {} steps", name_of(trained), steps));
    ForkedHosts hosts(
        {1, 1},
        [&, steps = steps](const World& world) {
          return test::refusal<DisagreeError>([&] { skip_a_step(world, trained, steps, /*by=*/1); });
        },
        over("tcp"));
    for (const auto& one : hosts.wait(30)) EXPECT_THAT(one.text, testing::HasSubstr("on some ranks and not on others"));
  }
}

// After Elastic, ranks own their shards alone again, and train on.
TEST_F(ElasticSecondOwner, ELA04_a_training_goes_on_after_elastic) {
  for (const auto& trained : {fully_sharded[0], fully_sharded[4], fully_sharded[6], fully_sharded[7]}) {
    SCOPED_TRACE(name_of(trained));
    ForkedHosts hosts(
        {1, 1},
        [&](const World& world) -> std::string {
          alarm(30);
          const auto x = test::inputs_of({1, 2, static_cast<size_t>(world.rank())});
          uint64_t hashes[2];
          for (const bool elastic : {false, true}) {
            const auto net = std::make_shared<test::Net>();
            const auto wrapped = test::wrap_as(trained, net, world.group());
            auto guard = elastic ? wrapped.elastic(world, quick) : nullptr;
            for (int i = 0; i < 4; ++i) {
              torch::manual_seed(static_cast<uint64_t>(i));
              const auto compute = [&] { backward_of(wrapped, x); };
              if (i == 2) guard.reset();
              if (guard) {
                guard->step(3, compute, [&] { wrapped.step(); });
              } else {
                compute();
                wrapped.step();
              }
              wrapped.optimizer->zero_grad();
            }
            hashes[elastic ? 1 : 0] = test::hash_of(wrapped.state(*net), *net);
          }
          return hashes[0] == hashes[1] ? "" : "another state";
        },
        over("tcp"));
    for (const auto& one : hosts.wait(30)) EXPECT_EQ(one.text, "");
  }
}

// It rests: all ranks have it as it is.
TEST_F(ElasticSecondOwner, ELA02_a_frozen_parameter_may_be_read_behind_the_update) {
  for (const auto& trained : {fully_sharded[4], fully_sharded[6], fully_sharded[7]}) {
    SCOPED_TRACE(name_of(trained));
    ForkedHosts hosts(
        {1, 1},
        [&](const World& world) -> std::string {
          alarm(30);
          const auto net = std::make_shared<test::Net>();
          const auto wrapped = test::wrap_as(trained, net, world.group());
          const auto elastic = wrapped.elastic(world, quick);
          const auto frozen = net->parameters()[2];
          const auto before = frozen.detach().clone();
          frozen.set_requires_grad(false);
          const auto x = test::inputs_of({1, 2, static_cast<size_t>(world.rank())});
          bool same = false;
          for (int i = 0; i < 2; ++i) {
            const auto update = [&] {
              wrapped.step();
              same = at::equal(frozen, before);
            };
            elastic->step(
                3, [&] { backward_of(wrapped, x); }, update);
            wrapped.optimizer->zero_grad();
          }
          return same ? "" : "it has changed";
        },
        over("tcp"));
    for (const auto& one : hosts.wait(30)) EXPECT_EQ(one.text, "");
  }
}

}  // namespace
}  // namespace shoal::elastic_second_state_test
