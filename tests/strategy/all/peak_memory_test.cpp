// Peak memory of a rank in a step, under every strategy and in every dtype, compared with the published formulas: by
// libtorch's allocator and the ranks' shared memory, and by the kernel's count of pages.

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "comm/group/group_state.h"
#include "comm/rendezvous/world_state.h"
#include "layout/model_bytes.h"
#include "shoal/optim.h"
#include "tests/support/memory_meter.h"
#include "tests/support/page_meter.h"
#include "tests/support/training.h"
#include "tests/support/world.h"

namespace shoal::peak_memory_test {
namespace {

using test::Training;
using test::TrainingOptions;
using test::world;

// Many layers, so that memory of one layer at a time is small.
constexpr int64_t layers = 192;
constexpr int64_t width = 256;
constexpr int64_t parameters = layers * width * width;
// Bytes that a rank keeps per parameter besides its values: autograd nodes, hooks, pieces, names.
constexpr double about_a_parameter = 16 << 10;

struct Case {
  std::string name;
  Precision precision{};
  ElementBytes bytes{};
  double casts = 0;    // bytes per parameter of 16-bit copies that autograd keeps until backward
  double widened = 0;  // bytes per parameter that a rank owns: float32 copies of 16-bit gradients, during the update
  bool fp32_gradients = false;
};

std::vector<Case> cases(bool main_copies) {
  const Precision fp16{.parameters = at::kHalf, .scaler = GradScalerOptions{.initial_scale = 1}};
  std::vector<Case> list{{"float32", Precision::float32(), {4, 4, 8}}, {"float64", Precision::float64(), {8, 8, 16}}};
  if (main_copies) {
    list.push_back({"bf16", Precision::bf16(), {2, 2, 12}, 0, 4});
    list.push_back({"fp16", fp16, {2, 2, 12}, 0, 4});
    list.push_back({"bf16_mixed", Precision::bf16(), {2, 4, 12}, 0, 0, true});
    list.push_back({"fp16_mixed", fp16, {2, 4, 12}, 0, 0, true});
  } else {
    list.push_back({"bf16", Precision::bf16(), {2, 2, 4}});
    list.push_back({"fp16", fp16, {2, 2, 4}});
    list.push_back({"bf16_mixed", Precision::bf16_mixed(), {4, 4, 8}, 2});
    list.push_back({"fp16_mixed", Precision::fp16_mixed(), {4, 4, 8}, 2});
  }
  // Dtypes differ in sizes alone: two ranks are measured in each of them, three in float32 and four, where the hybrid
  // strategies divide ranks, with 16-bit parameters.
  if (world().size() != 2) {
    std::erase_if(list, [](const Case& it) { return it.name != (world().size() == 4 ? "bf16" : "float32"); });
  }
  return list;
}

int64_t handed_out() {
  return test::MemoryMeter::instance().live() +
         static_cast<int64_t>(state_of(world().group())->world->memory->bytes_in_use());
}

struct NetImpl : torch::nn::Module {
  explicit NetImpl(at::ScalarType dtype) {
    const torch::NoGradGuard no_grad;
    for (int64_t i = 0; i < layers; ++i) {
      // Random numbers for all elements would take a tenth of the test.
      list.push_back(register_module(std::to_string(i), torch::nn::Linear(torch::nn::LinearOptions(1, 1).bias(false))));
      list.back()->weight.set_data(at::eye(width));  // so that nothing vanishes on the way
    }
    to(dtype);
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : list) x = layer(x);
    return x;
  }
  std::vector<torch::nn::Linear> list;
};

// Excludes memory that libraries keep from the first use of a dtype.
void warm_up(const Precision& precision) {
  torch::nn::Linear toy(width, width);
  precision.convert(*toy);
  FusedAdamW optimizer(toy->parameters(), torch::optim::AdamWOptions(1e-5));
  const auto forward = [&] {
    const Precision::Scope scope(precision, at::kCPU);
    return toy->forward(at::ones({1, width}, precision.parameters).requires_grad_(true)).sum();
  };
  forward().backward();
  optimizer.step();
}

// Frees memory that peers may still have read, which the next operation after all ranks have finished does.
void settle() {
  for (int meeting = 0; meeting < 2; ++meeting) world().group().barrier().wait();
}

struct Use {
  double peak = 0;   // maximum bytes in the third step, by allocators
  double pages = 0;  // bytes at the end of the step's backward, by the kernel
};

Use train(const std::string& strategy, const Case& it) {
  auto& meter = test::MemoryMeter::instance();
  warm_up(it.precision);
  world().group().broadcast(at::zeros({1000}), 0).wait();  // makes the staging buffer, which is never freed
  settle();
  test::return_freed_memory();
  const auto before = handed_out();
  const auto pages_before = test::proportional_bytes();
  auto model = std::make_shared<NetImpl>(it.precision.parameters);
  // At most four buckets of other owners are in flight.
  const double bucket_mb = strategy == "zero2" || strategy.starts_with("fsdp") ? 0.2 : 25;
  auto training = Training<NetImpl>::make<FusedAdamW>(
      strategy, model, world().group(), torch::optim::AdamWOptions(1e-5),
      TrainingOptions{.bucket_mb = bucket_mb, .precision = it.precision, .fp32_gradients = it.fp32_gradients});
  int64_t peak = 0;
  for (const auto& layer : model->list) {
    layer->weight.register_hook([&peak](const at::Tensor&) { peak = std::max(peak, handed_out()); });
  }
  Use use;
  const auto x = at::ones({1, width}, it.precision.parameters);
  for (int step = 0; step < 3; ++step) {
    peak = 0;
    training.forward(x).sum().backward();
    settle();
    if (step == 2) use.pages = static_cast<double>(test::proportional_bytes() - pages_before);
    world().group().barrier().wait();
    meter.reset_peak();
    const auto shared = handed_out() - meter.live();
    training.step();
    peak = std::max(peak, meter.peak() + shared);
    training.zero_grad();
  }
  use.peak = static_cast<double>(peak - before);
  return use;
}

// Measured once for all tests.
const Use& measured(const std::string& strategy, const Case& it) {
  static std::map<std::pair<std::string, std::string>, Use> all;
  const auto [found, is_new] = all.try_emplace({strategy, it.name});
  if (is_new) found->second = train(strategy, it);
  return found->second;
}

double mean_over_ranks(double value) {
  auto sum = at::full({1}, value, at::kDouble);
  world().group().all_reduce(sum).wait();
  return sum.item<double>() / world().size();
}

class PeakMemory : public testing::TestWithParam<std::pair<std::string, Sharded>> {};

TEST_P(PeakMemory, BEY11_peak_of_a_step_is_the_formulas_within_5_percent) {
  const auto [strategy, sharded] = GetParam();
  for (const auto& it : cases(strategy == "megatron" || strategy == "fsdp")) {
    SCOPED_TRACE(strategy + ", " + it.name);
    const int ranks = world().size();
    const auto formula = bytes_per_rank(parameters, it.bytes, sharded, ranks);
    const double most = formula.total() + parameters * (it.casts + it.widened / ranks);
    // Sharded strategies' parameters exist once per host, in no allocator's count.
    const bool once = ranks > 1 && strategy != "ddp";
    const auto& use = measured(strategy, it);
    EXPECT_NEAR(use.peak, most - (once ? formula.parameters : 0), 0.05 * most) << "by allocators";
    const bool counted_once = once && sharded != Sharded::parameters;
    const double held = formula.total() - (counted_once ? formula.parameters * (ranks - 1) / ranks : 0);
    const double pages = mean_over_ranks(use.pages);
    EXPECT_GE(pages, 0.95 * held);
    EXPECT_LE(pages, 1.05 * held + about_a_parameter * layers);
  }
}

// Number of ranks of one host that share one copy of the parameters, of the gradients and of the optimizer's state.
struct Sharing {
  std::string strategy;
  int parameters, gradients, state;
};

class OneCopy : public testing::TestWithParam<std::string> {};

Sharing sharing_of(const std::string& strategy) {
  const int ranks = world().size();
  const int pair = ranks % 2 == 0 ? 2 : 1;  // see Training: hybrid strategies shard among two
  if (strategy.starts_with("fsdp_hybrid")) return {strategy, pair, pair, pair};
  if (strategy == "zero1" || strategy.starts_with("megatron")) return {strategy, ranks, 1, ranks};
  return {strategy, ranks, ranks, ranks};
}

TEST_P(OneCopy, BEY17_all_ranks_together_grow_by_one_copy_of_the_parameters) {
  const auto sharing = sharing_of(GetParam());
  for (const auto& it : cases(GetParam().starts_with("megatron") || GetParam().starts_with("fsdp"))) {
    if (it.name != "float32" && it.name != "bf16") continue;
    SCOPED_TRACE(GetParam() + ", " + it.name);
    const int ranks = world().size();
    const auto whole = bytes_per_rank(parameters, it.bytes, Sharded::nothing, 1);
    const auto copies = [&](int sharers) { return static_cast<double>(ranks) / sharers; };
    const double all = whole.parameters * copies(sharing.parameters) + whole.gradients * copies(sharing.gradients) +
                       whole.state * copies(sharing.state);
    const double grown = mean_over_ranks(measured(GetParam(), it).pages) * ranks;
    EXPECT_GE(grown, 0.95 * all);
    EXPECT_LE(grown, 1.05 * all + about_a_parameter * layers * ranks);
  }
}

INSTANTIATE_TEST_SUITE_P(Strategies, OneCopy,
                         testing::Values("zero1", "zero2", "megatron", "megatron_no_overlap", "megatron_late_gather",
                                         "fsdp", "fsdp_grad_op", "fsdp_hybrid", "fsdp_hybrid_grad_op"),
                         [](const auto& info) { return info.param; });

INSTANTIATE_TEST_SUITE_P(Strategies, PeakMemory,
                         testing::Values(std::pair("ddp", Sharded::nothing), std::pair("zero1", Sharded::state),
                                         std::pair("zero2", Sharded::gradients), std::pair("megatron", Sharded::state),
                                         std::pair("fsdp", Sharded::parameters)),
                         [](const auto& info) { return info.param.first; });

}  // namespace
}  // namespace shoal::peak_memory_test
