// Processes that come to an elastic job and do not fit: the job goes on without them.

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>

#include "shoal/zero.h"
#include "tests/elastic/elastic_join.h"

namespace shoal::elastic_misfit_test {
namespace {

using test::expect_good;
using test::JoinJob;
using test::JoinParts;
using test::reach;
using test::Trained;

// What a newcomer is that does not fit, and the part of its error that says why.
struct Misfit {
  const char* text;
  std::function<std::string(const World&)> body;
  const char* transport = "auto";
};

std::vector<Misfit> misfits() {
  using torch::optim::Adam;
  using torch::optim::AdamOptions;
  static GradScaler scaler;
  const auto elastic = [](const World& world, JoinParts& parts, torch::optim::Optimizer& optimizer,
                          const DistributedSamplerOptions& how = {.seed = 3}, const ElasticOptions& options = {}) {
    DistributedSampler sampler(test::samples_of_epoch, world.group(), how);
    const Elastic made(world, parts.parallel, optimizer, sampler, options);
    return std::string("it was admitted");
  };
  std::vector<Misfit> list;
  list.push_back({"param group 0: 6 parameters", [=](const World& world) {
                    JoinParts parts(world);
                    Adam optimizer(parts.net->parameters(), AdamOptions(0.01).amsgrad(true));
                    return elastic(world, parts, optimizer);
                  }});
  list.push_back({"parameters of group 0: third.bias, ", [=](const World& world) {
                    JoinParts parts(world);
                    auto parameters = parts.net->parameters();
                    std::reverse(parameters.begin(), parameters.end());
                    Adam optimizer(parameters, AdamOptions(0.01));
                    return elastic(world, parts, optimizer);
                  }});
  list.push_back({"optimizer: torch::optim::SGD", [=](const World& world) {
                    JoinParts parts(world);
                    torch::optim::SGD optimizer(parts.net->parameters(), 0.01);
                    return elastic(world, parts, optimizer);
                  }});
  list.push_back({"parameter second.weight Float [32, 32]", [=](const World& world) {
                    JoinParts parts(world, 32);
                    Adam optimizer(parts.net->parameters(), AdamOptions(0.01));
                    return elastic(world, parts, optimizer);
                  }});
  list.push_back({"grad_reduce_in_fp32: yes", [=](const World& world) {
                    JoinParts parts(world, 24, {.grad_reduce_in_fp32 = true});
                    Adam optimizer(parts.net->parameters(), AdamOptions(0.01));
                    return elastic(world, parts, optimizer);
                  }});
  list.push_back({"cannot join a job like this one: its communication hook, powersgd", [=](const World& world) {
                    JoinParts parts(world, 24, {.communication_hook = std::make_shared<PowerSgdHook>()});
                    Adam optimizer(parts.net->parameters(), AdamOptions(0.01));
                    return elastic(world, parts, optimizer);
                  }});
  list.push_back({"sampler: 127 samples, seed 4", [=](const World& world) {
                    JoinParts parts(world);
                    Adam optimizer(parts.net->parameters(), AdamOptions(0.01));
                    return elastic(world, parts, optimizer, {.seed = 4});
                  }});
  list.push_back({"to 1 at least (the job: loss scaler: none)", [=](const World& world) {
                    JoinParts parts(world);
                    Adam optimizer(parts.net->parameters(), AdamOptions(0.01));
                    return elastic(world, parts, optimizer, {.seed = 3}, {.scaler = &scaler});
                  }});
  list.push_back({"ElasticOptions::tensors[0]: Float [3]", [=](const World& world) {
                    JoinParts parts(world);
                    Adam optimizer(parts.net->parameters(), AdamOptions(0.01));
                    return elastic(world, parts, optimizer, {.seed = 3}, {.tensors = {at::zeros({3})}});
                  }});
  list.push_back({"transport: tcp (the job: transport: auto)",
                  [=](const World& world) {
                    JoinParts parts(world);
                    Adam optimizer(parts.net->parameters(), AdamOptions(0.01));
                    return elastic(world, parts, optimizer);
                  },
                  "tcp"});
  list.push_back({"optimizer: shoal::OSS<torch::optim::Adam>", [=](const World& world) {
                    JoinParts parts(world);
                    OSS<Adam> optimizer(parts.net->parameters(), AdamOptions(0.01), world.group());
                    return elastic(world, parts, optimizer);
                  }});
  return list;
}

// The job goes on in its first generation: nobody has noticed them.
TEST(ElasticJoin, ELA06_a_newcomer_that_does_not_fit_ends_alone) {
  constexpr int epochs = 1;
  const test::SharedRecord record;
  const auto body = [&](const World& world) { return test::train(world, *record, epochs); };
  record->last_step = 4;
  JoinJob job(2, body);
  ASSERT_TRUE(reach(*record, {0, 1}, 4));
  for (const auto& misfit : misfits()) {
    WorldOptions options;
    options.transport = misfit.transport;
    const auto ended = job.end_of(job.add(misfit.body, options));
    EXPECT_TRUE(WIFEXITED(ended.status));
    EXPECT_NE(ended.text.find(misfit.text), std::string::npos) << misfit.text << ": " << ended.text;
    EXPECT_EQ(ended.text.find("bucket_cap_mb"), std::string::npos) << "named though it is equal: " << ended.text;
  }
  record->last_step = 0;
  expect_good(job, {0, 1}, *record, epochs);
  for (const auto& entry : record->complete[0]) EXPECT_EQ(entry.generation, 1U);
  EXPECT_EQ(test::judged(*record, epochs), "");
}

// What the optimizer of a sharded strategy does with gradients is not among the options of its param groups.
TEST(ElasticJoin, ELA06_a_newcomer_with_other_options_of_a_sharded_optimizer_ends_alone) {
  Trained other{.sharding = test::Sharding::megatron, .optimizer = "adamw", .clip = 0.3};
  const Trained trained{.sharding = test::Sharding::megatron, .optimizer = "adamw"};
  const test::SharedRecord record;
  const auto body = [&](const World& world) { return test::train(world, *record, 1, {}, {}, trained); };
  record->last_step = 2;
  JoinJob job(2, body);
  ASSERT_TRUE(reach(*record, {0, 1}, 2));
  const auto clipped =
      job.end_of(job.add([&](const World& world) { return test::train(world, *record, 1, {}, {}, other); }));
  EXPECT_NE(clipped.text.find("clip_grad: 0.3 (the job: clip_grad: 0)"), std::string::npos) << clipped.text;
  other = {.sharding = test::Sharding::zero1, .optimizer = "adamw"};
  const auto zero =
      job.end_of(job.add([&](const World& world) { return test::train(world, *record, 1, {}, {}, other); }));
  EXPECT_NE(zero.text.find("(the job: strategy: DistributedOptimizer)"), std::string::npos) << zero.text;
  record->last_step = 0;
  expect_good(job, {0, 1}, *record, 1);
  EXPECT_EQ(test::judged(*record, 1, true, trained), "");
}

// So that it has other shares.
TEST(ElasticJoin, ELA06_a_newcomer_that_froze_a_parameter_before_the_optimizer_was_made_ends_alone) {
  for (const auto sharding :
       {test::Sharding::zero1, test::Sharding::zero2, test::Sharding::megatron, test::Sharding::fsdp}) {
    SCOPED_TRACE(test::short_name(sharding));
    const test::SharedRecord record;
    const auto body = [&](const World& world) -> std::string {
      alarm(30);
      const auto net = std::make_shared<test::Net>();
      if (world.joining()) net->third->bias.set_requires_grad(false);
      const auto wrapped = test::wrap_as({.sharding = sharding}, net, world.group());
      net->third->bias.set_requires_grad(false);
      const auto elastic = wrapped.elastic(world);
      const auto x = test::inputs_of({1, 2});
      while (elastic->steps() < 4) {
        while (record->last_step != 0 && elastic->steps() >= record->last_step) usleep(200);
        const auto compute = [&] { wrapped.backward(test::loss_of(wrapped.forward(x), x)); };
        if (!elastic->step(2, compute, [&] { wrapped.step(); })) continue;
        wrapped.optimizer->zero_grad();
        record->evaluations[world.rank()] = static_cast<int>(elastic->steps());
      }
      return "";
    };
    record->last_step = 2;
    JoinJob job(2, body);
    ASSERT_TRUE(JoinJob::comes_true([&] { return record->evaluations[0] == 2 && record->evaluations[1] == 2; }));
    const auto ended = job.end_of(job.add(body));
    const bool oss = sharding == test::Sharding::zero1 || sharding == test::Sharding::zero2;
    const auto* said =
        oss ? "frozen when OSS was made, and have no owner: third.bias (the job: " : "group 0: 5 parameters";
    EXPECT_NE(ended.text.find(said), std::string::npos) << ended.text;
    record->last_step = 0;
    for (const int rank : {0, 1}) EXPECT_EQ(job.end_of(rank).text, "");
  }
}

// It fits what the job was, and is refused before it costs the job a recovery.
TEST(ElasticJoin, ELA06_a_job_that_has_frozen_a_parameter_refuses_newcomers_and_goes_on_in_its_generation) {
  for (const auto sharding : {test::Sharding::none, test::Sharding::zero2, test::Sharding::megatron}) {
    SCOPED_TRACE(test::short_name(sharding));
    const test::SharedRecord record;
    const auto body = [&](const World& world) -> std::string {
      alarm(30);
      const auto net = std::make_shared<test::Net>();
      const auto wrapped = test::wrap_as({.sharding = sharding}, net, world.group());
      const auto elastic = wrapped.elastic(world);
      const auto x = test::inputs_of({1, 2});
      while (elastic->steps() < 4) {
        if (elastic->steps() == 1) net->third->bias.set_requires_grad(false);
        while (record->last_step != 0 && elastic->steps() >= record->last_step) usleep(200);
        const auto compute = [&] { wrapped.backward(test::loss_of(wrapped.forward(x), x)); };
        if (!elastic->step(2, compute, [&] { wrapped.step(); })) continue;
        wrapped.optimizer->zero_grad();
        record->evaluations[world.rank()] = static_cast<int>(elastic->steps());
      }
      return elastic->generation() == 1 ? "" : "a recovery";
    };
    record->last_step = 2;
    JoinJob job(2, body);
    ASSERT_TRUE(JoinJob::comes_true([&] { return record->evaluations[0] == 2 && record->evaluations[1] == 2; }));
    const int newcomer = job.add(body);
    ASSERT_TRUE(job.comes_to_knock(newcomer));
    record->last_step = 0;
    const auto ended = job.end_of(newcomer);
    EXPECT_NE(ended.text.find("the job has refused this newcomer: the job has changed since"), std::string::npos)
        << ended.text;
    for (const int rank : {0, 1}) EXPECT_EQ(job.end_of(rank).text, "");
  }
}

TEST(ElasticJoin, ELA06_a_newcomer_with_other_limits_of_pages_ends_alone) {
  const Trained trained{.sharding = test::Sharding::fsdp};
  const test::SharedRecord record;
  record->last_step = 2;
  JoinJob job(1, [&](const World& world) { return test::train(world, *record, 1, {}, {}, trained); });
  ASSERT_TRUE(reach(*record, {0}, 2));
  const auto ended = job.end_of(job.add([&](const World& world) {
    alarm(30);
    auto options = test::fsdp_options<torch::optim::Adam>(trained);
    options.byte_limit = 1 << 20;
    FullyShardedDataParallel<test::Net> parallel(std::make_shared<test::Net>(), world.group(), options);
    FullyShardedOptimizer<torch::optim::Adam> optimizer(parallel, torch::optim::AdamOptions(0.01));
    DistributedSampler sampler(test::samples_of_epoch, world.group(), {.seed = 3});
    const Elastic made(world, parallel, optimizer, sampler);
    return std::string("it was admitted");
  }));
  EXPECT_NE(ended.text.find("byte_limit: 1048576 (the job: byte_limit: none)"), std::string::npos) << ended.text;
  record->last_step = 0;
  expect_good(job, {0}, *record, 1);
}

}  // namespace
}  // namespace shoal::elastic_misfit_test
