// MEG08: parameters in a buffer of their own, and parameters that are gathered into their gradients' memory. What both
// have in common is in megatron_buffers_test.cpp.

#include <fmt/format.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "shoal/error.h"
#include "shoal/megatron.h"
#include "shoal/optim.h"
#include "tests/support/models.h"
#include "tests/support/refusal.h"
#include "tests/support/world.h"

namespace shoal::megatron_gather_test {
namespace {

using test::batch;
using test::group;
using test::mean_loss;
using test::seeded;
using torch::optim::AdamWOptions;

using Optimizer = DistributedOptimizer<FusedAdamW>;

// Parameters of every layout, one of another dtype, and a layer that forward may skip.
struct MixedImpl : torch::nn::Module {
  explicit MixedImpl(at::ScalarType dtype) {
    torch::manual_seed(5);
    first = register_module("first", torch::nn::Linear(12, 12));
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 5, 2)));
    maybe = register_module("maybe", torch::nn::Linear(5, 5));
    empty = register_parameter("empty", at::empty({0, 3}));
    const auto wide = at::randn({5, 8});
    to(dtype);
    gaps =
        register_parameter("gaps", wide.to(dtype).slice(1, 0, 8, 2).variable_data());  // neither contiguous nor dense
    norm = register_parameter("norm", at::ones({5}));                                  // float32 beside 16 bits
    scalar = register_parameter("scalar", at::full({}, 0.7));
    conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
  }

  at::Tensor forward(at::Tensor x, bool use_maybe) {
    x = torch::tanh(first(x));
    x = conv(x.view({-1, 3, 2, 2})).flatten(1);
    if (use_maybe) x = torch::tanh(maybe(x));
    x = (x * norm * scalar).to(x.scalar_type());
    return x.matmul(gaps).to(at::kFloat).pow(2).mean() + empty.sum();
  }

  torch::nn::Linear first{nullptr}, maybe{nullptr};
  torch::nn::Conv2d conv{nullptr};
  at::Tensor gaps, norm, empty, scalar;
};

struct Case {
  at::ScalarType dtype = at::kFloat;
  bool fp32_gradients = true;
  bool overlap_grad_reduce = true;
  bool overlap_param_gather = false;
};

DistributedOptimizerOptions options_of(const Case& it, bool reuse) {
  return {.overlap_grad_reduce = it.overlap_grad_reduce,
          .overlap_param_gather = it.overlap_param_gather,
          .reuse_grad_buf_for_param_gather = reuse,
          .grad_reduce_in_fp32 = it.fp32_gradients,
          .clip_grad = 0.1,
          .bucket_size = 30};
}

struct Trained {
  explicit Trained(const Case& it, bool reuse)
      : model(std::make_shared<MixedImpl>(it.dtype)),
        dtype(it.dtype),
        optimizer(model, AdamWOptions(1e-2), group(), options_of(it, reuse)) {}

  // Ranks use different layers; in some steps no rank uses the middle one.
  void step(int64_t number) {
    for (const int micro : {0, 1}) {
      const auto local = optimizer.no_sync(micro == 0);
      const bool use = (group().rank() + number) % 3 == 0 && number != 2;
      model->forward(batch(group().rank(), number, micro).to(dtype), use).backward();
    }
    optimizer.step();
    optimizer.zero_grad();
  }

  std::shared_ptr<MixedImpl> model;
  at::ScalarType dtype;
  Optimizer optimizer;
};

TEST(MegatronGather, MEG08_bits_are_those_of_parameters_in_a_buffer) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const bool fp32_gradients : {true, false}) {
      if (dtype == at::kFloat && !fp32_gradients) continue;  // they are
      for (const bool reduce : {true, false}) {
        for (const bool gather : {true, false}) {
          SCOPED_TRACE(fmt::format("{}, float32 gradients {}, overlap {} {}", c10::toString(dtype), fp32_gradients,
                                   reduce, gather));
          const Case it{dtype, fp32_gradients, reduce, gather};
          Trained here(it, true);
          Trained reference(it, false);
          for (int64_t step = 0; step < 4; ++step) {
            here.step(step);
            reference.step(step);
            // Reading parameters gathers all of them; those that a forward skips must be gathered without that.
            if (gather && step < 3) continue;
            for (const auto& named : reference.model->named_parameters()) {
              ASSERT_TRUE(at::equal(here.model->named_parameters()[named.key()], named.value()))
                  << named.key() << " step " << step;
            }
          }
        }
      }
    }
  }
}

TEST(MegatronGather, MEG08_a_step_that_updates_nothing_leaves_parameters_and_sums) {
  auto model = seeded(1);
  model->to(at::kHalf);
  DistributedOptimizer<torch::optim::SGD> optimizer(
      model, torch::optim::SGDOptions(0.1), group(),
      {.reuse_grad_buf_for_param_gather = true,
       .grad_reduce_in_fp32 = true,
       .scaler = GradScalerOptions{.initial_scale = 1024, .hysteresis = 1}});
  const auto before = model->first->weight.detach().clone();
  const bool here = group().rank() == group().size() - 1;
  const auto x = here ? at::full({4, 12}, 60000, at::kHalf) : batch(group().rank(), 0).to(at::kHalf);
  optimizer.scale_loss(mean_loss(model->forward(x)).mul(here ? 1e6 : 1)).backward();
  EXPECT_FALSE(optimizer.step().updated);
  EXPECT_TRUE(at::equal(model->first->weight, before));
  optimizer.zero_grad();
  optimizer.scale_loss(mean_loss(model->forward(batch(group().rank(), 1).to(at::kHalf)))).backward();
  EXPECT_TRUE(optimizer.step().updated);
  EXPECT_FALSE(at::equal(model->first->weight, before));
}

// Otherwise sums accumulate until zero_grad().
TEST(MegatronGather, MEG08_sums_that_a_step_has_overwritten_are_not_used_again) {
  auto model = seeded(1);
  Optimizer optimizer(model, AdamWOptions(1e-2), group(), {.reuse_grad_buf_for_param_gather = true});
  const auto train = [&](int64_t step) {
    mean_loss(model->forward(batch(group().rank(), step))).backward();
    optimizer.step();
  };
  train(0);
  const auto refused = test::refusal([&] { optimizer.step(); });
  EXPECT_NE(refused.find("has given its memory to the updated parameters"), std::string::npos) << refused;
  EXPECT_NE(refused.find("drop it with zero_grad()"), std::string::npos) << refused;
  optimizer.zero_grad();
  train(2);
}

// Communication of each way, and its memory, for a model of one dtype.
TEST(MegatronGather, MEG08_one_gather_per_buffer_in_the_gradients_memory) {
  for (const bool overlap : {true, false}) {
    auto log = std::make_shared<CallLog>();
    auto model = seeded(1);
    model->to(at::kBFloat16);
    const auto* address = model->first->weight.data_ptr();
    Optimizer optimizer(model, AdamWOptions(1e-2), group().recorded(log),
                        {.overlap_grad_reduce = overlap,
                         .reuse_grad_buf_for_param_gather = true,
                         .grad_reduce_in_fp32 = true,
                         .bucket_size = 100});
    EXPECT_EQ(model->first->weight.data_ptr(), address) << "memory of its own";
    log->clear();
    mean_loss(model->forward(batch(group().rank(), 0).to(at::kBFloat16))).backward();
    optimizer.step();
    const auto gathers = log->count(Op::all_gather);
    EXPECT_EQ(gathers, log->count(Op::reduce_scatter));
    EXPECT_EQ(gathers > 1, overlap) << gathers;
    EXPECT_EQ(log->bytes(Op::all_gather), log->bytes(Op::reduce_scatter) / 2) << "16 bits for 32";
    EXPECT_EQ(log->count(Op::broadcast), 0);
    std::map<std::string, int64_t> begins;
    for (int rank = 0; rank < group().size(); ++rank) {
      for (const auto& range : optimizer.param_range_map(rank)) {
        if (range.parameter.begin == 0) begins[range.name] = range.world.begin;
      }
    }
    for (const auto& named : model->named_parameters()) {
      const auto gradients = optimizer.main_grad(named.value());
      EXPECT_FALSE(named.value().is_alias_of(gradients));
      // The buffer holds 16-bit parameters from its start, in the gradients' layout.
      const auto begin = gradients.storage_offset() - begins.at(named.key());
      auto buffer = at::empty({0}, at::kBFloat16);
      buffer.set_(gradients.storage(), 2 * begin + begins.at(named.key()), {named.value().numel()}, {1});
      EXPECT_TRUE(at::equal(buffer, named.value().flatten())) << named.key();
    }
  }
}

TEST(MegatronGather, MEG08_is_refused_for_optimizers_that_own_whole_parameters) {
  try {
    DistributedOptimizer<Lamb> optimizer(seeded(1), LambOptions(1e-2), group(),
                                         {.reuse_grad_buf_for_param_gather = true});
    ADD_FAILURE();
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("reuse_grad_buf_for_param_gather needs an element-wise optimizer"),
              std::string::npos)
        << error.what();
  }
}

// The gather is still in flight when the optimizer is destroyed.
TEST(MegatronGather, MEG14_an_optimizer_that_goes_leaves_the_updated_parameters) {
  for (const bool reuse : {true, false}) {
    std::vector<std::vector<at::Tensor>> results;
    for (const bool overlap : {true, false}) {
      auto model = seeded(1);
      {
        Optimizer optimizer(
            model, AdamWOptions(1e-2), group(),
            {.overlap_param_gather = overlap, .reuse_grad_buf_for_param_gather = reuse, .bucket_size = 100});
        mean_loss(model->forward(batch(group().rank(), 0))).backward();
        optimizer.step();
      }
      group().barrier().wait();  // goes on working
      results.push_back(model->parameters());
    }
    for (size_t i = 0; i < results[0].size(); ++i) EXPECT_TRUE(at::equal(results[0][i], results[1][i])) << i;
  }
}

TEST(MegatronGather, MEG02_parameters_of_two_dtypes_whose_gradients_are_float32) {
  for (const bool reuse : {true, false}) {
    const auto model = std::make_shared<MixedImpl>(at::kBFloat16);
    const auto norm = model->norm.detach().clone();
    // One bucket would hold both.
    Optimizer optimizer(model, AdamWOptions(1e-2), group(),
                        {.reuse_grad_buf_for_param_gather = reuse, .grad_reduce_in_fp32 = true});
    EXPECT_EQ(model->norm.scalar_type(), at::kFloat);
    EXPECT_EQ(model->first->weight.scalar_type(), at::kBFloat16);
    EXPECT_TRUE(at::equal(model->norm, norm));
  }
}

}  // namespace
}  // namespace shoal::megatron_gather_test
