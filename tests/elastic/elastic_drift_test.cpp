// Processes that have come to an elastic job, and part from its ways after their first complete step: the job goes on
// without them.

#include <gtest/gtest.h>

#include <map>
#include <utility>
#include <vector>

#include "tests/elastic/elastic_join.h"

namespace shoal::elastic_drift_test {
namespace {

using test::JoinJob;
using test::JoinParts;

// A newcomer's weight decay by its own count, the scale of a loss scaler that is not given to it, and an evaluation by
// its own count.
enum class Drift { weight_decay, scale, evaluation };

std::string train(const World& world, test::Record& record, Drift drift) {
  alarm(30);
  JoinParts parts(world);
  torch::optim::SGD optimizer(parts.net->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
  GradScaler scaler({.initial_scale = world.joining() && drift == Drift::scale ? 8.0 : 4.0});
  const auto quiet = [](const ElasticChange&) {};
  Elastic elastic(world, parts.parallel, optimizer, {.on_change = quiet});
  const auto x = test::inputs_of({1, 2});
  const auto begin = elastic.steps();
  int own = 0;
  try {
    while (elastic.steps() < 20) {
      while (record.last_step != 0 && elastic.steps() >= record.last_step) usleep(200);
      const auto compute = [&] { scaler.scale(test::loss_of(parts.parallel.forward(x), x)).backward(); };
      const auto update = [&] {
        std::vector<at::Tensor> gradients;
        for (const auto& parameter : parts.net->parameters()) gradients.push_back(parameter.grad());
        scaler.unscale(gradients);
        optimizer.step();
      };
      const bool complete = elastic.step(2, compute, update);
      optimizer.zero_grad();
      if (!complete) continue;
      record.evaluations[test::member_number(world)] = static_cast<int>(elastic.steps());
      ++own;
      if (drift == Drift::weight_decay && own == 8) {
        static_cast<torch::optim::SGDOptions&>(optimizer.param_groups()[0].options()).weight_decay(0.1);
      }
      if (drift == Drift::evaluation && own % 8 == 0) elastic.together([&] { return world.all_reduce(1.0); });
    }
  } catch (const UsageError& error) {
    return fmt::format("after {} steps: {}", elastic.steps() - begin, error.what());
  }
  return fmt::format("{} on {}", test::hash_of(optimizer, *parts.net), world.size());
}

TEST(ElasticJoin, ELA06_a_newcomer_that_parts_from_the_job_after_its_first_step_leaves) {
  const std::map<Drift, std::pair<std::string, std::string>> expected{
      {Drift::weight_decay,
       {"after 2 steps: ", "Elastic: ranks have different options in param group 0, and this one"}},
      {Drift::scale, {"after 1 steps: ", " as the magnitude of an element of parameter "}},
      // Found by this rank itself, or said by another one that has found it first.
      {Drift::evaluation, {"after 2 steps: ", "ranks called different operations"}}};
  for (const auto& [drift, text] : expected) {
    SCOPED_TRACE(text.second);
    const test::SharedRecord record;
    const auto body = [&, drift = drift](const World& world) { return train(world, *record, drift); };
    record->last_step = 5;
    JoinJob job(2, body);
    ASSERT_TRUE(JoinJob::comes_true([&] { return record->evaluations[0] == 5 && record->evaluations[1] == 5; }));
    const int newcomer = job.add(body);
    ASSERT_TRUE(job.comes_to_knock(newcomer));
    record->last_step = 0;
    const auto first = job.end_of(0);
    EXPECT_NE(first.text.find(" on 2"), std::string::npos) << first.text;
    EXPECT_EQ(job.end_of(1).text, first.text);
    const auto ended = job.end_of(newcomer);
    EXPECT_EQ(ended.text.find(text.first), 0U) << ended.text;
    EXPECT_NE(ended.text.find(text.second), std::string::npos) << ended.text;
  }
}

// Their values are compared in each step, as they were when it began: as in SAM, each rank has weights of its own until
// the update.
TEST(ElasticJoin, ELA06_ranks_that_have_come_and_do_as_the_job_does_stay) {
  const test::SharedRecord record;
  const auto body = [&](const World& world) -> std::string {
    alarm(30);
    JoinParts parts(world);
    torch::optim::Adam optimizer(parts.net->parameters(), torch::optim::AdamOptions(0.01));
    const auto quiet = [](const ElasticChange&) {};
    Elastic elastic(world, parts.parallel, optimizer, {.on_change = quiet});
    const auto x = test::inputs_of({1, 2});
    while (elastic.steps() < 200) {
      while (record->last_step != 0 && elastic.steps() >= record->last_step) usleep(200);
      std::vector<at::Tensor> before;
      const auto compute = [&] {
        test::loss_of(parts.parallel.forward(x), x).backward();
        before.clear();
        for (auto& parameter : parts.net->parameters()) {
          before.push_back(parameter.detach().clone());
          parameter.detach().add_(0.1 * world.rank());
        }
      };
      const bool complete = elastic.step(2, compute, [&] {
        const auto parameters = parts.net->parameters();
        for (size_t i = 0; i < parameters.size(); ++i) parameters[i].detach().copy_(before[i]);
        optimizer.step();
      });
      optimizer.zero_grad();
      if (complete) record->evaluations[test::member_number(world)] = static_cast<int>(elastic.steps());
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
}  // namespace shoal::elastic_drift_test
