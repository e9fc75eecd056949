// Evaluations and saves around the step in which a process comes to an elastic job.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/nn/modules/batchnorm.h>

#include "shoal/checkpoint.h"
#include "tests/elastic/elastic_join.h"
#include "tests/support/temp_folder.h"

namespace shoal::elastic_join_evaluation_test {
namespace {

using test::JoinJob;

// Its statistics differ between ranks in each step.
struct Normed : torch::nn::Module {
  Normed() {
    torch::manual_seed(7);
    first = register_module("first", torch::nn::Linear(4, 16));
    norm = register_module("norm", torch::nn::BatchNorm1d(16));
    second = register_module("second", torch::nn::Linear(16, 1));
  }
  at::Tensor forward(const at::Tensor& x) { return second(at::tanh(norm(first(x)))); }
  torch::nn::Linear first{nullptr}, second{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};

struct Job {
  bool zero2 = false;
  bool first_dies = false;  // in the first evaluation of three ranks, in which the others wait for its buffers
  std::filesystem::path folder{};
};

std::string train(const World& world, const Job& job, test::Record& record) {
  alarm(30);
  const auto net = std::make_shared<Normed>();
  std::optional<OSS<torch::optim::SGD>> oss;
  if (job.zero2) oss.emplace(net->parameters(), torch::optim::SGDOptions(0.1), world.group());
  torch::optim::SGD sgd(net->parameters(), 0.1);
  std::unique_ptr<DataParallelCore> parallel;
  std::function<at::Tensor(const at::Tensor&)> forward;
  const auto wrap = [&](auto wrapped) {
    forward = [raw = wrapped.get()](const at::Tensor& x) { return raw->forward(x); };
    parallel = std::move(wrapped);
  };
  job.zero2 ? wrap(std::make_unique<ShardedDataParallel<Normed>>(net, *oss, world.group()))
            : wrap(std::make_unique<DistributedDataParallel<Normed>>(net, world.group()));
  auto& optimizer = job.zero2 ? static_cast<torch::optim::Optimizer&>(*oss) : sgd;
  auto training = job.zero2 ? TrainingState(*parallel, *oss)
                            : TrainingState(dynamic_cast<DistributedDataParallelCore&>(*parallel), sgd);
  Elastic elastic(world, *parallel, optimizer, {.on_change = [](const ElasticChange&) {}});
  const auto evaluates_one_model = [&] {
    if (job.first_dies && world.size() == 3 && world.rank() == 0) std::raise(SIGKILL);
    const torch::NoGradGuard no_grad;
    net->eval();
    const auto y = forward(test::inputs_of({1, 2, 3})).sum().item<double>();
    net->train();
    const auto ends = world.all_reduce(std::vector<double>{y, -y}, ReduceOp::max);
    return ends[0] == -ends[1];
  };
  elastic.begin_loop();
  while (elastic.steps() < 8) {
    while (record.last_step != 0 && elastic.steps() >= record.last_step) usleep(200);
    if (!elastic.together(evaluates_one_model)) return "ranks evaluate different models";
    const auto step = static_cast<size_t>(elastic.steps());
    const auto x = test::inputs_of({step, 10 + step * static_cast<size_t>(world.rank()), 20});
    const auto compute = [&] { test::loss_of(forward(x), x).backward(); };
    const bool complete = elastic.step(3, compute, [&] { optimizer.step(); });
    optimizer.zero_grad();
    if (!complete) continue;
    if (elastic.steps() % 3 == 0) elastic.together([&] { save(job.folder, training, {.step = elastic.steps()}); });
    record.evaluations[world.rank()] = static_cast<int>(elastic.steps());
  }
  return fmt::format("on {}", world.size());
}

void expect_to_go_on(const Job& job) {
  SCOPED_TRACE(fmt::format("zero2 {}, first dies {}", job.zero2, job.first_dies));
  const test::TempFolder folder;
  const test::SharedRecord record;
  auto in_folder = job;
  in_folder.folder = folder.path();
  const auto body = [&](const World& world) { return train(world, in_folder, *record); };
  record->last_step = 4;
  JoinJob members(2, body);
  ASSERT_TRUE(JoinJob::comes_true([&] { return record->evaluations[0] == 4 && record->evaluations[1] == 4; }));
  const int newcomer = members.add(body);
  ASSERT_TRUE(members.comes_to_knock(newcomer));
  record->last_step = 0;
  const auto first = members.end_of(0);
  EXPECT_EQ(WIFSIGNALED(first.status), job.first_dies);
  const auto expected = job.first_dies ? "on 2" : "on 3";
  if (!job.first_dies) EXPECT_EQ(first.text, expected);
  EXPECT_EQ(members.end_of(1).text, expected);
  EXPECT_EQ(members.end_of(newcomer).text, expected);
  for (const auto* name : {"step-3", "step-6"}) EXPECT_TRUE(std::filesystem::exists(folder.path() / name)) << name;
}

TEST(ElasticJoin, ELA06_an_evaluation_before_each_step_is_of_one_model_and_saves_go_on_when_a_rank_comes) {
  for (const bool zero2 : {false, true}) expect_to_go_on({.zero2 = zero2});
}

TEST(ElasticJoin, ELA06_the_first_rank_ends_in_the_first_evaluation_after_a_rank_has_come) {
  for (const bool zero2 : {false, true}) expect_to_go_on({.zero2 = zero2, .first_dies = true});
}

}  // namespace
}  // namespace shoal::elastic_join_evaluation_test
