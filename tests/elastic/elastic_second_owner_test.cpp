// Elastic jobs whose shards lie on several hosts: each shard has a second owner on another host, which makes the same updates.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/sharded/second_copies.h"
#include "tests/elastic/elastic_hosts.h"
#include "tests/support/refusal.h"

namespace shoal::elastic_second_owner_test {
namespace {

using test::all_train;
using test::die_on_hosts;
using test::ForkedHosts;
using test::fully_sharded;
using test::Kind;
using test::Moment;
using test::name_of;
using test::over;
using test::quick;
using test::rarely_sharded;
using test::Trained;

class ElasticSecondOwner : public test::OnHosts {};

TEST(SecondOwners, ELA04_the_second_owner_is_on_the_next_host) {
  EXPECT_EQ(second_owners({0, 1, 2}), (std::vector<int>{1, 2, 0}));
  EXPECT_EQ(second_owners({0, 0, 1, 1}), (std::vector<int>{2, 3, 0, 1}));
  EXPECT_EQ(second_owners({0, 1, 1, 1}), (std::vector<int>{1, 0, 0, 0}));
  EXPECT_EQ(second_owners({0, 1, 0, 1, 2}), (std::vector<int>{1, 4, 3, 4, 0}));
  EXPECT_EQ(second_owners({0, 0, 0}), (std::vector<int>{1, 2, 0}));  // of one host
}

std::vector<Trained> all_sharded() {
  auto list = fully_sharded;
  list.insert(list.end(), rarely_sharded.begin(), rarely_sharded.end());
  return list;
}

TEST_F(ElasticSecondOwner, ELA01_ELA02_ELA04_nobody_ends) {
  for (const auto& trained : all_sharded()) {
    SCOPED_TRACE(name_of(trained));
    die_on_hosts({{2, 2}, "auto"}, {}, trained);
    die_on_hosts({{1, 2}, "auto"}, {}, trained);
    die_on_hosts({{1, 1, 1}, "tcp"}, {}, trained);
    die_on_hosts({{3}, "tcp"}, {}, trained);
  }
}

TEST_F(ElasticSecondOwner, ELA01_ELA02_ELA04_a_rank_ends_at_each_moment_of_a_step) {
  test::die_at_each_moment(fully_sharded);
}

TEST_F(ElasticSecondOwner, ELA01_ELA02_ELA04_a_host_with_one_rank_ends_at_each_moment_of_a_step) {
  int number = 0;
  for (const auto moment : {Moment::before_forward, Moment::after_forward, Moment::in_backward, Moment::before_commit,
                            Moment::before_update, Moment::spoilt_update, Moment::after_update, Moment::between_steps,
                            Moment::evaluation}) {
    const auto& trained = fully_sharded[static_cast<size_t>(number) % fully_sharded.size()];
    SCOPED_TRACE(fmt::format("{}, moment {}", name_of(trained), static_cast<int>(moment)));
    die_on_hosts({{1, 1, 1}, number % 2 == 0 ? "auto" : "tcp"}, {{number % 3, moment, 4}}, trained);
    ++number;
  }
}

TEST_F(ElasticSecondOwner, ELA01_ELA02_ELA04_ranks_end_one_after_the_other_until_one_is_left) {
  for (const auto& trained : all_sharded()) {
    SCOPED_TRACE(name_of(trained));
    die_on_hosts({{1, 1, 1}, "auto"}, {{1, Moment::in_backward, 3}, {0, Moment::spoilt_update, 6}}, trained);
    // Those that are left are on one host, where ranks share memory.
    die_on_hosts({{2, 2}, "auto"},
                 {{2, Moment::before_commit, 3}, {3, Moment::in_backward, 6}, {0, Moment::in_update, 9}}, trained);
    die_on_hosts({{2, 1}, "tcp"}, {{2, Moment::before_update, 3}, {1, Moment::in_backward, 6}}, trained);
  }
}

// Where there is one host, its ranks have one copy of the model between them.
TEST_F(ElasticSecondOwner, ELA01_ELA04_hybrid_shard_on_one_host_over_sockets) {
  auto hybrid = fully_sharded[0];
  hybrid.sharding = test::Sharding::hybrid;
  die_on_hosts({{3}, "tcp"}, {{1, Moment::before_forward, 4}}, hybrid);
}

TEST_F(ElasticSecondOwner, ELA02_ELA04_ranks_whose_shards_are_elsewhere_end_at_once) {
  for (const auto& trained : fully_sharded) {
    SCOPED_TRACE(name_of(trained));
    die_on_hosts({{1, 1, 1, 1}, "auto"}, {{0, Moment::before_update, 4}, {2, Moment::spoilt_update, 4}}, trained);
    die_on_hosts({{2, 2}, "auto"}, {{0, Moment::in_backward, 4}, {3, Moment::in_backward, 4}}, trained);
  }
}

TEST_F(ElasticSecondOwner, ELA01_ranks_end_while_others_recover) {
  for (const auto moment : {Moment::on_notice, Moment::in_division, Moment::after_recovery}) {
    SCOPED_TRACE(std::to_string(static_cast<int>(moment)));
    die_on_hosts({{1, 1, 1, 1}, "auto"}, {{1, Moment::in_backward, 4}, {3, moment, 4}}, fully_sharded[0]);
    die_on_hosts({{2, 2, 2}, "auto"}, {{4, Moment::before_forward, 4}, {1, moment, 4}}, fully_sharded[1]);
  }
}

TEST_F(ElasticSecondOwner, ELA10_the_loss_of_both_owners_names_the_shards) {
  const test::SharedRecord record;
  record->last_step = 3;
  ForkedHosts hosts(
      {1, 1, 1, 1}, [&](const World& world) { return test::train(world, *record, 60, {}, quick, fully_sharded[0]); },
      over("tcp"));
  ASSERT_TRUE(all_train(*record, 4));
  while (record->begun[0].empty() || record->begun[3].empty()) usleep(200);
  hosts.signal(1, SIGKILL);
  hosts.signal(2, SIGKILL);
  usleep(200'000);
  record->last_step = 0;
  const auto ended = hosts.wait(20);
  for (const int rank : {0, 3}) {
    EXPECT_THAT(
        ended[static_cast<size_t>(rank)].text,
        testing::AllOf(testing::HasSubstr("both ranks that had shards of first."),
                       testing::HasSubstr("more parameters have ended"), testing::HasSubstr("last checkpoint")));
  }
}

// What both owners have, whatever was done to gradients and parameters: the state of all ranks is the same without either of them.
struct Done {
  const char* what;
  std::function<void(const test::Wrapped& wrapped, const at::Tensor& x)> compute;
  std::function<void(const test::Wrapped& wrapped)> between{};
  bool of_fsdp = false;
  bool of_wrapper = false;  // DistributedOptimizer clips by an option
};

FullyShardedCore& fsdp_of(const test::Wrapped& wrapped) {
  return dynamic_cast<FullyShardedCore&>(*wrapped.parallel);
}

torch::nn::Module& module_of(const test::Wrapped& wrapped) {
  return wrapped.parallel ? *wrapped.parallel->module() : *wrapped.megatron()->modules().front();
}

Group group_of(const test::Wrapped& wrapped) {
  return wrapped.parallel ? wrapped.parallel->group() : wrapped.megatron()->group();
}

void backward_of(const test::Wrapped& wrapped, const at::Tensor& x) {
  wrapped.backward(test::loss_of(wrapped.forward(x), x));
}

constexpr const char* frozen = "a parameter is frozen";

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
    {frozen, backward_of, [](const auto& wrapped) { module_of(wrapped).parameters()[2].requires_grad_(false); }}};

bool is_possible(const Done& done, const Trained& trained) {
  if (done.of_fsdp && !trained.is_fsdp()) return false;
  if (done.of_wrapper && trained.is_megatron()) return false;
  return done.what != frozen || !trained.is_zero2();  // ShardedDataParallel would balance its shares
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

TEST_F(ElasticSecondOwner, ELA02_ELA04_second_owners_have_what_the_first_ones_have) {
  int number = 0;
  for (const auto& done : things_done) {
    for (const size_t kind : {0, 1, 3, 4, 5, 6, 7}) {
      const auto& strategy = fully_sharded[kind];
      if (kind != 1 && kind < 5 && number % 2 != 0) continue;
      if (!is_possible(done, strategy)) continue;
      const auto& trained = strategy;
      const int victim = ++number % 3;
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

TEST_F(ElasticSecondOwner, ELA02_options_that_differ_are_named_before_the_update) {
  ForkedHosts hosts(
      {1, 1},
      [](const World& world) {
        alarm(30);
        const auto net = std::make_shared<test::Net>();
        const auto wrapped = test::wrap_as(fully_sharded[0], net, world.group());
        const auto elastic = wrapped.elastic(world, quick);
        const auto x = test::inputs_of({1, 2});
        wrapped.optimizer->param_groups()[0].options().set_lr(0.01 * (1 + world.rank()));
        return test::refusal<DisagreeError>([&] {
          elastic->step(
              2, [&] { backward_of(wrapped, x); }, [&] { wrapped.step(); });
        });
      },
      over("tcp"));
  for (const auto& one : hosts.wait(20))
    EXPECT_THAT(one.text, testing::HasSubstr("different options of the optimizer"));
}

// A change of the gradients behind the commit would be one of the first owners alone.
TEST_F(ElasticSecondOwner, ELA02_gradients_that_change_in_the_update_are_refused) {
  for (const auto& [zeroes, kind] : {std::pair(false, 0), {true, 0}, {true, 6}, {true, 7}}) {
    ForkedHosts hosts(
        {1, 1},
        [&, zeroes = zeroes, kind = static_cast<size_t>(kind)](const World& world) {
          alarm(30);
          const auto net = std::make_shared<test::Net>();
          const auto wrapped = test::wrap_as(fully_sharded[kind], net, world.group());
          const auto elastic = wrapped.elastic(world, quick);
          const auto x = test::inputs_of({1, 2});
          const auto update = [&] {
            if (zeroes) net->parameters()[0].mutable_grad().zero_();
            if (!zeroes) fsdp_of(wrapped).own_gradients()[0].mul_(2);
            wrapped.step();
          };
          return test::refusal([&] {
            elastic->step(
                2, [&] { backward_of(wrapped, x); }, update);
          });
        },
        over("tcp"));
    for (const auto& one : hosts.wait(20))
      EXPECT_THAT(one.text, testing::HasSubstr("gradients were changed in the second function"));
  }
}

// On two hosts: what the step after `change` is refused with.
template <class Error>
void expect_refused_after(const Trained& trained, const std::function<void(const test::Wrapped&)>& change,
                          const std::string& text) {
  ForkedHosts hosts(
      {1, 1},
      [&](const World& world) {
        alarm(30);
        const auto net = std::make_shared<test::Net>();
        const auto wrapped = test::wrap_as(trained, net, world.group());
        const auto elastic = wrapped.elastic(world, quick);
        const auto x = test::inputs_of({1, 2});
        const auto step = [&] {
          elastic->step(
              2, [&] { backward_of(wrapped, x); }, [&] { wrapped.step(); });
          wrapped.optimizer->zero_grad();
        };
        step();
        change(wrapped);
        return test::refusal<Error>(step);
      },
      over("tcp"));
  for (const auto& one : hosts.wait(20)) EXPECT_THAT(one.text, testing::HasSubstr(text));
}

TEST_F(ElasticSecondOwner, ELA02_optimizer_state_that_is_loaded_later_is_refused) {
  const std::string said = "load it before Elastic is constructed";
  expect_refused_after<UsageError>(
      fully_sharded[0],
      [](const test::Wrapped& wrapped) { wrapped.by_range()->load_state_dict(wrapped.by_range()->state_dict()); },
      said);
  expect_refused_after<UsageError>(
      fully_sharded[6],
      [](const test::Wrapped& wrapped) {
        const auto& module = wrapped.parallel->module();
        wrapped.oss()->load_state_dict(*module, wrapped.oss()->state_dict(*module));
      },
      said);
}

// Past the operators and the wrapper, so that only the first owners have it.
TEST_F(ElasticSecondOwner, ELA02_values_that_only_first_owners_have_are_found) {
  const std::string said = "rank 0 and rank 1, which own the same shards in an elastic job, have different";
  expect_refused_after<DisagreeError>(
      fully_sharded[0],
      [](const test::Wrapped& wrapped) {
        for (const auto& values : fsdp_of(wrapped).own_parameters()) values.detach().add_(1);
      },
      said);
  expect_refused_after<DisagreeError>(
      fully_sharded[6],
      [](const test::Wrapped& wrapped) {
        for (const auto& parameter : wrapped.oss()->local_params()) {
          std::fill_n(parameter.data_ptr<float>(), parameter.numel(), 1.5F);
        }
      },
      said);
}

// Without second owners, nobody else looks at them.
TEST_F(ElasticSecondOwner, ELA02_gradients_that_only_first_owners_change_are_found) {
  ForkedHosts hosts(
      {1, 1},
      [](const World& world) {
        alarm(30);
        const auto net = std::make_shared<test::Net>();
        const auto wrapped = test::wrap_as(fully_sharded[6], net, world.group());
        const auto elastic = wrapped.elastic(world, quick);
        const auto x = test::inputs_of({1, 2});
        const auto compute = [&] {
          backward_of(wrapped, x);
          for (const auto& parameter : wrapped.oss()->local_params()) parameter.grad().clamp_(-1e-3, 1e-3);
        };
        return test::refusal<DisagreeError>([&] { elastic->step(2, compute, [&] { wrapped.step(); }); });
      },
      over("tcp"));
  for (const auto& one : hosts.wait(20)) {
    EXPECT_THAT(one.text, testing::HasSubstr("rank 0 and rank 1, which own the same parameters"));
  }
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

// There, behind its own update, a rank has none of the others'. Whatever one rank does with its error, all get it.
void read_early(const Trained& trained, bool caught) {
  ForkedHosts hosts(
      {1, 1, 1},
      [&](const World& world) {
        alarm(30);
        const auto net = std::make_shared<test::Net>();
        const auto wrapped = test::wrap_as(trained, net, world.group());
        const auto elastic = wrapped.elastic(world, quick);
        const auto x = test::inputs_of({1, 2, 3});
        const auto read = [&] { net->parameters()[0].sum(); };
        const auto step = [&](bool reads) {
          const auto update = [&] {
            read();
            wrapped.step();
            if (!reads) return;
            if (!caught) read();
            test::refusal(read);
          };
          elastic->step(
              2, [&] { backward_of(wrapped, x); }, update);
        };
        step(false);
        read();
        wrapped.optimizer->zero_grad();
        const auto said = test::refusal([&] { step(world.rank() == 1); });
        wrapped.optimizer->zero_grad();
        step(false);  // no rank has left the job
        return fmt::format("{} of {}", said, world.size());
      },
      over("tcp"));
  for (const auto& one : hosts.wait(20)) {
    EXPECT_THAT(one.text, testing::AllOf(testing::StartsWith("rank 1: parameter "),
                                         testing::HasSubstr("has not come from the ranks that have updated it"),
                                         testing::EndsWith(" of 3")));
  }
}

TEST_F(ElasticSecondOwner,
       ELA02_parameters_that_have_not_come_from_all_ranks_are_an_error_on_all_where_one_reads_them) {
  for (const auto& trained : {fully_sharded[4], fully_sharded[6]}) {
    for (const bool caught : {true, false}) {
      SCOPED_TRACE(fmt::format("{}, {}", name_of(trained), caught ? "caught" : "not caught"));
      read_early(trained, caught);
    }
  }
}

std::string refused(const World& world, const FullyShardedDataParallelOptions& options, bool frozen) {
  const auto net = std::make_shared<test::Net>();
  if (frozen) net->first->weight.requires_grad_(false);
  FullyShardedDataParallel<test::Net> parallel(net, world.group(), options);
  FullyShardedOptimizer<FusedAdamW> optimizer(parallel, torch::optim::AdamWOptions(1e-3));
  return test::refusal([&] { const Elastic elastic(world, parallel, optimizer, quick); });
}

TEST_F(ElasticSecondOwner, ELA04_what_has_no_second_owners_is_refused_by_name) {
  FullyShardedDataParallelOptions hooked, hybrid;
  hooked.communication_hook = std::make_shared<SumHook>();
  hybrid.sharding_strategy = ShardingStrategy::hybrid_shard;
  struct Case {
    FullyShardedDataParallelOptions options;
    bool frozen;
    std::string said;
  };
  for (const auto& one : {Case{{}, true, "frozen parameters, such as first.weight"},
                          Case{hooked, false, "communication_hook is not supported where shards have second owners"},
                          Case{hybrid, false, "hybrid_shard needs hosts whose ranks share memory"}}) {
    ForkedHosts hosts(
        {2, 2}, [&](const World& world) { return refused(world, one.options, one.frozen); }, over("tcp"));
    for (const auto& rank : hosts.wait(20)) EXPECT_THAT(rank.text, testing::HasSubstr(one.said));
  }
}

TEST_F(ElasticSecondOwner, ELA04_a_hook_of_zero2_is_refused_by_name) {
  ForkedHosts hosts(
      {1, 1},
      [](const World& world) {
        const auto net = std::make_shared<test::Net>();
        OSS<FusedAdamW> optimizer(net->parameters(), torch::optim::AdamWOptions(1e-3), world.group());
        const ShardedDataParallelOptions options{.log_sizes = false, .reduce_fp16 = true};
        ShardedDataParallel<test::Net> parallel(net, optimizer, world.group(), options);
        return test::refusal([&] { const Elastic elastic(world, parallel, optimizer, quick); });
      },
      over("tcp"));
  for (const auto& rank : hosts.wait(20)) {
    EXPECT_THAT(rank.text, testing::HasSubstr("a communication_hook or reduce_fp16 is not supported where parameters"));
  }
}

TEST_F(ElasticSecondOwner, ELA04_a_hook_of_megatron_is_refused_by_name) {
  ForkedHosts hosts(
      {1, 1},
      [](const World& world) {
        DistributedOptimizerOptions options;
        options.communication_hook = std::make_shared<SumHook>();
        DistributedOptimizer<FusedAdamW> optimizer(std::make_shared<test::Net>(), torch::optim::AdamWOptions(1e-3),
                                                   world.group(), options);
        return test::refusal([&] { const Elastic elastic(world, optimizer, quick); });
      },
      over("tcp"));
  for (const auto& rank : hosts.wait(20)) {
    EXPECT_THAT(rank.text, testing::HasSubstr("communication_hook is not supported where shards have second owners"));
  }
}

// Ranks that own the same are never killed at once; a later one is killed when the shards may or may not be divided anew.
TEST_F(ElasticSecondOwner, ELA01_ELA02_ELA04_ranks_and_hosts_end_at_random_moments) {
  const int seed = test::number_of("SHOAL_SEED", 1);
  const int trials = test::number_of("SHOAL_KILLS", 12);
  const std::vector<Kind> kinds{
      {{1, 1, 1}, "auto"}, {{1, 1, 1, 1}, "tcp"}, {{2, 2}, "auto"}, {{2, 2, 2}, "auto"}, {{1, 2}, "auto"}};
  std::mt19937 random(static_cast<unsigned>(seed));
  test::Kills kills;
  for (int trial = 0; trial < trials && !HasFailure(); ++trial) {
    const auto& kind = kinds[random() % kinds.size()];
    const auto& trained = fully_sharded[random() % fully_sharded.size()];
    std::vector<int> host_of;
    for (size_t host = 0; host < kind.hosts.size(); ++host)
      host_of.insert(host_of.end(), static_cast<size_t>(kind.hosts[host]), static_cast<int>(host));
    const auto owners = second_owners(host_of);
    const bool whole = kind.hosts.size() > 2 && random() % 2 == 0;
    const auto host = random() % kind.hosts.size();
    const int first = static_cast<int>(random() % static_cast<unsigned>(kind.ranks()));
    auto victims = whole ? kind.ranks_of(host) : std::vector<int>{first};
    const auto apart = [&](int rank) {
      return std::none_of(victims.begin(), victims.end(), [&](int victim) {
        return victim == rank || owners[static_cast<size_t>(victim)] == rank ||
               owners[static_cast<size_t>(rank)] == victim;
      });
    };
    std::vector<int> others;
    for (int rank = 0; rank < kind.ranks(); ++rank) {
      if (apart(rank)) others.push_back(rank);
    }
    const int second = others.empty() || random() % 2 == 0 ? -1 : others[random() % others.size()];
    const auto pause = static_cast<useconds_t>(random() % 80'000);
    SCOPED_TRACE(fmt::format("seed {}, trial {}: {}, rank(s) {} of hosts with {} over {}, after {} us, second {}", seed,
                             trial, name_of(trained), fmt::join(victims, ", "), fmt::join(kind.hosts, ", "),
                             kind.transport, pause, second));
    const test::SharedRecord record;
    ForkedHosts hosts(
        kind.hosts, [&](const World& world) { return test::train(world, *record, 2, {}, quick, trained); },
        over(kind.transport));
    EXPECT_TRUE(all_train(*record, hosts.ranks()));
    usleep(pause);
    if (second >= 0) {
      hosts.signal(second, SIGKILL);
      usleep(static_cast<useconds_t>(random() % 50'000));  // also while shards are divided anew
      victims.push_back(second);
    }
    whole ? hosts.kill_host(static_cast<int>(host)) : hosts.signal(first, SIGKILL);
    const auto ended = hosts.wait(40);
    test::check(ended, victims, *record, 2, true, trained);
    kills.count(ended);
  }
  fmt::print("{}\n", kills.text());
  EXPECT_GT(kills.all, 0);
}

}  // namespace
}  // namespace shoal::elastic_second_owner_test
