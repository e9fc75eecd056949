// Processes that come to an elastic job and do not fit, or go wrong before their first step: the job goes on without
// them.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <filesystem>
#include <map>

#include "comm/rendezvous/rendezvous.h"
#include "shoal/checkpoint.h"
#include "shoal/zero.h"
#include "tests/elastic/elastic_join.h"
#include "tests/support/temp_folder.h"

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
  list.push_back({"sampler: 203 samples, seed 4", [=](const World& world) {
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

TEST(ElasticJoin, ELA06_a_job_that_cannot_be_joined_says_why) {
  const test::SharedRecord record;
  const auto train = [&](const World& world, const Trained& trained) {
    return test::train(world, *record, 1, {}, {}, trained);
  };
  const auto plain = [&](const World& world) { return train(world, {}); };
  const auto zero = [&](const World& world) { return train(world, {.sharding = test::Sharding::zero1_by_host}); };
  WorldOptions tcp;
  tcp.transport = "tcp";
  record->last_step = 2;
  JoinJob job(1, zero, tcp);
  ASSERT_TRUE(reach(*record, {0}, 2));
  const auto ended = job.end_of(job.add(plain, tcp));
  EXPECT_NE(ended.text.find("ranks cannot join this job: its optimizer is sharded, which needs the transport host"),
            std::string::npos)
      << ended.text;
  record->last_step = 0;
  expect_good(job, {0}, *record, 1);
}

// Over sockets, ranks of the same host need second owners, too.
TEST(ElasticJoin, ELA06_a_hook_closes_a_job_over_sockets) {
  const test::SharedRecord record;
  const Trained trained{.sharding = test::Sharding::zero2, .hooked = true};
  const auto body = [&](const World& world) { return test::train(world, *record, 1, {}, {}, trained); };
  WorldOptions tcp;
  tcp.transport = "tcp";
  record->last_step = 2;
  JoinJob job(1, body, tcp);
  ASSERT_TRUE(reach(*record, {0}, 2));
  const auto ended = job.end_of(job.add(body, tcp));
  EXPECT_NE(ended.text.find("cannot join a job like this one: a communication_hook or reduce_fp16 is not supported"),
            std::string::npos)
      << ended.text;
  record->last_step = 0;
  expect_good(job, {0}, *record, 1);
}

// A lone rank may have them.
TEST(ElasticJoin, ELA06_sparse_gradients_of_oss_close_a_job) {
  const test::SharedRecord record;
  const auto body = [&](const World& world) -> std::string {
    alarm(30);
    const auto table = std::make_shared<torch::nn::EmbeddingImpl>(torch::nn::EmbeddingOptions(8, 4).sparse(true));
    OSS<torch::optim::SGD> optimizer(table->parameters(), torch::optim::SGDOptions(0.1), world.group());
    DistributedDataParallel parallel(table, world.group());
    const Elastic elastic(world, parallel, optimizer);
    while (record->last_step != 0) usleep(200);
    return "";
  };
  record->last_step = 1;
  JoinJob job(1, body);
  const auto ended = job.end_of(job.add(body));
  EXPECT_NE(
      ended.text.find("cannot join a job like this one: sparse gradients, such as that of weight, are not supported"),
      std::string::npos)
      << ended.text;
  record->last_step = 0;
  EXPECT_EQ(job.end_of(0).text, "");
}

// Nobody has its value and state by a name that the ranks have in common.
TEST(ElasticJoin, ELA06_a_parameter_beside_the_module_closes_a_job) {
  const test::SharedRecord record;
  const auto body = [&](const World& world) -> std::string {
    alarm(30);
    const auto net = std::make_shared<test::Net>();
    auto parameters = net->parameters();
    parameters.push_back(torch::ones({2}, torch::requires_grad()));
    OSS<torch::optim::SGD> optimizer(parameters, torch::optim::SGDOptions(0.1), world.group());
    ShardedDataParallel parallel(net, optimizer, world.group(), {.log_sizes = false});
    const Elastic elastic(world, parallel, optimizer);
    while (record->last_step != 0) usleep(200);
    return "";
  };
  record->last_step = 1;
  JoinJob job(2, body);
  const auto ended = job.end_of(job.add(body));
  EXPECT_NE(ended.text.find("its optimizer has parameter 6 [2], which no wrapper trains"), std::string::npos)
      << ended.text;
  record->last_step = 0;
  for (const int rank : {0, 1}) EXPECT_EQ(job.end_of(rank).text, "");
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

// It has been admitted, and leaves at once.
TEST(ElasticJoin, ELA06_a_newcomer_whose_loop_begins_elsewhere_is_refused) {
  constexpr int epochs = 3;
  enum class How { in_epoch, after_begin_loop, in_together };
  for (const auto how : {How::in_epoch, How::after_begin_loop, How::in_together}) {
    SCOPED_TRACE(static_cast<int>(how));
    const bool in_together = how == How::in_together;
    const test::SharedRecord record;
    const auto body = [&](const World& world) { return test::train(world, *record, epochs); };
    const auto wrong = [&](const World& world) -> std::string {
      alarm(30);
      const auto wrapped = test::wrap_as({}, std::make_shared<test::Net>(), world.group());
      DistributedSampler sampler(test::samples_of_epoch, world.group(), {.seed = 3});
      const auto elastic = wrapped.elastic(world, sampler);
      std::string text;
      try {
        if (in_together) elastic->together([&] { return world.all_reduce(1.0); });
        if (how == How::after_begin_loop) elastic->begin_loop();
        sampler.set_epoch(elastic->first_epoch() + 1);
        elastic->in_epoch();
      } catch (const UsageError& error) {
        text = error.what();
      }
      usleep(500'000);  // it lives on, and keeps nobody
      return text;
    };
    record->last_step = 20;  // in the second epoch
    JoinJob job(2, body);
    ASSERT_TRUE(reach(*record, {0, 1}, 20));
    const int newcomer = job.add(wrong);
    ASSERT_TRUE(job.comes_to_knock(newcomer));
    record->last_step = 0;
    const auto ended = job.end_of(newcomer);
    const auto* text = in_together ? "calls together() before" : "the job is in epoch";
    EXPECT_NE(ended.text.find(text), std::string::npos) << ended.text;
    expect_good(job, {0, 1}, *record, epochs);
    EXPECT_EQ(test::judged(*record, epochs), "");
  }
}

// A newcomer that is admitted, and goes wrong before its first step is complete.
enum class FirstStep { other_batch, communicates, other_rate, throws, hangs };

std::string begin_wrongly(const World& world, FirstStep how) {
  alarm(60);
  JoinParts parts(world);
  torch::optim::Adam optimizer(parts.net->parameters(), torch::optim::AdamOptions(0.01));
  DistributedSampler sampler(test::samples_of_epoch, world.group(), {.seed = 3});
  Elastic elastic(world, parts.parallel, optimizer, sampler);
  std::string text;
  try {
    if (how == FirstStep::communicates) world.barrier();
    if (how == FirstStep::other_rate) optimizer.param_groups()[0].options().set_lr(0.02);
    sampler.set_epoch(elastic.first_epoch());
    while (elastic.in_epoch()) {
      auto division = sampler;
      division.reset();
      const auto batch = division.next(how == FirstStep::other_batch ? 3 : test::batch_size);
      const auto x = test::inputs_of(*batch);
      const auto compute = [&] {
        if (how == FirstStep::throws) throw std::runtime_error("of the program");
        if (how == FirstStep::hangs) usleep(14'000'000);
        test::loss_of(parts.parallel.forward(x), x).backward();
      };
      elastic.step(static_cast<int64_t>(batch->size()), compute, [&] { optimizer.step(); });
    }
  } catch (const UsageError& error) {
    text = error.what();
  } catch (const std::runtime_error& error) {
    text = fmt::format("not of shoal: {}", error.what());
  }
  if (how == FirstStep::communicates) throw UsageError(text);  // its destructor tells the others
  usleep(500'000);                                             // it lives on, and keeps nobody
  return text;
}

TEST(ElasticJoin, ELA06_a_newcomer_that_goes_wrong_before_its_first_complete_step_leaves_and_the_others_go_on) {
  const std::map<FirstStep, std::string> expected{
      {FirstStep::other_batch, "with a newcomer, ranks have 3 to 4 samples in one step, and this one has 3"},
      {FirstStep::communicates, "barrier in a newcomer to an elastic job before its loop begins"},
      {FirstStep::other_rate, "ranks have learning rates from 0.01 to 0.02 in param group 0, and this one has 0.02"},
      {FirstStep::throws, "not of shoal: of the program"},
      {FirstStep::hangs, "the job has refused this newcomer"}};
  constexpr int epochs = 2;
  for (const auto& [how, text] : expected) {
    SCOPED_TRACE(text);
    const test::SharedRecord record;
    const auto body = [&](const World& world) { return test::train(world, *record, epochs); };
    record->last_step = 4;
    JoinJob job(3, body);
    ASSERT_TRUE(reach(*record, {0, 1, 2}, 4));
    const int newcomer = job.add([how = how](const World& world) { return begin_wrongly(world, how); });
    ASSERT_TRUE(job.comes_to_knock(newcomer));
    record->last_step = 0;
    expect_good(job, {0, 1, 2}, *record, epochs);
    const auto ended = job.end_of(newcomer);
    EXPECT_NE(ended.text.find(text), std::string::npos) << ended.text;
    EXPECT_FALSE(job.board().is_member(newcomer));
    EXPECT_EQ(test::sizes_of(*record), std::vector<int>({3}));
    EXPECT_EQ(test::judged(*record, epochs), "");
  }
}

// Rank 0 of one would replace the job's checkpoint.
TEST(ElasticJoin, ELA06_a_newcomer_does_not_save_before_it_is_admitted) {
  const test::SharedRecord record;
  const test::TempFolder folder;
  const auto body = [&](const World& world) { return test::train(world, *record, 1); };
  record->last_step = 2;
  JoinJob job(2, body);
  ASSERT_TRUE(reach(*record, {0, 1}, 2));
  const auto ended = job.end_of(job.add([&](const World& world) -> std::string {
    JoinParts parts(world);
    torch::optim::Adam optimizer(parts.net->parameters(), torch::optim::AdamOptions(0.01));
    TrainingState state(parts.parallel, optimizer);
    save(folder.path() / "run", state);
    return "it has saved";
  }));
  EXPECT_NE(ended.text.find("saves a checkpoint before the elastic job has admitted it"), std::string::npos)
      << ended.text;
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "run"));
  record->last_step = 0;
  expect_good(job, {0, 1}, *record, 1);
}

// Without a sampler. The newcomer's schedule is at another place than the job's, which shows in a later step, or it
// asks for an epoch.
TEST(ElasticJoin, ELA06_a_newcomer_with_another_schedule_or_without_epochs_leaves) {
  for (const bool asks : {false, true}) {
    SCOPED_TRACE(asks);
    const test::SharedRecord record;
    const auto body = [&](const World& world) -> std::string {
      alarm(30);
      JoinParts parts(world);
      torch::optim::Adam optimizer(parts.net->parameters(), torch::optim::AdamOptions(0.01));
      const auto quiet = [](const ElasticChange&) {};
      Elastic elastic(world, parts.parallel, optimizer, {.on_change = quiet});
      const auto x = test::inputs_of({1, 2});
      const auto begin = elastic.steps();
      try {
        if (asks) elastic.first_epoch();
        while (elastic.steps() < 20) {
          while (record->last_step != 0 && elastic.steps() >= record->last_step) usleep(200);
          if (world.joining() && elastic.steps() == begin + 3) optimizer.param_groups()[0].options().set_lr(0.005);
          const auto compute = [&] { test::loss_of(parts.parallel.forward(x), x).backward(); };
          if (elastic.step(2, compute, [&] { optimizer.step(); })) record->evaluations[world.rank()] = elastic.steps();
          optimizer.zero_grad();
        }
      } catch (const UsageError& error) {
        return fmt::format("after {} steps: {}", elastic.steps() - begin, error.what());
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
    EXPECT_NE(first.text.find(" on 2"), std::string::npos) << first.text;
    EXPECT_EQ(job.end_of(1).text, first.text);
    const auto* text = asks ? "after 0 steps: Elastic: first_epoch() in a newcomer needs a sampler"
                            : "after 3 steps: Elastic: ranks have learning rates from 0.005 to 0.01";
    const auto ended = job.end_of(newcomer);
    EXPECT_NE(ended.text.find(text), std::string::npos) << ended.text;
  }
}

// An entry whose memory cannot be opened, and one of a process that has ended.
TEST(ElasticJoin, ELA06_entries_that_lead_nowhere_are_skipped) {
  constexpr int epochs = 1;
  const test::SharedRecord record;
  const auto body = [&](const World& world) { return test::train(world, *record, epochs); };
  record->last_step = 3;
  JoinJob job(2, body);
  ASSERT_TRUE(reach(*record, {0, 1}, 3));
  const pid_t other = fork();
  if (other == 0) {
    pause();
    std::_Exit(0);
  }
  const int no_memory = job.take_number();
  job.board().knock(no_memory, {.host = host_identity(), .process = process_of(other), .page = {other, 7, 1}});
  const int gone = job.take_number();
  job.board().knock(gone, {.host = host_identity(), .process = {1 << 21, 5}, .page = {1 << 21, 7, 1}});
  const int good = job.add(body);
  ASSERT_TRUE(job.comes_to_knock(good));
  record->last_step = 0;
  expect_good(job, {0, 1, good}, *record, epochs);
  EXPECT_EQ(test::sizes_of(*record), std::vector<int>({2, 3}));
  EXPECT_FALSE(job.board().refusal(no_memory).empty());
  EXPECT_FALSE(job.board().refusal(gone).empty());
  EXPECT_EQ(test::judged(*record, epochs), "");
  kill(other, SIGKILL);
  waitpid(other, nullptr, 0);
}

// A newcomer that gives up asks no more, and one whose job has ended is told so.
TEST(ElasticJoin, ELA06_a_newcomer_gives_up) {
  const test::SharedRecord record;
  const auto body = [&](const World& world) { return test::train(world, *record, 1); };
  record->last_step = 3;
  JoinJob job(2, body);
  ASSERT_TRUE(reach(*record, {0, 1}, 3));
  WorldOptions impatient;
  impatient.while_waiting = [asked = 0]() mutable {
    if (++asked == 5) throw std::runtime_error("enough");
  };
  const int newcomer = job.add(body, impatient);
  EXPECT_NE(job.end_of(newcomer).text.find("enough"), std::string::npos);
  EXPECT_TRUE(job.board().knocking().empty());
  const int late = job.add(body);
  ASSERT_TRUE(job.comes_to_knock(late));
  job.signal(0, SIGKILL);
  job.signal(1, SIGKILL);
  const auto ended = job.end_of(late);
  EXPECT_NE(ended.text.find("the job that this process was to join has ended"), std::string::npos) << ended.text;
}

}  // namespace
}  // namespace shoal::elastic_misfit_test
