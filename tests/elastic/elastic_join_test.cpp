// Processes that come to an elastic job. Afterwards a judge repeats the training in one process, step by step, with as
// many ranks as there were, and compares the bits of parameters and optimizer state.

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <filesystem>
#include <numeric>
#include <random>
#include <set>

#include "base/environment.h"
#include "comm/rendezvous/rendezvous.h"
#include "shoal/checkpoint.h"
#include "shoal/schedules.h"
#include "shoal/zero.h"
#include "tests/elastic/elastic_join.h"
#include "tests/support/temp_folder.h"

namespace shoal::elastic_join_test {
namespace {

using test::Death;
using test::JoinJob;
using test::Moment;
using test::Trained;

int number(const char* variable, int otherwise) {
  const auto text = process_environment()(variable);
  return text ? std::stoi(*text) : otherwise;
}

// Until all of these have seen step `step` complete.
bool reach(const test::Record& record, const std::vector<int>& members, int64_t step) {
  return JoinJob::comes_true([&] {
    return std::all_of(members.begin(), members.end(), [&](int member) {
      const auto& list = record.complete[member];
      return !list.empty() && (list.end() - 1)->step >= step;
    });
  });
}

void expect_good(JoinJob& job, const std::vector<int>& members, const test::Record& record, int epochs) {
  for (const int member : members) {
    const auto ended = job.end_of(member);
    EXPECT_TRUE(WIFEXITED(ended.status)) << "member " << member << " hung or crashed: " << ended.status;
    EXPECT_EQ(ended.text, "") << "member " << member;
    EXPECT_EQ(record.evaluations[member].load(), epochs - record.first_epoch[member].load()) << "member " << member;
  }
}

void change_from_4_to_3_to_4_to_2_to_6(const WorldOptions& options, const Trained& trained = {}) {
  constexpr int epochs = 6;
  const test::SharedRecord record;
  const auto body = [&](const World& world) { return test::train(world, *record, epochs, {}, {}, trained); };
  record->last_step = 5;
  JoinJob job(4, body, options);
  ASSERT_TRUE(reach(*record, {0, 1, 2, 3}, 5));
  job.signal(1, SIGKILL);
  record->last_step = 10;
  ASSERT_TRUE(reach(*record, {0, 2, 3}, 10));
  const int first = job.add(body, options);
  ASSERT_TRUE(job.comes_to_knock(first));
  record->last_step = 15;
  ASSERT_TRUE(reach(*record, {0, 2, 3, first}, 15));
  job.signal(0, SIGKILL);
  job.signal(first, SIGKILL);
  record->last_step = 20;
  ASSERT_TRUE(reach(*record, {2, 3}, 20));
  std::vector<int> members{2, 3};
  for (int i = 0; i < 4; ++i) members.push_back(job.add(body, options));
  for (const int member : members) ASSERT_TRUE(job.comes_to_knock(member));
  record->last_step = 0;
  expect_good(job, members, *record, epochs);
  EXPECT_EQ(test::sizes_of(*record), std::vector<int>({4, 3, 4, 2, 6}));
  EXPECT_EQ(test::judged(*record, epochs, options.transport != "gloo", trained), "");
}

TEST(ElasticJoin, ELA06_ddp_from_4_to_3_to_4_to_2_to_6_ranks) {
  change_from_4_to_3_to_4_to_2_to_6({});
  change_from_4_to_3_to_4_to_2_to_6({}, {.optimizer = "sgd", .micro_batches = 2});
}

TEST(ElasticJoin, ELA06_ddp_over_tcp_and_gloo) {
  for (const auto* transport : {"tcp", "gloo"}) {
    SCOPED_TRACE(transport);
    WorldOptions options;
    options.transport = transport;
    change_from_4_to_3_to_4_to_2_to_6(options);
  }
}

TEST(ElasticJoin, ELA06_a_lone_rank_is_joined) {
  constexpr int epochs = 2;
  const test::SharedRecord record;
  const auto body = [&](const World& world) { return test::train(world, *record, epochs); };
  record->last_step = 3;
  JoinJob job(1, body);
  ASSERT_TRUE(reach(*record, {0}, 3));
  const int second = job.add(body);
  ASSERT_TRUE(job.comes_to_knock(second));
  record->last_step = 0;
  expect_good(job, {0, second}, *record, epochs);
  EXPECT_EQ(test::sizes_of(*record), std::vector<int>({1, 2}));
  EXPECT_EQ(test::judged(*record, epochs), "");
}

// The newcomer is there before the first step.
TEST(ElasticJoin, ELA06_a_newcomer_comes_before_the_first_step_and_rank_0_ends) {
  constexpr int epochs = 1;
  const test::SharedRecord record;
  const auto body = [&](const World& world) {
    return test::train(world, *record, epochs, {{0, Moment::after_recovery, 1}});
  };
  record->last_step = -1;
  JoinJob job(3, body);
  const int newcomer = job.add(body);
  ASSERT_TRUE(job.comes_to_knock(newcomer));
  record->last_step = 0;
  const auto first = job.end_of(0);
  EXPECT_TRUE(WIFSIGNALED(first.status)) << "it ends after the admission";
  expect_good(job, {1, 2, newcomer}, *record, epochs);
  EXPECT_EQ(test::judged(*record, epochs), "");
}

// A global batch of 36 samples in 12 shares. Writes down the loss of a fixed batch after each step, and who takes a sample.
constexpr int whole_epochs = 4;
constexpr size_t whole_samples = 180;

struct Whole {
  test::Record record;
  std::atomic<int> taken[whole_epochs][whole_samples];
};

class SharedWhole {
 public:
  SharedWhole()
      : whole_(static_cast<Whole*>(
            mmap(nullptr, sizeof(Whole), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {
    if (whole_ == MAP_FAILED) throw std::bad_alloc();
  }
  ~SharedWhole() { munmap(whole_, sizeof(Whole)); }
  SharedWhole(const SharedWhole&) = delete;
  SharedWhole& operator=(const SharedWhole&) = delete;
  Whole& operator*() const { return *whole_; }

 private:
  Whole* whole_;
};

std::string train_whole(const World& world, Whole& whole) {
  alarm(60);
  auto& record = whole.record;
  const int self = test::member_number(world);
  auto net = std::make_shared<test::Net>();
  net->to(at::kDouble);
  DistributedDataParallel parallel(net, world.group());
  torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(0.01));
  DistributedSampler sampler(whole_samples, world.group(), {.seed = 3});
  const auto quiet = [](const ElasticChange&) {};
  Elastic elastic(world, parallel, optimizer, sampler, {.keep_global_batch = 36, .shares = 12, .on_change = quiet});
  const auto seen = test::inputs_of({1, 2, 3}).to(at::kDouble);
  for (auto epoch = elastic.first_epoch(); epoch < whole_epochs; ++epoch) {
    sampler.set_epoch(epoch);
    while (elastic.in_epoch()) {
      auto part = sampler;
      part.reset();
      while (const auto batch = part.next(static_cast<size_t>(elastic.batch_size()))) {
        const auto x = test::inputs_of(*batch).to(at::kDouble);
        const auto compute = [&](int64_t begin, int64_t end) {
          while (record.last_step != 0 && elastic.steps() >= record.last_step) usleep(200);
          const auto share = x.slice(0, begin, end);
          test::loss_of(parallel.forward(share), share).backward();
        };
        if (!elastic.step(x.size(0), compute, [&] { optimizer.step(); })) break;
        optimizer.zero_grad();
        for (const auto sample : *batch) ++whole.taken[epoch][sample];
        const torch::NoGradGuard no_grad;
        const auto hidden = at::tanh(net->second(at::tanh(net->first(seen))));
        const auto loss = test::loss_of(net->third(hidden), seen).item<double>();
        record.complete[self].add({.step = elastic.steps(), .ranks = world.size(), .at = loss});
      }
    }
  }
  return "";
}

TEST(ElasticJoin, ELA05_ELA06_the_losses_are_those_of_ranks_that_do_not_change) {
  const SharedWhole plain;
  for (const auto& ended : test::run_ranks(2, [&](const World& world) { return train_whole(world, *plain); })) {
    EXPECT_EQ(ended.text, "");
  }
  const SharedWhole changed;
  auto& record = (*changed).record;
  const auto body = [&](const World& world) { return train_whole(world, *changed); };
  record.last_step = 3;
  JoinJob job(4, body);
  ASSERT_TRUE(reach(record, {0, 1, 2, 3}, 3));
  job.signal(0, SIGKILL);
  record.last_step = 6;
  ASSERT_TRUE(reach(record, {1, 2, 3}, 6));
  const int first = job.add(body);
  ASSERT_TRUE(job.comes_to_knock(first));
  record.last_step = 9;
  ASSERT_TRUE(reach(record, {1, 2, 3, first}, 9));
  job.signal(2, SIGKILL);
  job.signal(3, SIGKILL);
  record.last_step = 12;
  ASSERT_TRUE(reach(record, {1, first}, 12));
  std::vector<int> members{1, first};
  for (int i = 0; i < 4; ++i) members.push_back(job.add(body));
  for (const int member : members) ASSERT_TRUE(job.comes_to_knock(member));
  record.last_step = 0;
  for (const int member : members) EXPECT_EQ(job.end_of(member).text, "") << "member " << member;
  EXPECT_EQ(test::sizes_of(record), std::vector<int>({4, 3, 4, 2, 6}));
  std::map<int64_t, double> expected;
  for (const auto& entry : (*plain).record.complete[0]) expected[entry.step] = entry.at;
  EXPECT_EQ(expected.size(), 5U * whole_epochs);
  int64_t last = 0;
  for (const auto& list : record.complete) {
    for (const auto& entry : list) {
      EXPECT_NEAR(entry.at, expected.at(entry.step), 1e-12) << "step " << entry.step;
      last = std::max(last, entry.step);
    }
  }
  EXPECT_EQ(last, 5 * whole_epochs);
  for (const auto& epoch : (*changed).taken) {
    for (const auto& times : epoch) EXPECT_EQ(times.load(), 1);
  }
}

// What a newcomer is that does not fit, and the part of its error that says why.
struct Misfit {
  const char* text;
  std::function<std::string(const World&)> body;
  const char* transport = "auto";
};

// As in the job, but for what the arguments say.
struct Parts {
  explicit Parts(const World& world, int64_t width = 24, DistributedDataParallelOptions options = {})
      : net(std::make_shared<test::Net>(width)), parallel(net, world.group(), small(options)) {}
  static DistributedDataParallelOptions small(DistributedDataParallelOptions& options) {
    options.first_bucket_mb = options.bucket_cap_mb = 1e-3;
    return options;
  }
  std::shared_ptr<test::Net> net;
  DistributedDataParallel<test::Net> parallel;
};

std::vector<Misfit> misfits() {
  using torch::optim::Adam;
  using torch::optim::AdamOptions;
  static GradScaler scaler;
  const auto elastic = [](const World& world, Parts& parts, torch::optim::Optimizer& optimizer,
                          const DistributedSamplerOptions& how = {.seed = 3}, const ElasticOptions& options = {}) {
    DistributedSampler sampler(test::samples_of_epoch, world.group(), how);
    const Elastic made(world, parts.parallel, optimizer, sampler, options);
    return std::string("it was admitted");
  };
  std::vector<Misfit> list;
  list.push_back({"param group 0: 6 parameters", [=](const World& world) {
                    Parts parts(world);
                    Adam optimizer(parts.net->parameters(), AdamOptions(0.01).betas({0.8, 0.999}));
                    return elastic(world, parts, optimizer);
                  }});
  list.push_back({"optimizer: torch::optim::SGD", [=](const World& world) {
                    Parts parts(world);
                    torch::optim::SGD optimizer(parts.net->parameters(), 0.01);
                    return elastic(world, parts, optimizer);
                  }});
  list.push_back({"parameter second.weight Float [32, 32]", [=](const World& world) {
                    Parts parts(world, 32);
                    Adam optimizer(parts.net->parameters(), AdamOptions(0.01));
                    return elastic(world, parts, optimizer);
                  }});
  list.push_back({"grad_reduce_in_fp32: yes", [=](const World& world) {
                    Parts parts(world, 24, {.grad_reduce_in_fp32 = true});
                    Adam optimizer(parts.net->parameters(), AdamOptions(0.01));
                    return elastic(world, parts, optimizer);
                  }});
  list.push_back({"cannot join a job like this one: its communication hook, powersgd", [=](const World& world) {
                    Parts parts(world, 24, {.communication_hook = std::make_shared<PowerSgdHook>()});
                    Adam optimizer(parts.net->parameters(), AdamOptions(0.01));
                    return elastic(world, parts, optimizer);
                  }});
  list.push_back({"sampler: 203 samples, seed 4", [=](const World& world) {
                    Parts parts(world);
                    Adam optimizer(parts.net->parameters(), AdamOptions(0.01));
                    return elastic(world, parts, optimizer, {.seed = 4});
                  }});
  list.push_back({"loss scaler: given (the job: loss scaler: none)", [=](const World& world) {
                    Parts parts(world);
                    Adam optimizer(parts.net->parameters(), AdamOptions(0.01));
                    return elastic(world, parts, optimizer, {.seed = 3}, {.scaler = &scaler});
                  }});
  list.push_back({"ElasticOptions::tensors[0]: Float [3]", [=](const World& world) {
                    Parts parts(world);
                    Adam optimizer(parts.net->parameters(), AdamOptions(0.01));
                    return elastic(world, parts, optimizer, {.seed = 3}, {.tensors = {at::zeros({3})}});
                  }});
  list.push_back({"transport: tcp (the job: transport: auto)",
                  [=](const World& world) {
                    Parts parts(world);
                    Adam optimizer(parts.net->parameters(), AdamOptions(0.01));
                    return elastic(world, parts, optimizer);
                  },
                  "tcp"});
  list.push_back({"cannot join a job like this one: its optimizer is sharded", [=](const World& world) {
                    Parts parts(world);
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
  const auto zero = [&](const World& world) { return train(world, {.sharding = test::Sharding::zero1}); };
  record->last_step = 2;
  JoinJob job(2, zero);
  ASSERT_TRUE(reach(*record, {0, 1}, 2));
  const auto ended = job.end_of(job.add(plain));
  EXPECT_NE(ended.text.find("ranks cannot join this job: its optimizer is sharded"), std::string::npos) << ended.text;
  record->last_step = 0;
  expect_good(job, {0, 1}, *record, 1);
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

// It has been admitted, and leaves at once.
TEST(ElasticJoin, ELA06_a_newcomer_whose_loop_begins_elsewhere_is_refused) {
  constexpr int epochs = 3;
  for (const bool in_together : {false, true}) {
    SCOPED_TRACE(in_together);
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
  Parts parts(world);
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
    Parts parts(world);
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

// As a program does that loads weights at its start.
TEST(ElasticJoin, ELA06_a_newcomer_has_replaced_its_parameters_after_they_were_wrapped) {
  const test::SharedRecord record;
  const auto body = [&](const World& world) -> std::string {
    alarm(30);
    Parts parts(world);
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

// Without a sampler. The newcomer's schedule is at another place than the job's, which shows in a later step, or it asks
// for an epoch.
TEST(ElasticJoin, ELA06_a_newcomer_with_another_schedule_or_without_epochs_leaves) {
  for (const bool asks : {false, true}) {
    SCOPED_TRACE(asks);
    const test::SharedRecord record;
    const auto body = [&](const World& world) -> std::string {
      alarm(30);
      Parts parts(world);
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

enum class Fault { newcomer_is_killed, member_is_killed, newcomer_is_stopped };

// One trial: a newcomer comes, and something happens to it or a member at a random moment from its start on.
void join_with(Fault fault, int trial, std::mt19937& random) {
  constexpr int epochs = 3;
  const test::SharedRecord record;
  const auto body = [&](const World& world) {
    return test::train(world, *record, epochs, {}, {.on_change = [](const ElasticChange&) { usleep(2000); }});
  };
  record->last_step = 3;
  const int ranks = 2 + static_cast<int>(random() % 2);
  JoinJob job(ranks, body);
  std::vector<int> members(static_cast<size_t>(ranks));
  std::iota(members.begin(), members.end(), 0);
  ASSERT_TRUE(reach(*record, members, 3));
  const int newcomer = job.add(body);
  // Half of the trials begin with its knock, near the admission; the others anywhere in its start.
  const bool near = trial % 2 == 0;
  if (near) {
    ASSERT_TRUE(job.comes_to_knock(newcomer));
  }
  record->last_step = 0;
  const auto pause = static_cast<useconds_t>(random() % (near ? 15'000 : 60'000));
  usleep(pause);
  SCOPED_TRACE(fmt::format("trial {}: {} ranks, after {} us{}", trial, ranks, pause, near ? " from its knock" : ""));
  if (fault == Fault::member_is_killed) {
    const int victim = static_cast<int>(random() % static_cast<unsigned>(ranks));
    job.signal(victim, SIGKILL);
    std::erase(members, victim);
    job.end_of(victim);
  } else {
    job.signal(newcomer, fault == Fault::newcomer_is_killed ? SIGKILL : SIGSTOP);
  }
  if (fault == Fault::newcomer_is_stopped) {
    usleep(300'000);
    // The job goes on without it, or waits for it as for any member; it must end in either case.
    for (int i = 0; i < 120 && record->evaluations[members.front()] < epochs; ++i) usleep(100'000);
    job.signal(newcomer, SIGCONT);
  }
  expect_good(job, members, *record, epochs);
  const auto ended = job.end_of(newcomer);
  if (fault != Fault::newcomer_is_killed) {
    EXPECT_TRUE(WIFEXITED(ended.status)) << ended.status;
    const bool good = ended.text.empty() || ended.text.find("has ended") != std::string::npos ||
                      (fault == Fault::newcomer_is_stopped && ended.text.starts_with("error: "));
    EXPECT_TRUE(good) << ended.text;
  }
  EXPECT_EQ(test::judged(*record, epochs), "");
}

void join_often_with(Fault fault, int trials) {
  const int seed = number("SHOAL_SEED", 1);
  std::mt19937 random(static_cast<unsigned>(seed));
  for (int trial = 0; trial < trials && !testing::Test::HasFailure(); ++trial) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    join_with(fault, trial, random);
  }
}

TEST(ElasticJoin, ELA06_a_newcomer_is_killed_at_random_moments) {
  join_often_with(Fault::newcomer_is_killed, number("SHOAL_KILLS", 20));
}

TEST(ElasticJoin, ELA06_a_member_is_killed_while_a_newcomer_joins) {
  join_often_with(Fault::member_is_killed, number("SHOAL_KILLS", 20));
}

TEST(ElasticJoin, ELA06_a_newcomer_is_stopped_while_it_joins) {
  join_often_with(Fault::newcomer_is_stopped, number("SHOAL_STOPS", 2));
}

// Runs `meanwhile`, lines of a shell in which $pid is the launcher and ranks_of_it lists its ranks, beside the launcher.
test::Ended launch_program(const std::string& epochs, const std::string& metrics, const std::string& meanwhile) {
  const std::string script = std::string(SHOAL) + " launch -n 3 --elastic 1:5 --max-restarts 9 -- " + JOIN_PROGRAM +
                             " " + epochs + " " + metrics +
                             " & pid=$!; ranks_of_it() { for child in $(cat /proc/$pid/task/$pid/children); do "
                             "grep -q join_program /proc/$child/comm && echo $child; done; }; " +
                             meanwhile + " wait $pid; echo code $?";
  return test::run({"sh", "-c", script}, 120);
}

std::set<std::string> norms_in(const std::string& output) {
  std::set<std::string> norms;
  for (auto at = output.find("norm "); at != std::string::npos; at = output.find("norm ", at + 1)) {
    norms.insert(output.substr(at, output.find('\n', at) - at));
  }
  return norms;
}

// As a user does it: kill -9 and SIGUSR2 while a program trains.
TEST(ElasticJoin, ELA06_a_program_under_the_launcher_ends_with_the_parameters_of_a_run_without_changes) {
  const test::TempFolder folder;
  const auto plain = launch_program("150", folder.file("plain.jsonl"), "");
  const auto changed = launch_program("150", folder.file("changed.jsonl"),
                                      "for i in 2 1 3; do sleep 1; kill -9 $(ranks_of_it | sed -n ${i}p); sleep 0.6; "
                                      "kill -USR2 $pid; done; kill -0 $pid || echo too early;");
  for (const auto* ended : {&plain, &changed}) {
    EXPECT_NE(ended->output.find("code 0"), std::string::npos) << ended->output;
    EXPECT_EQ(norms_in(ended->output).size(), 1U) << ended->output;
  }
  EXPECT_EQ(norms_in(plain.output), norms_in(changed.output)) << "number of steps or parameters differ";
  EXPECT_NE(changed.output.find("is started to join the job (in place of rank"), std::string::npos) << changed.output;
  EXPECT_NE(changed.output.find("joined (number"), std::string::npos) << changed.output;
}

}  // namespace
}  // namespace shoal::elastic_join_test
