// Processes that come to an elastic job and go wrong before their first step: the job goes on without them.

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <filesystem>
#include <map>

#include "comm/rendezvous/rendezvous.h"
#include "shoal/checkpoint.h"
#include "tests/elastic/elastic_join.h"
#include "tests/support/temp_folder.h"

namespace shoal::elastic_misstep_test {
namespace {

using test::expect_good;
using test::JoinJob;
using test::JoinParts;
using test::reach;

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
}  // namespace shoal::elastic_misstep_test
