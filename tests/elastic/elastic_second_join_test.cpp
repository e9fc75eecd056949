// Processes that come to elastic jobs whose shards lie on several hosts, and have second owners there.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/elastic/elastic_hosts_join.h"
#include "tests/support/refusal.h"

namespace shoal::elastic_second_join_test {
namespace {

using test::bring;
using test::Death;
using test::expect_good;
using test::ForkedHosts;
using test::fully_sharded;
using test::Moment;
using test::name_of;
using test::over;
using test::quick;
using test::reach;
using test::Trained;

class ElasticSecondJoin : public test::OnHosts {};

// Two ranks, one of them, two of a host, the one that has come, and three of two hosts.
void grow_from_one(const std::string& transport, const Trained& trained) {
  constexpr int epochs = 2;
  const test::SharedRecord record;
  record->last_step = 3;
  ForkedHosts hosts({1, 1, 0},
                    [&](const World& world) { return test::train(world, *record, epochs, {}, quick, trained); },
                    over(transport), {1, 0, 2});
  ASSERT_TRUE(reach(*record, {0, 1}, 3));
  hosts.signal(1, SIGKILL);
  record->last_step = 6;
  ASSERT_TRUE(reach(*record, {0}, 6));
  bring(hosts, {2});
  record->last_step = 9;
  ASSERT_TRUE(reach(*record, {0, 2}, 9)) << hosts.text_of(2).value_or("it waits");
  hosts.signal(0, SIGKILL);
  record->last_step = 12;
  ASSERT_TRUE(reach(*record, {2}, 12));
  bring(hosts, {3, 4});
  record->last_step = 0;
  expect_good(hosts.wait(60), {2, 3, 4}, *record, epochs);
  EXPECT_EQ(test::sizes_of(*record), std::vector<int>({2, 1, 2, 1, 3}));
  EXPECT_EQ(test::judged(*record, epochs, true, trained), "");
}

TEST_F(ElasticSecondJoin, ELA04_ELA06_one_rank_grows_to_several_hosts) {
  int number = 0;
  for (const auto& trained : fully_sharded) {
    const std::string transport = number++ % 2 == 0 ? "tcp" : "auto";
    SCOPED_TRACE(fmt::format("{} over {}", name_of(trained), transport));
    grow_from_one(transport, trained);
  }
}

// One process comes to each of these jobs.
struct Case {
  std::vector<int> hosts;
  std::vector<int> later;
  std::string transport;
  Death death;
};

TEST_F(ElasticSecondJoin, ELA04_ELA06_ranks_end_or_stand_still_while_shards_are_divided_for_a_newcomer) {
  constexpr int epochs = 1;
  const std::vector<Case> cases{{{1, 1, 1, 0}, {0, 0, 0, 1}, "auto", {3, Moment::in_division, 1}},
                                {{1, 1, 1, 0}, {0, 0, 0, 1}, "tcp", {1, Moment::in_division, 4}},
                                {{2, 0}, {0, 1}, "auto", {1, Moment::in_division, 4}},
                                {{2, 0}, {0, 1}, "auto", {2, Moment::in_division, 1}},
                                {{1, 1, 0}, {0, 0, 1}, "tcp", {2, Moment::in_division, 1, SIGSTOP}}};
  int number = 0;
  for (const auto& one : cases) {
    const auto& trained = fully_sharded[static_cast<size_t>(number) % fully_sharded.size()];
    SCOPED_TRACE(fmt::format("case {}: {} over {}", number++, name_of(trained), one.transport));
    const test::SharedRecord record;
    record->last_step = 4;
    ForkedHosts hosts(
        one.hosts, [&](const World& world) { return test::train(world, *record, epochs, {one.death}, quick, trained); },
        over(one.transport), one.later);
    std::vector<int> members(static_cast<size_t>(hosts.ranks()));
    std::iota(members.begin(), members.end(), 0);
    ASSERT_TRUE(reach(*record, members, 4));
    bring(hosts, {hosts.ranks()});
    record->last_step = 0;
    std::erase(members, one.death.rank);
    if (one.death.signal == SIGSTOP) {
      EXPECT_TRUE(test::JoinJob::comes_true([&] { return hosts.text_of(0) && hosts.text_of(1); }));
      hosts.signal(one.death.rank, SIGKILL);
    }
    const auto ended = hosts.wait(40);
    EXPECT_TRUE(WIFSIGNALED(ended[static_cast<size_t>(one.death.rank)].status));
    expect_good(ended, members, *record, epochs);
    if (one.death.rank < hosts.ranks()) EXPECT_EQ(ended[static_cast<size_t>(hosts.ranks())].text, "");
    EXPECT_EQ(test::judged(*record, epochs, true, trained), "");
  }
}

// The first ranks train with the bits that they have alone, and those that come after them are refused.
struct Misfits {
  std::vector<int> hosts;
  std::vector<int> later;
  std::string transport;
  std::string said;
  bool frozen = false;   // a parameter
  double rate = 0.01;    // of those that come
  int after = 0;         // steps with the others
  bool gives = false;    // of each member and newcomer, what it reads of its parameters
  int ends = -1;         // a member that ends in the division for them
  bool all_end = false;  // with the same error: the members could not go on without those that came
  Trained trained = fully_sharded[0];
};

void expect_misfits(const Misfits& misfits) {
  constexpr int steps = 6;
  const test::SharedRecord record;
  const int ranks = std::accumulate(misfits.hosts.begin(), misfits.hosts.end(), 0);
  std::vector<int> members(static_cast<size_t>(ranks));
  std::iota(members.begin(), members.end(), 0);
  int ends_at = -1;  // step, where nobody comes
  const auto train = [&](const World& world) {
    alarm(30);
    const int self = test::member_number(world);
    const auto net = std::make_shared<test::Net>();
    if (misfits.frozen) net->first->weight.requires_grad_(false);
    const auto wrapped = test::wrap_as(misfits.trained, net, world.group());
    auto options = quick;
    options.on_change = [](const ElasticChange&) {};
    if (misfits.gives) {
      options.save_state = [&] { return std::to_string(test::sum_of(*net)); };
      options.load_state = [](const std::string&) {};
    }
    const auto elastic = wrapped.elastic(world, options);
    const auto x = test::inputs_of({1, 2, static_cast<size_t>(self)});
    if (self == misfits.ends) test::at_making = [] { std::raise(SIGKILL); };
    int made = 0;
    while (elastic->steps() < steps) {
      if (self == misfits.ends && elastic->steps() == ends_at) std::raise(SIGKILL);
      if (self >= ranks && made == misfits.after) wrapped.optimizer->param_groups()[0].options().set_lr(misfits.rate);
      while (record->last_step != 0 && elastic->steps() >= record->last_step) usleep(200);
      torch::manual_seed(static_cast<uint64_t>(elastic->steps()));
      const auto compute = [&] { wrapped.backward(test::loss_of(wrapped.forward(x), x)); };
      if (!elastic->step(3, compute, [&] { wrapped.step(); })) continue;
      wrapped.optimizer->zero_grad();
      record->evaluations[self] = static_cast<int>(elastic->steps());
      ++made;
    }
    return elastic->together([&] { return fmt::format("{:x}", test::hash_of(wrapped.state(*net), *net)); });
  };
  record->last_step = 3;
  ForkedHosts hosts(misfits.hosts, train, over(misfits.transport), misfits.later);
  ASSERT_TRUE(test::JoinJob::comes_true([&] {
    return std::all_of(members.begin(), members.end(), [&](int member) { return record->evaluations[member] == 3; });
  }));
  std::vector<int> newcomers(static_cast<size_t>(std::accumulate(misfits.later.begin(), misfits.later.end(), 0)));
  std::iota(newcomers.begin(), newcomers.end(), ranks);
  bring(hosts, newcomers);
  record->last_step = 0;
  const auto ended = hosts.wait(40);
  if (misfits.ends >= 0) ends_at = record->evaluations[misfits.ends];
  ForkedHosts alone(misfits.hosts, train, over(misfits.transport));
  const auto expected = alone.wait(30);
  std::erase(members, misfits.ends);
  for (const int member : members) {
    const auto& text = ended[static_cast<size_t>(member)].text;
    if (misfits.all_end) EXPECT_THAT(text, testing::HasSubstr(misfits.said));
    if (!misfits.all_end) EXPECT_EQ(text, misfits.after == 0 ? expected[0].text : ended[0].text);
    if (!misfits.all_end) EXPECT_THAT(text, testing::MatchesRegex("[0-9a-f]+"));
  }
  for (const int newcomer : newcomers) {
    EXPECT_THAT(ended[static_cast<size_t>(newcomer)].text, testing::HasSubstr(misfits.said)) << newcomer;
  }
}

// They own shards twice among themselves.
TEST_F(ElasticSecondJoin, ELA06_newcomers_that_part_from_the_job_together_take_no_shards_along) {
  expect_misfits({{1, 1, 0, 0}, {0, 0, 1, 1}, "gloo", "learning rates from", /*frozen=*/false, /*rate=*/0.5});
}

// Its first try has failed with a member, so that they have been through a division already.
TEST_F(ElasticSecondJoin, ELA06_newcomers_that_part_after_a_second_try_take_no_shards_along) {
  Misfits misfits{{1, 1, 1, 0, 0}, {0, 0, 0, 1, 1}, "tcp", "learning rates from", /*frozen=*/false, /*rate=*/0.5};
  misfits.ends = 2;
  expect_misfits(misfits);
}

// Later, what they have alone is lost with them.
TEST_F(ElasticSecondJoin, ELA06_a_difference_is_named_on_all_ranks_if_those_that_came_cannot_be_spared) {
  Misfits misfits{{1, 1, 0, 0}, {0, 0, 1, 1}, "tcp", "different options of the optimizer"};
  misfits.rate = 0.5;
  misfits.after = 1;
  misfits.all_end = true;
  expect_misfits(misfits);
  misfits.hosts = {1, 1, 0};
  misfits.later = {0, 0, 1};
  misfits.all_end = false;  // the second owners of its shards go on
  expect_misfits(misfits);
}

TEST_F(ElasticSecondJoin, ELA06_a_program_that_gives_parameters_is_told_so) {
  Misfits misfits{{1, 1, 0}, {0, 0, 1}, "tcp", "save_state must not read parameters"};
  misfits.gives = true;
  expect_misfits(misfits);
}

TEST_F(ElasticSecondJoin, ELA06_a_rank_of_another_host_cannot_join_where_frozen_parameters_would_need_second_owners) {
  expect_misfits({{2, 0}, {0, 1}, "auto", "frozen parameters, such as first.weight", /*frozen=*/true});
}

// They have no owner.
void join_with_frozen(const Trained& trained) {
  const test::SharedRecord record;
  record->last_step = 3;
  ForkedHosts hosts({1, 1, 0},
                    [&](const World& world) {
                      alarm(30);
                      const auto net = std::make_shared<test::Net>();
                      net->first->weight.requires_grad_(false);
                      const torch::NoGradGuard no_grad;
                      if (world.joining()) net->first->weight.fill_(5);
                      const auto wrapped = test::wrap_as(trained, net, world.group());
                      auto options = quick;
                      options.on_change = [](const ElasticChange&) {};
                      const auto elastic = wrapped.elastic(world, options);
                      const auto x = test::inputs_of({1, 2, 3});
                      while (elastic->steps() < 6) {
                        while (record->last_step != 0 && elastic->steps() >= record->last_step) usleep(200);
                        const auto compute = [&] {
                          const at::AutoGradMode grad(true);
                          wrapped.backward(test::loss_of(wrapped.forward(x), x));
                        };
                        if (!elastic->step(3, compute, [&] { wrapped.step(); })) continue;
                        wrapped.optimizer->zero_grad();
                        record->evaluations[test::member_number(world)] = static_cast<int>(elastic->steps());
                      }
                      return fmt::format("{:x} of {}", test::hash_of(OptimizerState(), *net), world.size());
                    },
                    over("tcp"), {0, 0, 1});
  ASSERT_TRUE(test::JoinJob::comes_true([&] { return record->evaluations[0] == 3 && record->evaluations[1] == 3; }));
  bring(hosts, {2});
  record->last_step = 0;
  const auto ended = hosts.wait(40);
  for (const auto& one : ended) {
    EXPECT_EQ(one.text, ended[0].text);
    EXPECT_THAT(one.text, testing::EndsWith("of 3"));
  }
}

TEST_F(ElasticSecondJoin, ELA06_frozen_parameters_that_are_whole_come_to_a_newcomer) {
  for (const auto& trained : {fully_sharded[4], fully_sharded[6]}) {
    SCOPED_TRACE(name_of(trained));
    join_with_frozen(trained);
  }
}

// The others need no second owners, as those of their host do not.
TEST_F(ElasticSecondJoin, ELA06_a_hook_keeps_out_ranks_of_another_host_and_no_others) {
  for (const size_t kind : {0, 4, 7}) {
    auto trained = fully_sharded[kind];
    trained.hooked = true;
    SCOPED_TRACE(name_of(trained));
    const test::SharedRecord record;
    record->last_step = 3;
    ForkedHosts hosts({1, 0},
                      [&](const World& world) {
                        alarm(30);
                        const auto net = std::make_shared<test::Net>();
                        const auto wrapped = test::wrap_as(trained, net, world.group());
                        auto options = quick;
                        options.on_change = [](const ElasticChange&) {};
                        const auto elastic = wrapped.elastic(world, options);
                        const auto x = test::inputs_of({1, 2, 3});
                        while (elastic->steps() < 9) {
                          while (record->last_step != 0 && elastic->steps() >= record->last_step) usleep(200);
                          const auto compute = [&] { wrapped.backward(test::loss_of(wrapped.forward(x), x)); };
                          if (!elastic->step(3, compute, [&] { wrapped.step(); })) continue;
                          wrapped.optimizer->zero_grad();
                          record->evaluations[test::member_number(world)] = static_cast<int>(elastic->steps());
                        }
                        return fmt::format("of {}", world.size());
                      },
                      over("auto"), {1, 1});
    ASSERT_TRUE(test::JoinJob::comes_true([&] { return record->evaluations[0] == 3; }));
    bring(hosts, {2});
    record->last_step = 6;
    ASSERT_TRUE(test::JoinJob::comes_true([&] { return record->evaluations[0] == 6; }));
    bring(hosts, {1});
    record->last_step = 0;
    const auto ended = hosts.wait(40);
    EXPECT_THAT(ended[2].text,
                testing::AllOf(testing::HasSubstr("the job has refused this newcomer: it is on another host than"),
                               testing::HasSubstr("a communication_hook or reduce_fp16 is not supported")));
    EXPECT_EQ(ended[0].text, "of 2");
    EXPECT_EQ(ended[1].text, "of 2");
  }
}

TEST_F(ElasticSecondJoin, ELA06_a_rank_of_another_host_cannot_join_hybrid_shard_over_sockets) {
  Misfits misfits{{2, 0}, {0, 1}, "tcp", "hybrid_shard needs hosts whose ranks share memory"};
  misfits.trained.sharding = test::Sharding::hybrid;
  expect_misfits(misfits);
}

}  // namespace
}  // namespace shoal::elastic_second_join_test
