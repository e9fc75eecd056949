// DistributedOptimizer on pipeline stages that share a parameter: its gradients are summed over the stages, and all
// stages clip, skip and scale alike (MEG06, MEG07, MEG10).

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include <set>

#include "tests/strategy/megatron/megatron_training.h"
#include "tests/support/refusal.h"

namespace shoal::test::megatron_stages_test {
namespace {

// The world as stages x replicas: two stages if the number of ranks is even, else one stage per rank.
struct Grid {
  int stages = group().size() % 2 == 0 ? 2 : group().size();
  int replicas = group().size() / stages;
  int stage = group().rank() / replicas;
  int replica = group().rank() % replicas;

  Group data_parallel() const {
    std::vector<int> ranks;
    for (int r = 0; r < replicas; ++r) ranks.push_back(stage * replicas + r);
    return group().subgroup(ranks);
  }
  Group model_parallel() const {
    std::vector<int> ranks;
    for (int s = 0; s < stages; ++s) ranks.push_back(s * replicas + replica);
    return group().subgroup(ranks);
  }
};

struct StageImpl : torch::nn::Module {
  explicit StageImpl(int stage, at::ScalarType dtype = at::kDouble) {
    torch::manual_seed(100 + stage);
    own = register_module("own", torch::nn::Linear(12, 7));
    torch::manual_seed(5);
    shared = register_module("shared", torch::nn::Linear(12, 3));
    to(dtype);
  }
  at::Tensor forward(const at::Tensor& x, bool use_shared) {
    auto loss = mean_loss(own(x));
    return use_shared ? loss + mean_loss(shared(x)) : loss;
  }
  torch::nn::Linear own{nullptr}, shared{nullptr};
};

// In step 3 no rank uses the shared parameters; in other steps never all ranks do, if there are several.
bool uses_shared(int stage, int replica, int64_t step) {
  return step != 3 && (stage + replica + step) % 2 == 0;
}

// All stages in one process, with the shared parameters once.
struct OneProcess {
  explicit OneProcess(const Grid& grid, double clip) : grid(grid), clip(clip) {
    for (int s = 0; s < grid.stages; ++s) {
      stages.push_back(std::make_shared<StageImpl>(s));
      if (s > 0) stages.back()->shared = stages[0]->shared;
      for (const auto& parameter : stages.back()->own->parameters()) parameters.push_back(parameter);
    }
    for (const auto& parameter : stages[0]->shared->parameters()) parameters.push_back(parameter);
    optimizer = std::make_unique<torch::optim::SGD>(parameters, sgd);
  }
  void step(int64_t number, int micros) {
    optimizer->zero_grad();
    for (int s = 0; s < grid.stages; ++s) {
      for (int r = 0; r < grid.replicas; ++r) {
        for (int micro = 0; micro < micros; ++micro) {
          const auto x = batch(s * grid.replicas + r, number, micro);
          (stages[s]->forward(x, uses_shared(s, r, number + micro)) / grid.replicas).backward();
        }
      }
    }
    double square = 0;
    zeros = 0;
    for (const auto& parameter : parameters) {
      if (!parameter.grad().defined()) continue;
      square += parameter.grad().pow(2).sum().item<double>();
      zeros += parameter.numel() - parameter.grad().count_nonzero().item<int64_t>();
    }
    norm = std::sqrt(square);
    const double factor = clip / (norm + 1e-6);
    for (const auto& parameter : parameters) {
      if (clip > 0 && factor < 1 && parameter.grad().defined()) parameter.mutable_grad() *= factor;
    }
    optimizer->step();
  }
  Grid grid;
  double clip;
  std::vector<std::shared_ptr<StageImpl>> stages;
  std::vector<at::Tensor> parameters;
  std::unique_ptr<torch::optim::SGD> optimizer;
  double norm = 0;
  int64_t zeros = 0;
};

void train_stages(double clip, bool whole_world, int micros) {
  SCOPED_TRACE("clip " + std::to_string(clip) + (whole_world ? ", the world" : ", stages") + ", micro-batches " +
               std::to_string(micros));
  const Grid grid;
  auto model = std::make_shared<StageImpl>(grid.stage);
  const auto stages = grid.model_parallel();
  Sgd optimizer(model, sgd, grid.data_parallel(),
                {.overlap_grad_reduce = false,
                 .clip_grad = clip,
                 .log_num_zeros_in_grad = clip > 0,
                 .model_parallel_group = whole_world ? group() : stages});
  optimizer.all_reduce_grads(model->shared->parameters(), stages, "embedding");
  OneProcess reference(grid, clip);
  for (int64_t step = 0; step < 5; ++step) {
    for (int micro = 0; micro < micros; ++micro) {
      model->forward(batch(group().rank(), step, micro), uses_shared(grid.stage, grid.replica, step + micro))
          .backward();
    }
    const auto result = optimizer.step();
    optimizer.zero_grad();
    reference.step(step, micros);
    if (clip > 0) {
      EXPECT_NEAR(*result.grad_norm, reference.norm, 1e-12) << "step " << step;
      EXPECT_EQ(*result.num_zeros, reference.zeros) << "step " << step;
    }
    ASSERT_LT(difference(model->own->parameters(), reference.stages[grid.stage]->own->parameters()), 1e-12)
        << "step " << step;
    ASSERT_LT(difference(model->shared->parameters(), reference.stages[0]->shared->parameters()), 1e-12)
        << "step " << step;
  }
}

TEST(MegatronStages, MEG06_a_declared_gradient_is_zero_where_a_rank_did_not_use_it) {
  for (const int micros : {1, 2}) train_stages(0, false, micros);
}

TEST(MegatronStages, MEG07_the_norm_is_all_stages_and_a_shared_parameter_counts_once) {
  for (const bool whole_world : {false, true}) train_stages(0.05, whole_world, 1);
}

// Within a data-parallel group, the mean of the sum over its ranks is the sum.
TEST(MegatronStages, MEG06_a_declared_gradient_that_the_others_did_not_use_is_not_lost) {
  auto model = seeded(1);
  auto reference = seeded(1);
  Sgd optimizer(model, SGDOptions(0.1), group(), {.overlap_grad_reduce = false});
  optimizer.all_reduce_grads({model->third->bias}, group());
  torch::optim::SGD whole(reference->parameters(), SGDOptions(0.1));
  const int last = group().size() - 1;
  for (int64_t step = 0; step < 3; ++step) {
    if (group().rank() == last) backward(model, optimizer, step);
    optimizer.step();
    optimizer.zero_grad();
    whole.zero_grad();
    mean_loss(reference->forward(batch(last, step))).backward();
    for (const auto& parameter : reference->parameters()) {
      if (!parameter.is_same(reference->third->bias)) parameter.mutable_grad() /= group().size();
    }
    whole.step();
    ASSERT_LT(difference(model->parameters(), reference->parameters()), 1e-12) << "step " << step;
  }
}

TEST(MegatronStages, MEG06_summing_up_twice_changes_nothing) {
  const Grid grid;
  auto model = std::make_shared<StageImpl>(grid.stage);
  Sgd optimizer(model, sgd, grid.data_parallel(), {.overlap_grad_reduce = false});
  optimizer.all_reduce_grads(model->shared->parameters(), grid.model_parallel());
  OneProcess reference(grid, 0);
  for (int64_t step = 0; step < 2; ++step) {
    model->forward(batch(group().rank(), step), uses_shared(grid.stage, grid.replica, step)).backward();
    optimizer.reduce_model_grads();
    optimizer.reduce_model_grads();
    optimizer.step();
    optimizer.zero_grad();
    reference.step(step, 1);
    ASSERT_LT(difference(model->shared->parameters(), reference.stages[0]->shared->parameters()), 1e-12);
  }
}

TEST(MegatronStages, MEG10_inf_on_one_stage_makes_all_stages_skip_and_back_off) {
  const Grid grid;
  auto model = std::make_shared<StageImpl>(grid.stage, at::kHalf);
  Sgd optimizer(model, SGDOptions(0.1), grid.data_parallel(),
                {.overlap_grad_reduce = false,
                 .scaler = GradScalerOptions{.initial_scale = 1024, .hysteresis = 1},
                 .model_parallel_group = grid.model_parallel()});
  optimizer.all_reduce_grads(model->shared->parameters(), grid.model_parallel());
  const auto before = model->own->weight.detach().clone();
  const auto x = batch(group().rank(), 0).to(at::kHalf);
  const bool here = group().rank() == group().size() - 1;
  optimizer.scale_loss(model->forward(x, false) * (here ? INFINITY : 1)).backward();
  EXPECT_FALSE(optimizer.step().updated);
  optimizer.zero_grad();
  EXPECT_EQ(optimizer.scaler()->value(), 512);
  EXPECT_TRUE(at::equal(model->own->weight, before));
  optimizer.scale_loss(model->forward(x, true)).backward();
  EXPECT_TRUE(optimizer.step().updated);
}

TEST(MegatronStages, MEG06_stages_whose_scalars_would_differ_are_refused) {
  const Grid grid;
  auto model = std::make_shared<StageImpl>(grid.stage);
  const auto stages = grid.model_parallel();
  Sgd clipping(model, sgd, grid.data_parallel(), {.overlap_grad_reduce = false, .clip_grad = 1});
  if (grid.stages > 1) {
    EXPECT_NE(refusal([&] {
                clipping.all_reduce_grads(model->shared->parameters(), stages);
              }).find("set model_parallel_group"),
              std::string::npos);
    EXPECT_NE(refusal([&] { clipping.count_once(model->shared->parameters(), stages); }).find("model_parallel_group"),
              std::string::npos);
  }
  if (group().size() == 4) {
    const auto text = refusal(
        [&] { Sgd(std::make_shared<StageImpl>(0), sgd, group(), {.model_parallel_group = grid.data_parallel()}); });
    EXPECT_NE(text.find("2 of the 4 data-parallel ranks"), std::string::npos) << text;
  }
  auto other = std::make_shared<StageImpl>(grid.stage);
  Sgd optimizer(other, sgd, grid.data_parallel(), {.overlap_grad_reduce = false});
  optimizer.all_reduce_grads(other->shared->parameters(), stages);
  EXPECT_NE(refusal([&] {
              optimizer.all_reduce_grads({other->shared->bias}, stages);
            }).find("the gradient of shared.bias is declared twice"),
            std::string::npos);
  EXPECT_NE(refusal([&] { optimizer.all_reduce_grads({at::ones({2})}, stages); }).find("not one of its trainable"),
            std::string::npos);
}

// Ranks that compute the same gradients, as tensor-parallel ones do for layer norms.
TEST(MegatronStages, MEG07_duplicates_count_once) {
  std::vector<int> alone{group().rank()};
  for (const bool once : {true, false}) {
    auto model = seeded(1);
    Sgd optimizer(model, sgd, group().subgroup(alone), {.clip_grad = 1e9, .model_parallel_group = group()});
    if (once) optimizer.count_once(model->parameters(), group());
    mean_loss(model->forward(batch(0, 0))).backward();
    auto reference = seeded(1);
    mean_loss(reference->forward(batch(0, 0))).backward();
    double square = 0;
    for (const auto& parameter : reference->parameters()) square += parameter.grad().pow(2).sum().item<double>();
    EXPECT_NEAR(*optimizer.step().grad_norm, std::sqrt(square * (once ? 1 : group().size())), 1e-12);
  }
}

// If a stage fails, so do the stages that wait for its part of a shared gradient.
TEST(MegatronStages, BEY10_a_stage_that_gives_up_ends_the_step_on_all_that_share_with_it) {
  const Grid grid;
  auto model = std::make_shared<StageImpl>(grid.stage);
  Sgd optimizer(model, sgd, grid.data_parallel(), {.overlap_grad_reduce = false});
  optimizer.all_reduce_grads(model->shared->parameters(), grid.model_parallel());
  OneProcess reference(grid, 0);
  const auto backward = [&](int64_t step) {
    model->forward(batch(group().rank(), step), uses_shared(grid.stage, grid.replica, step)).backward();
  };
  for (int64_t step = 0; step < 3; ++step) {
    if (step == 1) {
      backward(7);
      if (group().rank() == 0) {
        optimizer.abandon_step();
      } else {
        EXPECT_THROW(optimizer.step(), StepAbandoned);
      }
      optimizer.zero_grad();
    }
    backward(step);
    optimizer.step();
    optimizer.zero_grad();
    reference.step(step, 1);
    ASSERT_LT(difference(model->parameters(),
                         [&] {
                           auto list = reference.stages[grid.stage]->own->parameters();
                           for (const auto& parameter : reference.stages[0]->shared->parameters())
                             list.push_back(parameter);
                           return list;
                         }()),
              1e-12)
        << "step " << step;
  }
}

}  // namespace
}  // namespace shoal::test::megatron_stages_test
