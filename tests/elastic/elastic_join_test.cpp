// Processes that come to an elastic job. Afterwards a judge repeats the training in one process, step by step, with as
// many ranks as there were, and compares the bits of parameters and optimizer state.

#include <gtest/gtest.h>

#include "shoal/schedules.h"
#include "tests/elastic/elastic_join.h"

namespace shoal::elastic_join_test {
namespace {

using test::change_from_4_to_3_to_4_to_2_to_6;
using test::expect_good;
using test::JoinJob;
using test::JoinParts;
using test::Moment;
using test::name_of;
using test::reach;
using test::sharded;
using test::Trained;

TEST(ElasticJoin, ELA06_ddp_from_4_to_3_to_4_to_2_to_6_ranks) {
  change_from_4_to_3_to_4_to_2_to_6({});
  change_from_4_to_3_to_4_to_2_to_6({}, {.optimizer = "sgd", .micro_batches = 2});
}

TEST(ElasticJoin, ELA06_sharded_from_4_to_3_to_4_to_2_to_6_ranks) {
  for (const auto& trained : sharded) {
    SCOPED_TRACE(name_of(trained));
    change_from_4_to_3_to_4_to_2_to_6({}, trained);
  }
}

TEST(ElasticJoin, ELA04_ELA06_fsdp_over_tcp) {
  WorldOptions options;
  options.transport = "tcp";
  for (const auto sharding : {test::Sharding::fsdp, test::Sharding::hybrid}) {
    const Trained trained{.sharding = sharding, .optimizer = "adamw"};
    SCOPED_TRACE(name_of(trained));
    change_from_4_to_3_to_4_to_2_to_6(options, trained);
  }
}

TEST(ElasticJoin, ELA06_ddp_over_tcp_and_gloo) {
  for (const auto* transport : {"tcp", "gloo"}) {
    SCOPED_TRACE(transport);
    WorldOptions options;
    options.transport = transport;
    change_from_4_to_3_to_4_to_2_to_6(options);
  }
}

// And it is alone again, and joined again.
void join_a_lone_rank(const Trained& trained, const WorldOptions& options = {}) {
  constexpr int epochs = 2;
  const test::SharedRecord record;
  const auto body = [&](const World& world) { return test::train(world, *record, epochs, {}, {}, trained); };
  record->last_step = 3;
  JoinJob job(1, body, options);
  ASSERT_TRUE(reach(*record, {0}, 3));
  const int second = job.add(body, options);
  ASSERT_TRUE(job.comes_to_knock(second));
  record->last_step = 6;
  ASSERT_TRUE(reach(*record, {0, second}, 6));
  job.signal(0, SIGKILL);
  record->last_step = 9;
  ASSERT_TRUE(reach(*record, {second}, 9));
  const int third = job.add(body, options);
  ASSERT_TRUE(job.comes_to_knock(third));
  record->last_step = 0;
  expect_good(job, {second, third}, *record, epochs);
  EXPECT_EQ(test::sizes_of(*record), std::vector<int>({1, 2, 1, 2}));
  EXPECT_EQ(test::judged(*record, epochs, options.transport != "gloo", trained), "");
}

TEST(ElasticJoin, ELA06_a_lone_rank_is_joined) {
  join_a_lone_rank({});
  for (const auto& trained : sharded) {
    SCOPED_TRACE(name_of(trained));
    join_a_lone_rank(trained);
  }
}

TEST(ElasticJoin, ELA04_ELA06_a_lone_rank_is_joined_over_gloo) {
  WorldOptions options;
  options.transport = "gloo";
  for (const auto sharding :
       {test::Sharding::zero1, test::Sharding::zero2, test::Sharding::megatron, test::Sharding::fsdp}) {
    const Trained trained{.sharding = sharding, .optimizer = "adamw"};
    SCOPED_TRACE(name_of(trained));
    join_a_lone_rank(trained, options);
  }
}

// The newcomer is there before the first step.
void come_before_the_first_step(const Trained& trained) {
  constexpr int epochs = 1;
  const test::SharedRecord record;
  const auto body = [&](const World& world) {
    return test::train(world, *record, epochs, {{0, Moment::after_recovery, 1}}, {}, trained);
  };
  record->last_step = -1;
  JoinJob job(3, body);
  const int newcomer = job.add(body);
  ASSERT_TRUE(job.comes_to_knock(newcomer));
  record->last_step = 0;
  const auto first = job.end_of(0);
  EXPECT_TRUE(WIFSIGNALED(first.status)) << "it ends after the admission";
  expect_good(job, {1, 2, newcomer}, *record, epochs);
  EXPECT_EQ(test::judged(*record, epochs, true, trained), "");
}

TEST(ElasticJoin, ELA06_a_newcomer_comes_before_the_first_step_and_rank_0_ends) {
  come_before_the_first_step({});
  for (const auto& trained : sharded) {
    SCOPED_TRACE(name_of(trained));
    come_before_the_first_step(trained);
  }
}

TEST(ElasticJoin, ELA06_the_learning_rate_a_scaler_and_tensors_of_the_program_come_with_the_state) {
  const test::SharedRecord record;
  const auto body = [&](const World& world) -> std::string {
    alarm(30);
    auto net = std::make_shared<test::Net>();
    DistributedDataParallel parallel(net, world.group());
    torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(0.01));
    CosineWithWarmup schedule(optimizer, {.total_steps = 100});
    GradScaler scaler({.initial_scale = 4, .growth_interval = 3});
    auto mean = at::zeros_like(net->first->weight);
    const auto quiet = [](const ElasticChange&) {};
    Elastic elastic(world, parallel, optimizer, {.scaler = &scaler, .tensors = {mean}, .on_change = quiet});
    if (world.joining()) schedule.set_position(elastic.steps());
    const auto x = test::inputs_of({1, 2});
    while (elastic.steps() < 20) {
      const auto before = elastic.steps();
      while (record->last_step != 0 && before >= record->last_step) usleep(200);
      const auto update = [&] {
        scaler.unscale({net->first->weight.grad()});
        optimizer.step();
        scaler.update(false);
        const torch::NoGradGuard no_grad;
        mean.mul_(0.9).add_(net->first->weight, 0.1);
      };
      const auto compute = [&] { scaler.scale(test::loss_of(parallel.forward(x), x)).backward(); };
      const bool complete = elastic.step(2, compute, update);
      optimizer.zero_grad();
      if (!complete) continue;
      schedule.step();
      if (elastic.steps() == 7) record->evaluations[world.rank()] = 7;
    }
    test::Hash hash;
    hash.add(mean);
    return fmt::format("{} {} {} {} on {}", hash.value, scaler.value(), scaler.state().good_steps,
                       static_cast<torch::optim::AdamOptions&>(optimizer.param_groups()[0].options()).lr(),
                       world.size());
  };
  record->last_step = 7;
  JoinJob job(2, body);
  ASSERT_TRUE(JoinJob::comes_true([&] { return record->evaluations[0] == 7 && record->evaluations[1] == 7; }));
  const int newcomer = job.add(body);
  ASSERT_TRUE(job.comes_to_knock(newcomer));
  record->last_step = 0;
  const auto first = job.end_of(0);
  EXPECT_NE(first.text.find(" on 3"), std::string::npos) << first.text;
  EXPECT_EQ(job.end_of(1).text, first.text);
  EXPECT_EQ(job.end_of(newcomer).text, first.text);
}

// As in a job that was resumed with a schedule that cycles them.
TEST(ElasticJoin, ELA06_numbers_among_the_optimizers_options_come_with_the_state) {
  const test::SharedRecord record;
  const auto body = [&](const World& world) -> std::string {
    alarm(30);
    JoinParts parts(world);
    const double first = world.joining() ? 0.9 : 0.8;
    torch::optim::AdamW optimizer(parts.net->parameters(), torch::optim::AdamWOptions(0.01).betas({first, 0.99}));
    const auto quiet = [](const ElasticChange&) {};
    Elastic elastic(world, parts.parallel, optimizer, {.on_change = quiet});
    const auto& options = static_cast<torch::optim::AdamWOptions&>(optimizer.param_groups()[0].options());
    const auto x = test::inputs_of({1, 2});
    while (elastic.steps() < 12) {
      while (record->last_step != 0 && elastic.steps() >= record->last_step) usleep(200);
      const auto compute = [&] { test::loss_of(parts.parallel.forward(x), x).backward(); };
      if (elastic.step(2, compute, [&] { optimizer.step(); })) record->evaluations[world.rank()] = elastic.steps();
      optimizer.zero_grad();
    }
    return fmt::format("{} {} on {}", test::hash_of(optimizer, *parts.net), std::get<0>(options.betas()), world.size());
  };
  record->last_step = 5;
  JoinJob job(2, body);
  ASSERT_TRUE(JoinJob::comes_true([&] { return record->evaluations[0] == 5 && record->evaluations[1] == 5; }));
  const int newcomer = job.add(body);
  ASSERT_TRUE(job.comes_to_knock(newcomer));
  record->last_step = 0;
  const auto first = job.end_of(0);
  EXPECT_NE(first.text.find(" 0.8 on 3"), std::string::npos) << first.text;
  EXPECT_EQ(job.end_of(1).text, first.text);
  EXPECT_EQ(job.end_of(newcomer).text, first.text);
}

// As a program does that loads weights at its start.
TEST(ElasticJoin, ELA06_a_newcomer_has_replaced_its_parameters_after_they_were_wrapped) {
  const test::SharedRecord record;
  const auto body = [&](const World& world) -> std::string {
    alarm(30);
    JoinParts parts(world);
    torch::optim::Adam optimizer(parts.net->parameters(), torch::optim::AdamOptions(0.01));
    for (auto& parameter : parts.net->parameters()) parameter.set_data(parameter.detach().clone());
    const auto quiet = [](const ElasticChange&) {};
    Elastic elastic(world, parts.parallel, optimizer, {.on_change = quiet});
    const auto x = test::inputs_of({1, 2});
    while (elastic.steps() < 12) {
      while (record->last_step != 0 && elastic.steps() >= record->last_step) usleep(200);
      const auto compute = [&] { test::loss_of(parts.parallel.forward(x), x).backward(); };
      if (elastic.step(2, compute, [&] { optimizer.step(); })) record->evaluations[world.rank()] = elastic.steps();
      optimizer.zero_grad();
    }
    return fmt::format("{} on {}", test::hash_of(optimizer, *parts.net), world.size());
  };
  record->last_step = 5;
  JoinJob job(2, body);
  ASSERT_TRUE(JoinJob::comes_true([&] { return record->evaluations[0] == 5 && record->evaluations[1] == 5; }));
  const int newcomer = job.add(body);
  ASSERT_TRUE(job.comes_to_knock(newcomer));
  record->last_step = 0;
  const auto first = job.end_of(0);
  EXPECT_NE(first.text.find(" on 3"), std::string::npos) << first.text;
  EXPECT_EQ(job.end_of(1).text, first.text);
  EXPECT_EQ(job.end_of(newcomer).text, first.text);
}

}  // namespace
}  // namespace shoal::elastic_join_test
