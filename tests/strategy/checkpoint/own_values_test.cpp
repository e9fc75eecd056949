// Checkpoints of values that differ between ranks: ignored and frozen parameters, and those of post-local SGD.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include "shoal/checkpoint.h"
#include "shoal/ddp.h"
#include "shoal/fsdp.h"
#include "shoal/hooks.h"
#include "shoal/optim.h"
#include "shoal/shard_gossip.h"
#include "shoal/training.h"
#include "shoal/zero.h"
#include "tests/support/models.h"
#include "tests/support/refusal.h"
#include "tests/support/shared_folder.h"
#include "tests/support/variants.h"
#include "tests/support/world.h"

namespace shoal::test::own_values_test {
namespace {

using testing::Contains;
using testing::HasSubstr;
using testing::IsEmpty;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

// An expert of each rank's own, and a teacher, frozen, that follows the body.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(int rank) {
    torch::manual_seed(0);
    body = register_module("body", torch::nn::Linear(12, 6));
    teacher = register_parameter("teacher", body->weight.detach().clone(), false);
    torch::manual_seed(10 + rank);
    expert = register_module("expert", torch::nn::Linear(6, 2));
    frozen = register_parameter("frozen", at::full({2}, double(rank)), false);
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) {
    return expert(torch::tanh(body(x))) + frozen - 0.1 * x.mm(teacher.t()).narrow(1, 0, 2);
  }
  void follow() {
    const torch::NoGradGuard no_grad;
    teacher.lerp_(body->weight.detach(), 0.3);
  }
  torch::nn::Linear body{nullptr}, expert{nullptr};
  at::Tensor teacher, frozen;
};

const std::vector<std::string> ignored{"expert.weight", "expert.bias", "frozen"};

std::vector<at::Tensor> trainable(const torch::nn::Module& module) {
  auto list = module.parameters();
  std::erase_if(list, [](const at::Tensor& parameter) { return !parameter.requires_grad(); });
  return list;
}

// DistributedDataParallel that ignores the expert, which the same optimizer trains.
struct WithExpert {
  explicit WithExpert(const Group& ranks, std::vector<std::string> without = ignored)
      : model(std::make_shared<NetImpl>(ranks.rank())),
        parallel(model, ranks, {.ignored = std::move(without)}),
        optimizer(trainable(*model), AdamWOptions(1e-2)),
        state(parallel, optimizer) {}
  void train(int64_t from, int64_t to) {
    for (int64_t step = from; step < to; ++step) {
      mean_loss(parallel.forward(batch(group().rank(), step))).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
  }

  std::shared_ptr<NetImpl> model;
  DistributedDataParallel<NetImpl> parallel;
  AdamW optimizer;
  TrainingState state;
};

TEST(OwnValues, BEY05_ignored_parameters_come_back_with_each_ranks_values_and_moments) {
  const SharedFolder folder;
  WithExpert saved(group());
  saved.train(0, 5);
  save(folder / "run", saved.state, {.step = 5});
  const auto at_save = copies(*saved.model);
  WithExpert resumed(group());
  const auto loaded = load(folder / "run", resumed.state);
  EXPECT_TRUE(loaded.exact);
  EXPECT_THAT(loaded.differences, IsEmpty());
  EXPECT_EQ(difference(copies(*resumed.model), at_save), 0);
  saved.train(5, 8);
  resumed.train(5, 8);
  EXPECT_EQ(difference(copies(*resumed.model), copies(*saved.model)), 0) << "the expert's moments";

  WithExpert alone(group());
  load(folder / "run", alone.state, {.model_only = true});
  EXPECT_EQ(difference(copies(*alone.model), at_save), 0);
}

TEST(OwnValues, BEY05_a_training_that_ignores_nothing_gets_one_value_for_all_and_is_told) {
  const SharedFolder folder;
  WithExpert saved(group());
  saved.train(0, 3);
  save(folder / "run", saved.state, {.step = 3});
  auto first = saved.model->expert->weight.detach().clone();
  group().broadcast(first, 0).wait();
  WithExpert resumed(group(), {});
  const auto loaded = load(folder / "run", resumed.state);
  EXPECT_TRUE(at::equal(resumed.model->expert->weight.detach(), first));
  EXPECT_FALSE(loaded.exact);
  EXPECT_THAT(loaded.differences, Contains(AllOf(HasSubstr("values of its own"), HasSubstr("expert.weight"))));
}

TEST(OwnValues, BEY05_what_a_training_ignores_comes_back_on_each_rank_under_every_strategy) {
  const SharedFolder folder;
  TrainingOptions options;
  options.ignored = ignored;
  const auto with = [&](const std::string& strategy, int rank, const auto& use) {
    const auto model = std::make_shared<NetImpl>(rank);
    auto training = make_training(strategy, model, optimizer_recipe<AdamW>(AdamWOptions(1e-2)), group(), options);
    auto state = training->state().value();
    use(*model, state);
  };
  std::vector<std::string> strategies{"ddp", "zero1", "zero2", "megatron", "fsdp", "local_sgd"};
  for (const auto& strategy : strategies) {
    SCOPED_TRACE(strategy);
    std::vector<at::Tensor> saved;
    with(strategy, group().rank(), [&](NetImpl& model, TrainingState& state) {
      save(folder / strategy, state, {.step = 1});
      saved = {model.expert->weight.detach().clone(), model.frozen.detach().clone()};
    });
    with(strategy, 100, [&](NetImpl& model, TrainingState& state) {
      EXPECT_TRUE(load(folder / strategy, state).exact);
      EXPECT_EQ(difference({model.expert->weight, model.frozen}, saved), 0);
    });
    with("zero2", 100, [&](NetImpl& model, TrainingState& state) {
      load(folder / strategy, state);
      EXPECT_EQ(difference({model.expert->weight, model.frozen}, saved), 0) << "into another strategy";
    });
  }
}

// Ranks that ignore tensors of other names or kinds save one set of them, as before.
TEST(OwnValues, BEY05_what_ranks_ignore_need_not_be_alike) {
  const SharedFolder folder;
  const auto with = [](int rank, const auto& use) {
    auto model = std::make_shared<NetImpl>(rank);
    if (rank == 0) model->expert->weight.set_requires_grad(false);
    if (rank > 0) model->register_parameter(fmt::format("extra_{}", rank), at::full({2}, double(rank), at::kDouble));
    auto names = ignored;
    if (rank > 0) names.push_back(fmt::format("extra_{}", rank));
    DistributedDataParallel parallel(model, group(), {.ignored = names});
    AdamW optimizer(trainable(*model), AdamWOptions(1e-2));
    TrainingState state(parallel, optimizer);
    use(*model, state);
  };
  at::Tensor saved;
  with(group().rank(), [&](NetImpl& model, TrainingState& state) {
    save(folder / "run", state, {.step = 1});
    saved = model.body->weight.detach().clone();
  });
  with(group().rank(), [&](NetImpl& model, TrainingState& state) {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : model.parameters()) parameter.add_(1);
    load(folder / "run", state, {.partial = true});
    if (group().rank() > 0)
      EXPECT_EQ(model.named_parameters()[fmt::format("extra_{}", group().rank())][0].item<double>(), group().rank());
    EXPECT_EQ(difference({model.body->weight}, {saved}), 0);
  });
}

// Where ranks train parameters of their own, a teacher that follows them differs, too.
TEST(OwnValues, BEY05_frozen_parameters_that_differ_between_ranks_come_back_on_each) {
  for (const std::string strategy : {"local_sgd", "diloco", "decentralized", "ddp", "zero2", "fsdp"}) {
    SCOPED_TRACE(strategy);
    if (strategy == "decentralized" && group().size() == 1) continue;
    const SharedFolder folder;
    TrainingOptions options;
    if (strategy == "local_sgd" || strategy == "diloco") options.options = {{"sync_every", "4"}};
    if (strategy == "decentralized") options.options = {{"topology", "ring"}};
    const auto make = [&](const std::shared_ptr<NetImpl>& model) {
      return make_training(strategy, model, optimizer_recipe<AdamW>(AdamWOptions(1e-2)), group(), options);
    };
    const auto train = [&](auto& training, NetImpl& model, int64_t from, int64_t to) {
      for (int64_t step = from; step < to; ++step) {
        training->backward(mean_loss(training.forward(batch(group().rank(), step))));
        training->step();
        training->zero_grad();
        if (strategy != "fsdp") model.follow();
      }
    };
    const auto values = [](auto& training, NetImpl& model) {
      const auto whole = training->full_parameters();
      return copies(model);
    };
    const auto model = std::make_shared<NetImpl>(0);
    auto training = make(model);
    train(training, *model, 0, 5);
    auto state = training->state().value();
    save(folder / "run", state, {.step = 5});
    const auto at_save = values(training, *model);
    const auto again = std::make_shared<NetImpl>(0);
    auto resumed = make(again);
    auto resuming = resumed->state().value();
    EXPECT_TRUE(load(folder / "run", resuming).exact);
    EXPECT_EQ(difference(values(resumed, *again), at_save), 0);
    train(training, *model, 5, 8);
    train(resumed, *again, 5, 8);
    EXPECT_EQ(difference(values(resumed, *again), values(training, *model)), 0);
  }
}

TEST(OwnValues, BEY05_frozen_parameters_that_no_rank_has_sent_come_back_on_each) {
  const SharedFolder folder;
  const auto with = [&](const auto& use) {
    const auto model = std::make_shared<NetImpl>(group().rank());
    OSS<AdamW> optimizer(trainable(*model), AdamWOptions(1e-2), group());
    ShardedDataParallel<NetImpl> parallel(model, optimizer, group(),
                                          {.sync_models_at_startup = false, .log_sizes = false});
    TrainingState state(parallel, optimizer);
    use(*model, state);
  };
  with([&](NetImpl&, TrainingState& state) { save(folder / "run", state, {.step = 1}); });
  with([&](NetImpl& model, TrainingState& state) {
    const torch::NoGradGuard no_grad;
    model.frozen.zero_();
    EXPECT_TRUE(load(folder / "run", state).exact);
    EXPECT_EQ(model.frozen[0].item<double>(), group().rank());
  });
}

// DDP whose gradients are averaged within groups of one rank from step 2 on, and its parameters every 4 steps.
struct PostLocal {
  explicit PostLocal(int64_t before_first_average = 2, bool local = true)
      : model(seeded(1)),
        parallel(
            model, group(),
            {.communication_hook =
                 local ? std::shared_ptr<CommunicationHook>(std::make_shared<PostLocalSgdHook>(alone(), 2)) : nullptr}),
        optimizer(model->parameters(), AdamWOptions(1e-2)),
        averager(group(), 4, before_first_average),
        state(parallel, optimizer) {}
  static Group alone() { return group().subgroup({group().rank()}); }
  void train(int64_t from, int64_t to) {
    for (int64_t step = from; step < to; ++step) {
      mean_loss(parallel.forward(batch(group().rank(), step))).backward();
      optimizer.step();
      optimizer.zero_grad();
      averager.average(model->parameters());
    }
  }

  Mlp model;
  DistributedDataParallel<MlpImpl> parallel;
  AdamW optimizer;
  PeriodicModelAverager averager;
  TrainingState state;
};

TEST(OwnValues, BEY05_post_local_sgd_goes_on_with_each_ranks_parameters_and_moments) {
  const SharedFolder folder;
  PostLocal saved;
  saved.train(0, 5);
  save(folder / "run", saved.state, {.step = 5});
  const auto at_save = copies(*saved.model);
  // The averager has made 5 steps; the next average is after step 6, as without a stop.
  PostLocal resumed(1);
  const auto loaded = load(folder / "run", resumed.state);
  EXPECT_TRUE(loaded.exact);
  EXPECT_EQ(difference(copies(*resumed.model), at_save), 0);
  saved.train(5, 13);
  resumed.train(5, 13);
  EXPECT_EQ(difference(copies(*resumed.model), copies(*saved.model)), 0);

  PostLocal plain(2, /*local=*/false);
  const auto common = load(folder / "run", plain.state);
  EXPECT_FALSE(common.exact);
  EXPECT_THAT(common.differences, Contains(HasSubstr("values of its own")));
  auto mean = at_save;
  for (auto& tensor : mean) {
    group().all_reduce(tensor).wait();
    tensor /= group().size();
  }
  EXPECT_LT(difference(copies(*plain.model), mean), 1e-14);
  auto first = copies(*plain.model);
  for (auto& tensor : first) group().broadcast(tensor, 0).wait();
  EXPECT_EQ(difference(copies(*plain.model), first), 0) << "equal on all ranks";
}

TEST(OwnValues, BEY05_post_local_sgd_begins_with_the_checkpoint_of_a_training_with_equal_ranks) {
  const SharedFolder folder;
  PostLocal saved(2, /*local=*/false);
  for (int64_t step = 0; step < 3; ++step) {
    mean_loss(saved.parallel.forward(batch(group().rank(), step))).backward();
    saved.optimizer.step();
    saved.optimizer.zero_grad();
  }
  save(folder / "run", saved.state, {.step = 3});
  PostLocal resumed;
  load(folder / "run", resumed.state);
  EXPECT_EQ(difference(copies(*resumed.model), copies(*saved.model)), 0);
  const auto before = optimizer_state(saved.optimizer, *saved.model);
  const auto after = optimizer_state(resumed.optimizer, *resumed.model);
  for (const auto& [name, entry] : before) {
    EXPECT_EQ(after.at(name).numbers, entry.numbers) << name;
    EXPECT_TRUE(at::equal(after.at(name).tensors.at("exp_avg"), entry.tensors.at("exp_avg"))) << name;
  }
}

// Hosts of two ranks (of one, where their number is odd), each of which shards frozen values of its own.
TEST(OwnValues, BEY05_frozen_parameters_that_differ_between_hosts_come_back_on_each) {
  const SharedFolder folder;
  const int ranks = ranks_per_model(group());
  const auto hosts = host_groups(group(), ranks);
  const auto with = [&](double value, const auto& use) {
    const auto model = std::make_shared<NetImpl>(0);
    FullyShardedDataParallel<NetImpl> parallel(model, hosts.inside);
    ShardGossipOptimizer<FusedAdamW> optimizer(parallel, AdamWOptions(1e-2), hosts.across);
    TrainingState state(parallel, optimizer, group());
    {
      const auto whole = parallel.summon_full_params();
      const torch::NoGradGuard no_grad;
      model->teacher.fill_(value);
    }
    use(parallel, state);
  };
  const auto own = 1.0 + group().rank() / ranks;
  with(own, [&](auto&, TrainingState& state) { save(folder / "run", state, {.step = 1}); });
  with(0, [&](auto& parallel, TrainingState& state) {
    EXPECT_TRUE(load(folder / "run", state).exact);
    const auto teacher = parallel.full_state_dict().at("teacher");
    EXPECT_TRUE(at::equal(teacher, at::full_like(teacher, own))) << teacher;
  });
}

TEST(OwnValues, BEY05_a_parameter_of_OSS_that_the_module_lacks_is_refused) {
  const SharedFolder folder;
  const auto model = seeded(1);
  DistributedDataParallel<MlpImpl> parallel(model, group());
  auto parameters = model->parameters();
  parameters.push_back(at::full({1}, 3.0, at::kDouble).requires_grad_());
  OSS<AdamW> optimizer(parameters, AdamWOptions(1e-2), group());
  TrainingState state(parallel, optimizer);
  EXPECT_THAT(refusal([&] { save(folder / "run", state, {.step = 1}); }),
              AllOf(HasSubstr("[1]"), HasSubstr("not one of the module's")));
}

}  // namespace
}  // namespace shoal::test::own_values_test
