// DistributedOptimizer's buffers: where gradients and parameters lie, what is communicated and when, and bytes per
// parameter.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <limits>
#include <sstream>
#include <thread>

#include "comm/group/group_state.h"
#include "comm/rendezvous/world_state.h"
#include "shoal/error.h"
#include "tests/strategy/megatron/megatron_training.h"
#include "tests/support/memory_meter.h"
#include "tests/support/refusal.h"

namespace shoal::test::megatron_buffers_test {
namespace {

TEST(Megatron, MEG01_ranges_are_normalised_and_printed) {
  std::ostringstream text;
  text << Range{3, 10} << " " << Range{3, 10}.normalize(1) << " " << Range{3, 10}.normalize();
  EXPECT_EQ(text.str(), "3,10 [7] 1,8 [7] 0,7 [7]");
}

TEST(Megatron, MEG02_gradients_accumulate_in_one_buffer_per_dtype_last_parameter_first) {
  auto model = seeded(1);
  Sgd optimizer(model, sgd, group(), {.overlap_grad_reduce = false});
  const auto first = optimizer.main_grad(model->first->weight);
  const auto last = optimizer.main_grad(model->third->bias);
  EXPECT_TRUE(first.is_alias_of(last));
  EXPECT_GT(first.storage_offset(), last.storage_offset());
  const auto numel = static_cast<int64_t>(first.storage().nbytes() / first.element_size());
  EXPECT_GE(numel - first.storage_offset(), first.numel());
  for (int micro = 0; micro < 2; ++micro) {
    backward(model, optimizer, 0, micro);
    EXPECT_TRUE(optimizer.main_grad(model->first->weight).is_same(first)) << "accumulates in place";
    EXPECT_THROW(model->first->weight.grad().sum(), UsageError) << "not the sum over ranks";
  }
  auto reference = seeded(1);
  for (int micro = 0; micro < 2; ++micro) mean_loss(reference->forward(batch(group().rank(), 0, micro))).backward();
  EXPECT_LT(difference({first}, {reference->first->weight.grad()}), 1e-12);
}

TEST(Megatron, MEG02_gradients_of_16_bit_parameters_accumulate_in_float32) {
  auto model = seeded_as(at::kBFloat16);
  Sgd optimizer(model, sgd, group(), {.overlap_grad_reduce = false, .grad_reduce_in_fp32 = true});
  EXPECT_EQ(optimizer.main_grad(model->first->weight).scalar_type(), at::kFloat);
  for (int micro = 0; micro < 64; ++micro) backward(model, optimizer, 0, micro, 64);
  auto exact = seeded_as(at::kBFloat16);
  exact->to(at::kFloat);  // the same 8-bit values
  for (int micro = 0; micro < 64; ++micro) {
    (mean_loss(exact->forward(batch(group().rank(), 0, micro).to(at::kBFloat16).to(at::kFloat))) / 64).backward();
  }
  const auto error = difference({optimizer.main_grad(model->third->bias)}, {exact->third->bias.grad()});
  EXPECT_LT(error, 0.01) << "sums in bfloat16 would lose more";
}

TEST(Megatron, MEG03_ranges_tile_every_parameter_exactly_once) {
  torch::manual_seed(7);
  for (int round = 0; round < 8; ++round) {
    torch::nn::Sequential model;
    for (int i = 0; i < 3 + round; ++i) {
      const auto in = at::randint(1, 40, {1}, at::kLong).item<int64_t>();
      const auto out = at::randint(1, 40, {1}, at::kLong).item<int64_t>();
      model->push_back(torch::nn::Linear(in, out));
    }
    Sgd optimizer(model, sgd, group(), {.bucket_size = 500});
    std::map<std::string, std::vector<Range>> pieces;
    std::map<size_t, std::vector<int64_t>> sizes;  // by buffer, of each rank's view
    for (int rank = 0; rank < group().size(); ++rank) {
      for (const auto& range : optimizer.param_range_map(rank)) {
        EXPECT_EQ(range.world.size(), range.parameter.size());
        EXPECT_EQ(range.local.size(), range.parameter.size());
        EXPECT_GE(range.local.begin, 0);
        pieces[range.name].push_back(range.parameter);
      }
    }
    for (const auto& named : model->named_parameters()) {
      auto& list = pieces.at(named.key());
      std::sort(list.begin(), list.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
      int64_t next = 0;
      for (const auto& range : list) {
        EXPECT_EQ(range.begin, next);
        next = range.end;
      }
      EXPECT_EQ(next, named.value().numel());
    }
  }
}

TEST(Megatron, MEG05_dtypes_and_scalers_that_do_not_fit_name_the_parameter) {
  const auto expect_refused = [](at::ScalarType dtype, const DistributedOptimizerOptions& options,
                                 const std::string& because) {
    auto model = seeded(1);
    model->to(at::kFloat);
    model->second->weight.set_data(model->second->weight.to(dtype));
    try {
      Sgd optimizer(model, sgd, group(), options);
      ADD_FAILURE() << because;
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find(because), std::string::npos) << error.what();
    }
  };
  expect_refused(at::kComplexFloat, {},
                 "parameter second.weight is ComplexFloat; it must be float16, bfloat16 or float32");
  expect_refused(at::kHalf, {}, "parameter second.weight is float16, whose gradients underflow");
  expect_refused(at::kFloat, {.scaler = GradScalerOptions{}}, "is Float, which does not need a scaler");
  EXPECT_THROW((Sgd(seeded(1), sgd, group(), {.clip_grad = -1})), UsageError);
  EXPECT_THROW((Sgd(seeded(1), sgd, group(), {.bucket_size = 0})), UsageError);
}

TEST(Megatron, MEG06_one_reduce_scatter_per_buffer_and_no_allocation) {
  auto log = std::make_shared<CallLog>();
  torch::manual_seed(1);
  Mlp model(64, 512, 8, at::kFloat);
  Sgd optimizer(model, sgd, group().recorded(log), {.overlap_grad_reduce = false});
  auto& meter = MemoryMeter::instance();
  for (int64_t step = 0; step < 3; ++step) {
    mean_loss(model->forward(batch(group().rank(), step, 0, 4, 64).to(at::kFloat))).backward();
    log->clear();
    meter.reset_peak();
    const auto before = meter.live();
    optimizer.reduce_model_grads();
    if (step > 0 && group().transport() != "gloo") {
      EXPECT_LE(meter.peak() - before, 1024) << "but for flags, one per parameter";
    }
    EXPECT_EQ(log->count(Op::reduce_scatter), 1);
    EXPECT_EQ(log->count(Op::all_reduce), 1);
    optimizer.step();
    optimizer.zero_grad();
  }
  EXPECT_THROW((Sgd(seeded(1), sgd, group()).reduce_model_grads()), UsageError);
}

TEST(Megatron, MEG06_declared_gradients_are_summed_over_their_group_first) {
  auto model = seeded(1);
  Sgd optimizer(model, sgd, group(), {.overlap_grad_reduce = false});
  optimizer.all_reduce_grads({model->third->bias}, group());
  backward(model, optimizer, 0);
  auto sum = optimizer.main_grad(model->third->bias).clone();
  group().all_reduce(sum, ReduceOp::sum).wait();
  const auto before = model->third->bias.detach().clone();
  optimizer.step();
  // The mean over ranks of a sum that is the same on every rank.
  EXPECT_LT(difference({model->third->bias}, {before - 0.1 * sum}), 1e-12);
}

// Gradients of a rank's own backwards are in main_grad() only, and may be changed there; grad() drops or zeroes them.
TEST(Megatron, MEG06_before_the_reduction_main_grad_holds_this_ranks_own_gradients) {
  const auto value = [](const at::Tensor& parameter) { return parameter.detach().clone(); };
  for (const bool set_to_none : {true, false}) {
    for (const int64_t micros : {1, 2}) {
      auto model = seeded(1);
      Sgd optimizer(model, torch::optim::SGDOptions(0.1), group(), {.overlap_grad_reduce = false});
      const auto& weight = model->first->weight;
      for (int step = 0; step < 2; ++step) {
        backward(model, optimizer, step, 7);  // thought better of
        optimizer.zero_grad(set_to_none);
        for (int micro = 0; micro < micros; ++micro) backward(model, optimizer, step, micro);
        auto sum = optimizer.main_grad(weight).clone();
        auto reference = seeded(1);
        {
          const torch::NoGradGuard guard;
          for (size_t i = 0; i < model->parameters().size(); ++i) {
            reference->parameters()[i].copy_(model->parameters()[i]);
          }
        }
        for (int micro = 0; micro < micros; ++micro) {
          mean_loss(reference->forward(batch(group().rank(), step, micro))).backward();
        }
        EXPECT_LT(difference({sum}, {reference->first->weight.grad()}), 1e-12);
        EXPECT_NE(test::refusal([&] { weight.grad().norm(); }).find("main_grad()"), std::string::npos);
        optimizer.main_grad(weight).mul_(0.5);
        const auto before = value(weight);
        optimizer.step();
        group().all_reduce(sum, ReduceOp::sum).wait();
        EXPECT_LT(difference({value(weight)}, {before - 0.1 * 0.5 * sum / group().size()}), 1e-12);
        optimizer.zero_grad(set_to_none);
      }
    }
  }
}

TEST(Megatron, MEG14_reductions_leave_during_backward) {
  auto log = std::make_shared<CallLog>();
  auto model = seeded(1);
  Sgd optimizer(model, sgd, group().recorded(log), {.bucket_size = 100});
  Clock::time_point first_layer;
  model->first->weight.register_hook([&](const at::Tensor&) { first_layer = Clock::now(); });
  backward(model, optimizer, 0);
  int early = 0;
  for (const auto& record : log->records()) {
    if (record.op == Op::reduce_scatter && record.issued < first_layer) ++early;
  }
  EXPECT_GE(early, 1) << "the last layer's gradients were on their way before the first layer's were there";
}

TEST(Megatron, MEG14_the_largest_bucket_size_makes_one_bucket) {
  auto log = std::make_shared<CallLog>();
  auto model = seeded(1);
  Sgd optimizer(model, sgd, group().recorded(log), {.bucket_size = std::numeric_limits<int64_t>::max()});
  backward(model, optimizer, 0);
  optimizer.step();
  EXPECT_EQ(log->count(Op::reduce_scatter), 1);
}

TEST(Megatron, MEG14_parameters_come_in_during_the_next_forward) {
  auto log = std::make_shared<CallLog>();
  auto model = seeded(1);
  auto reference = seeded(1);
  Sgd optimizer(model, sgd, group().recorded(log), {.overlap_param_gather = true, .bucket_size = 100});
  Sgd plain(reference, sgd, group(), {.bucket_size = 100});
  for (int64_t step = 0; step < 4; ++step) {
    log->clear();
    backward(model, optimizer, step);
    optimizer.step();
    optimizer.zero_grad();
    backward(reference, plain, step);
    plain.step();
    plain.zero_grad();
    const auto returned = Clock::now();
    auto y = model->first(batch(group().rank(), step));
    const auto first_layer_done = Clock::now();
    model->third(model->second(y));
    if (group().transport() != "gloo" || group().size() == 1) continue;
    int gathers = 0;
    int later = 0;
    for (const auto& record : log->records()) {
      if (record.op != Op::broadcast || record.label.what != "updated parameters") continue;
      ++gathers;
      EXPECT_LT(record.issued, returned);
      EXPECT_GT(record.finished, returned) << "step() did not wait";
      if (record.finished > first_layer_done) ++later;
    }
    EXPECT_GT(gathers, 0);
    EXPECT_GT(later, 0) << "the first layer did not wait for the others";
  }
  for (size_t i = 0; i < model->parameters().size(); ++i) {
    EXPECT_TRUE(at::equal(model->parameters()[i], reference->parameters()[i])) << i;
  }
}

// Bytes per parameter on this rank without activations, and the peak of a later step above that.
struct Bytes {
  double held, step;
};

Bytes bytes_per_parameter(at::ScalarType dtype, bool fp32_gradients, bool reuse) {
  constexpr int64_t width = 512;
  auto& meter = MemoryMeter::instance();
  group().broadcast(at::zeros({1000}), 0).wait();
  // Gloo's threads release the last operation's tensors a little later.
  const auto settle = [] { std::this_thread::sleep_for(std::chrono::milliseconds(50)); };
  settle();
  const auto shared = [] { return static_cast<int64_t>(state_of(group())->world->memory->bytes_in_use()); };
  const auto before = meter.live() + shared();
  torch::nn::Sequential model;
  for (int i = 0; i < 4; ++i) {
    model->push_back(torch::nn::Linear(torch::nn::LinearOptions(width, width).bias(false)));
  }
  model->to(dtype);
  DistributedOptimizerOptions options{.reuse_grad_buf_for_param_gather = reuse, .grad_reduce_in_fp32 = fp32_gradients};
  if (dtype == at::kHalf) options.scaler = GradScalerOptions{.initial_scale = 1};
  DistributedOptimizer<FusedAdamW> optimizer(model, AdamWOptions(1e-3), group(), options);
  const auto backward = [&] { optimizer.scale_loss(model->forward(at::ones({1, width}, dtype)).sum()).backward(); };
  backward();
  optimizer.step();
  optimizer.zero_grad();
  settle();
  const auto held = meter.live() + shared() - before;
  backward();
  settle();
  meter.reset_peak();
  const auto start = meter.live();
  optimizer.step();
  constexpr double parameters = 4.0 * width * width;
  return {static_cast<double>(held) / parameters, static_cast<double>(meter.peak() - start) / parameters};
}

TEST(Megatron, MEG15_bytes_per_parameter_are_what_the_method_promises) {
  const double n = group().size();
  const auto held = [](at::ScalarType dtype, bool fp32_gradients) {
    return bytes_per_parameter(dtype, fp32_gradients, /*reuse=*/false).held;
  };
  // Parameters that exist once per host are in no allocator's count.
  const double once = group().transport() == "host" ? 0 : 1;
  EXPECT_NEAR(held(at::kFloat, false), once * 4 + 4 + 8 / n, 0.05 * (8 + 8 / n));
  EXPECT_NEAR(held(at::kBFloat16, true), once * 2 + 4 + 12 / n, 0.05 * (6 + 12 / n));
  EXPECT_NEAR(held(at::kBFloat16, false), once * 2 + 2 + 12 / n, 0.05 * (4 + 12 / n));
  EXPECT_NEAR(held(at::kHalf, false), once * 2 + 2 + 12 / n, 0.05 * (4 + 12 / n));
}

TEST(MegatronGather, MEG08_memory_measured_both_ways) {
  const double n = group().size();
  // A parameter buffer exists once per host, and is in no allocator's count.
  const double once = group().transport() == "host" ? 0 : 1;
  struct Way {
    at::ScalarType dtype;
    bool fp32_gradients;
    double parameter, gradient, state;
  };
  for (const auto& way :
       {Way{at::kFloat, false, 4, 4, 8}, Way{at::kBFloat16, true, 2, 4, 12}, Way{at::kBFloat16, false, 2, 2, 12}}) {
    SCOPED_TRACE(fmt::format("{}, float32 gradients {}", c10::toString(way.dtype), way.fp32_gradients));
    const double formula = way.parameter + way.gradient + way.state / n;
    for (const bool reuse : {true, false}) {
      const auto bytes = bytes_per_parameter(way.dtype, way.fp32_gradients, reuse);
      const double expected = reuse ? formula : formula - (1 - once) * way.parameter;
      EXPECT_NEAR(bytes.held, expected, 0.05 * formula) << (reuse ? "in the gradients' memory" : "in a buffer");
      if (group().transport() == "gloo") continue;  // stages what it gathers
      // 16-bit gradients are widened to float32, in the rank's own range only.
      const double widened = way.gradient < 4 ? 4 / n : 0;
      EXPECT_LT(bytes.step, widened + 0.05) << "neither the gather nor the copies take memory";
    }
  }
}

}  // namespace
}  // namespace shoal::test::megatron_buffers_test
