// DistributedDataParallel in common loops and modules: gradient penalties, forwards without backward, evaluations that
// fail, functions without a gradient, several backwards of one forward.

#include <torch/autograd.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include "shoal/ddp.h"
#include "shoal/error.h"
#include "tests/support/models.h"
#include "tests/support/refusal.h"
#include "tests/support/training.h"
#include "tests/support/world.h"

namespace shoal::test::ddp_idioms_test {
namespace {

using Options = DistributedDataParallelOptions;

// Computes the mean over ranks in one process.
template <class Loss>
void reference_backward(const Loss& loss) {
  for (int rank = 0; rank < group().size(); ++rank) (loss(rank) / group().size()).backward();
}

// Loss of a Wasserstein critic, with the norm of the gradient at its inputs.
template <class Forward>
at::Tensor penalised(const at::Tensor& x, const Forward& forward) {
  const auto input = x.detach().requires_grad_();
  const at::Tensor output = forward(input);
  const auto gradient = torch::autograd::grad({output.sum()}, {input}, {}, /*retain=*/true, /*create=*/true)[0];
  return output.mean() + (gradient.norm(2, 1) - 1).pow(2).mean();
}

TEST(DdpIdioms, DDP08_a_gradient_penalty_is_right_with_and_without_static_graph) {
  for (const bool fixed : {true, false}) {
    auto model = seeded(1);
    auto reference = seeded(1);
    DistributedDataParallel parallel(model, group(),
                                     {.static_graph = fixed, .bucket_cap_mb = 1e-4, .first_bucket_mb = 1e-4});
    torch::optim::SGD optimizer(model->parameters(), 0.1), alone(reference->parameters(), 0.1);
    for (int64_t step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      alone.zero_grad();
      // A gradient of every parameter that is only inspected.
      torch::autograd::grad({mean_loss(parallel.forward(batch(group().rank(), step)))}, model->parameters());
      penalised(batch(group().rank(), step), [&](const auto& x) { return parallel.forward(x); }).backward();
      reference_backward(
          [&](int rank) { return penalised(batch(rank, step), [&](const auto& x) { return reference->forward(x); }); });
      // The last bias is in the loss's graph, but not in the penalty's.
      ASSERT_LT(difference(gradients(*model), gradients(*reference)), 1e-12) << fixed << " step " << step;
      EXPECT_EQ(parallel.steps(), step + 1);
      optimizer.step();
      alone.step();
    }
  }
}

// Passes x on; `weight` gets no gradient, as in an unused branch, or zeros.
struct Idle : torch::autograd::Function<Idle> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            bool useful) {
    context->saved_data["useful"] = useful;
    return useful ? x + weight.sum() : x * 1;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const bool useful = context->saved_data["useful"].toBool();
    return {grads[0], useful ? grads[0].sum().expand({3}) : at::Tensor(), at::Tensor()};
  }
};

struct IdleImpl : torch::nn::Module {
  IdleImpl() {
    torch::manual_seed(3);
    inner = register_module("inner", Mlp());
    idle = register_parameter("idle", at::ones({3}, at::kDouble));
  }
  at::Tensor forward(const at::Tensor& x, bool useful) { return mean_loss(Idle::apply(inner(x), idle, useful)); }
  Mlp inner{nullptr};
  at::Tensor idle;
};

TEST(DdpIdioms, DDP06_an_undefined_gradient_is_none_and_no_fault) {
  for (const bool view : {true, false}) {
    const auto model = std::make_shared<IdleImpl>();
    const auto reference = std::make_shared<IdleImpl>();
    DistributedDataParallel<IdleImpl> parallel(model, group(), {.gradient_as_bucket_view = view});
    const auto options = torch::optim::SGDOptions(0.1).weight_decay(0.5).momentum(0.9);
    torch::optim::SGD optimizer(model->parameters(), options), alone(reference->parameters(), options);
    for (int64_t step = 0; step < 6; ++step) {
      optimizer.zero_grad();
      alone.zero_grad();
      // In some steps no rank uses it, in others only the last one.
      const auto useful = [&](int rank) { return step % 3 == 1 && rank == group().size() - 1; };
      parallel.forward(batch(group().rank(), step), useful(group().rank())).backward();
      reference_backward([&](int rank) { return reference->forward(batch(rank, step), useful(rank)); });
      EXPECT_EQ(model->idle.grad().defined(), step % 3 == 1) << "step " << step;
      optimizer.step();
      alone.step();
      ASSERT_LT(difference(model->parameters(), reference->parameters()), 1e-12) << "step " << step;
    }
  }
}

struct TwoHeadsImpl : torch::nn::Module {
  TwoHeadsImpl() {
    torch::manual_seed(3);
    left = register_module("left", torch::nn::Linear(12, 4));
    right = register_module("right", torch::nn::Linear(12, 4));
    to(at::kDouble);
  }
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x) { return {mean_loss(left(x)), mean_loss(right(x))}; }
  torch::nn::Linear left{nullptr}, right{nullptr};
};

TEST(DdpIdioms, DDP07_two_backwards_of_one_forward_work_as_the_error_says) {
  const auto expected = [](int64_t step) {
    TwoHeadsImpl reference;
    reference_backward([&](int rank) {
      const auto [left, right] = reference.forward(batch(rank, step));
      return left + right;
    });
    return gradients(reference);
  };
  {
    const auto model = std::make_shared<TwoHeadsImpl>();
    DistributedDataParallel<TwoHeadsImpl> parallel(model, group());
    const auto [left, right] = parallel.forward(batch(group().rank(), 0));
    left.backward();
    const auto text = refusal([&, last = right] { last.backward(); });
    for (const auto* part : {"right.weight", "no_sync()", "find_unused_parameters"}) {
      EXPECT_NE(text.find(part), std::string::npos) << text;
    }
  }
  for (const bool find : {true, false}) {
    const auto model = std::make_shared<TwoHeadsImpl>();
    DistributedDataParallel<TwoHeadsImpl> parallel(model, group(), {.find_unused_parameters = find});
    for (int64_t step = 0; step < 3; ++step) {
      model->zero_grad();
      const auto [left, right] = parallel.forward(batch(group().rank(), step));
      {
        const auto scope = parallel.no_sync(!find);
        left.backward();
      }
      right.backward();
      EXPECT_LT(difference(gradients(*model), expected(step)), 1e-12) << find << step;
    }
  }
}

// Recomputes tanh(layer(x)) in backward, with an inner backward.
struct Again : torch::autograd::Function<Again> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, torch::nn::Linear* layer) {
    context->save_for_backward({x});
    context->saved_data["layer"] = reinterpret_cast<int64_t>(layer);
    return torch::tanh((*layer)(x));
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const auto input = context->get_saved_variables()[0].detach().requires_grad_(true);
    auto* layer = reinterpret_cast<torch::nn::Linear*>(context->saved_data["layer"].toInt());
    const torch::AutoGradMode enabled(true);
    torch::tanh((*layer)(input)).backward(grads[0]);
    return {input.grad(), at::Tensor()};
  }
};

// Every block is recomputed, and only blocks have parameters, so that the first gradient comes from an inner backward.
struct BlocksImpl : torch::nn::Module {
  explicit BlocksImpl(bool recompute) : recompute(recompute) {
    torch::manual_seed(5);
    for (int i = 0; i < 3; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), torch::nn::Linear(12, 12)));
    }
    to(at::kDouble);
  }
  at::Tensor forward(at::Tensor x) {
    x = x.requires_grad_();
    for (auto& block : blocks) x = recompute ? Again::apply(x, &block) : torch::tanh(block(x));
    return x;
  }
  bool recompute;
  std::vector<torch::nn::Linear> blocks;
};

TEST(DdpIdioms, DDP08_blocks_that_are_recomputed_once_need_no_static_graph) {
  for (const auto& options : {Options{}, Options{.static_graph = true}, Options{.bucket_cap_mb = 1e-4}}) {
    const auto model = std::make_shared<BlocksImpl>(true);
    DistributedDataParallel<BlocksImpl> parallel(model, group(), options);
    for (int64_t step = 0; step < 3; ++step) {
      model->zero_grad();
      mean_loss(parallel.forward(batch(group().rank(), step))).backward();
      BlocksImpl reference(false);
      reference_backward([&](int rank) { return mean_loss(reference.forward(batch(rank, step))); });
      ASSERT_LT(difference(gradients(*model), gradients(reference)), 1e-12) << step;
      EXPECT_EQ(parallel.steps(), step + 1);
    }
  }
}

// No output of the wrapper's forward tells where the outer backward begins.
TEST(DdpIdioms, DDP08_a_forward_of_the_module_may_recompute_its_blocks) {
  for (const auto& options : {Options{}, Options{.static_graph = true}, Options{.find_unused_parameters = true}}) {
    const auto model = std::make_shared<BlocksImpl>(true);
    DistributedDataParallel<BlocksImpl> parallel(model, group(), options);
    for (int64_t step = 0; step < 3; ++step) {
      model->zero_grad();
      const double weight = group().rank() + 1;
      parallel.backward(mean_loss(model->forward(batch(group().rank(), step))) * weight, weight);
      BlocksImpl reference(false);
      double all = 0;
      for (int rank = 0; rank < group().size(); ++rank) all += rank + 1;
      for (int rank = 0; rank < group().size(); ++rank) {
        (mean_loss(reference.forward(batch(rank, step))) * (rank + 1) / all).backward();
      }
      ASSERT_LT(difference(gradients(*model), gradients(reference)), 1e-12) << step;
      EXPECT_EQ(parallel.steps(), step + 1);
    }
  }
}

// Each block's gradients come more than once, of inner backwards: of a loss in parts, of a layer used again.
TEST(DdpIdioms, DDP08_a_block_recomputed_several_times_works_or_is_refused_with_what_to_do) {
  const auto run = [](const Options& options, auto&& check) {
    const auto model = std::make_shared<BlocksImpl>(true);
    DistributedDataParallel<BlocksImpl> parallel(model, group(), options);
    const auto loss = [&](BlocksImpl& module, int rank, int64_t step) {
      auto x = batch(rank, step).requires_grad_();
      for (int part = 0; part < 2; ++part) {
        for (auto& block : module.blocks) x = module.recompute ? Again::apply(x, &block) : torch::tanh(block(x));
      }
      return mean_loss(x);
    };
    check([&] {
      for (int64_t step = 0; step < 3; ++step) {
        model->zero_grad();
        const double n = group().size();
        parallel.backward(loss(*model, group().rank(), step) * 4, 4);
        BlocksImpl reference(false);
        for (int rank = 0; rank < group().size(); ++rank) (loss(reference, rank, step) / n).backward();
        ASSERT_LT(difference(gradients(*model), gradients(reference)), 1e-12) << step;
      }
    });
  };
  run({.static_graph = true}, [](auto&& train) { train(); });
  run({.find_unused_parameters = true}, [](auto&& train) { train(); });
  run({}, [](auto&& train) {
    const auto text = refusal(train);
    EXPECT_NE(text.find("again after its reduction had begun"), std::string::npos) << text;
    EXPECT_NE(text.find("set static_graph and unset find_unused_parameters"), std::string::npos) << text;
  });
}

TEST(DdpIdioms, BEY10_an_evaluation_that_fails_is_no_fault_of_the_step) {
  for (const auto* strategy : {"ddp", "zero2", "fsdp"}) {
    auto training = Training<MlpImpl>::make<torch::optim::SGD>(strategy, seeded(1).ptr(), group(),
                                                               torch::optim::SGDOptions(0.1).momentum(0.9));
    auto reference = seeded(1);
    torch::optim::SGD alone(reference->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int64_t step = 0; step < 6; ++step) {
      training.zero_grad();
      alone.zero_grad();
      if (step % 2 == 1) training.forward(batch(group().rank(), step + 50));  // whose loss is not used
      // FSDP's forward is collective.
      if (group().rank() == 0 || std::string(strategy) == "fsdp") {
        const torch::NoGradGuard no_grad;
        EXPECT_ANY_THROW(training.forward(at::zeros({4, 7}, at::kDouble)));
      }
      mean_loss(training.forward(batch(group().rank(), step))).backward();
      training.step();
      reference_backward([&](int rank) { return mean_loss(reference->forward(batch(rank, step))); });
      alone.step();
    }
    training.zero_grad();
    const torch::NoGradGuard no_grad;
    EXPECT_LT(difference({training.forward(batch(0, 9))}, {reference->forward(batch(0, 9))}), 1e-11) << strategy;
    EXPECT_EQ(training.logging_data().steps, 6) << strategy;
  }
}

TEST(DdpIdioms, BEY10_a_forward_that_fails_while_all_is_frozen_is_no_fault_of_a_step) {
  for (const auto* strategy : {"ddp", "zero2"}) {
    auto training = Training<MlpImpl>::make<torch::optim::SGD>(strategy, seeded(1).ptr(), group(),
                                                               torch::optim::SGDOptions(0.1).momentum(0.9));
    const auto set_trainable = [&](bool trainable) {
      for (auto& parameter : training.model->parameters()) parameter.requires_grad_(trainable);
    };
    for (int64_t step = 0; step < 3; ++step) {
      set_trainable(false);
      const bool fails = group().rank() == 0;
      const auto x = fails ? at::zeros({4, 7}, at::kDouble) : batch(group().rank(), step + 50);
      const auto forward = [&] { training.forward(at::Tensor(x).requires_grad_()); };
      if (fails) {
        EXPECT_ANY_THROW(forward());
      } else {
        forward();
      }
      set_trainable(true);
      mean_loss(training.forward(batch(group().rank(), step))).backward();
      training.step();
      training.zero_grad();
    }
    EXPECT_EQ(training.logging_data().steps, 3) << strategy;
  }
}

struct SilentImpl : torch::nn::Module {
  SilentImpl() { inner = register_module("inner", Mlp()); }
  void forward(const at::Tensor& x) { loss = mean_loss(inner(x)); }
  Mlp inner{nullptr};
  at::Tensor loss;
};

TEST(DdpIdioms, DDP01_a_forward_may_return_nothing) {
  const auto seeded_silent = [] {
    torch::manual_seed(1);
    return std::make_shared<SilentImpl>();
  };
  auto reference = seeded(1);
  reference_backward([&](int rank) { return mean_loss(reference->forward(batch(rank, 0))); });
  auto model = seeded_silent();
  DistributedDataParallel<SilentImpl> parallel(model, group());
  parallel.forward(batch(group().rank(), 0));
  model->loss.backward();
  EXPECT_LT(difference(gradients(*model), gradients(*reference)), 1e-12);
  auto sharded = seeded_silent();
  FullyShardedDataParallel<SilentImpl> units(sharded, group());
  units.forward(batch(group().rank(), 0));
  sharded->loss.backward();
  EXPECT_EQ(units.steps(), 1);
}

struct NormImpl : torch::nn::Module {
  NormImpl() {
    torch::manual_seed(3);
    linear = register_module("linear", torch::nn::Linear(12, 6));
    norm = register_module("norm", torch::nn::BatchNorm1d(6));
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) { return norm(linear(x)); }
  torch::nn::Linear linear{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};

TEST(DdpIdioms, BEY03_join_leaves_buffers_alone_where_they_are_not_broadcast) {
  const auto model = std::make_shared<NormImpl>();
  DistributedDataParallel<NormImpl> parallel(model, group(), {.broadcast_buffers = false});
  NormImpl alone;
  Join join({parallel});
  int64_t step = 0;
  while (join.next(step < 2 + group().rank())) {
    if (join.active()) {
      parallel.forward(batch(group().rank(), step)).pow(2).sum().backward();
      alone.norm->forward(alone.linear(batch(group().rank(), step)));
    } else {
      parallel.shadow();
    }
    ++step;
  }
  EXPECT_TRUE(at::allclose(model->norm->running_mean, alone.norm->running_mean));
  EXPECT_EQ(model->norm->num_batches_tracked.item<int64_t>(), 2 + group().rank());
}

}  // namespace
}  // namespace shoal::test::ddp_idioms_test
