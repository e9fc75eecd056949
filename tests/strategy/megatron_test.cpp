// DistributedOptimizer: rows MEG01 to MEG15, beyond what strategies_test.cpp, zoo_test.cpp and faults_test.cpp show.

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <numeric>
#include <sstream>
#include <thread>

#include "comm/group_state.h"
#include "comm/world_state.h"
#include "shoal/base/error.h"
#include "shoal/strategy/megatron/distributed_optimizer.h"
#include "tests/support/memory_meter.h"
#include "tests/support/models.h"
#include "tests/support/world.h"

namespace shoal {
namespace {

using test::batch;
using test::difference;
using test::mean_loss;
using test::Mlp;
using test::seeded;
using test::world;
using torch::optim::AdamWOptions;
using torch::optim::SGDOptions;
using Sgd = DistributedOptimizer<torch::optim::SGD>;

const Group& group() {
  return world().group();
}

const SGDOptions sgd = SGDOptions(0.1).momentum(0.9);

Mlp seeded_as(at::ScalarType dtype) {
  auto model = seeded(1);
  model->to(dtype);
  return model;
}

// Adds the mean gradient of one step over all ranks' batches.
void add_mean_gradient(Mlp& model, int64_t step, int micros = 1) {
  const auto dtype = model->first->weight.scalar_type();
  for (int rank = 0; rank < group().size(); ++rank) {
    for (int micro = 0; micro < micros; ++micro) {
      (mean_loss(model->forward(batch(rank, step, micro).to(dtype))) / (group().size() * micros)).backward();
    }
  }
}

void backward(Mlp& model, const DistributedOptimizerCore& optimizer, int64_t step, int micro = 0, int micros = 1) {
  const auto dtype = model->first->weight.scalar_type();
  const auto loss = mean_loss(model->forward(batch(group().rank(), step, micro).to(dtype))) / micros;
  optimizer.scale_loss(loss).backward();
}

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
    EXPECT_TRUE(model->first->weight.grad().is_alias_of(first)) << "accumulates in place";
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

TEST(Megatron, MEG04_param_groups_are_rewritten_to_the_shards) {
  auto model = seeded(1);
  auto reference = seeded(1);
  const auto groups = [](Mlp& of) {
    std::vector<torch::optim::OptimizerParamGroup> list;
    std::vector<at::Tensor> weights;
    std::vector<at::Tensor> biases;
    for (const auto& parameter : of->parameters()) (parameter.dim() > 1 ? weights : biases).push_back(parameter);
    list.emplace_back(weights);
    list.emplace_back(biases, std::make_unique<AdamWOptions>(AdamWOptions(1e-2).weight_decay(0)));
    return list;
  };
  const auto defaults = AdamWOptions(1e-2).weight_decay(0.5);
  DistributedOptimizer<torch::optim::AdamW> optimizer({model.ptr()}, groups(model), defaults, group());
  torch::optim::AdamW whole(groups(reference), defaults);
  for (int64_t step = 0; step < 3; ++step) {
    backward(model, optimizer, step);
    optimizer.step();
    optimizer.zero_grad();
    add_mean_gradient(reference, step);
    whole.step();
    whole.zero_grad();
  }
  EXPECT_LT(difference(model->parameters(), reference->parameters()), 1e-12);
  auto missing = groups(model);
  missing.pop_back();
  EXPECT_THROW((DistributedOptimizer<torch::optim::AdamW>({seeded(1).ptr()}, missing, defaults, group())), UsageError);
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
  expect_refused(at::kHalf, {}, "parameter second.weight is float16, whose gradients vanish");
  expect_refused(at::kFloat, {.scaler = GradScalerOptions{}}, "is Float, which needs no scaler");
  EXPECT_THROW((Sgd(seeded(1), sgd, group(), {.clip_grad = -1})), UsageError);
  EXPECT_THROW((Sgd(seeded(1), sgd, group(), {.bucket_size = 0})), UsageError);
}

TEST(Megatron, MEG06_one_reduce_scatter_per_buffer_and_no_allocation) {
  auto log = std::make_shared<CallLog>();
  torch::manual_seed(1);
  Mlp model(64, 512, 8, at::kFloat);
  Sgd optimizer(model, sgd, group().recorded(log), {.overlap_grad_reduce = false});
  auto& meter = test::MemoryMeter::instance();
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
  auto sum = model->third->bias.grad().clone();
  group().all_reduce(sum, ReduceOp::sum).wait();
  const auto before = model->third->bias.detach().clone();
  optimizer.step();
  // The mean over ranks of what is the same sum on every rank.
  EXPECT_LT(difference({model->third->bias}, {before - 0.1 * sum}), 1e-12);
}

TEST(Megatron, MEG07_step_reports_norm_and_zeros_and_clips_over_all_ranks) {
  auto model = seeded(1);
  auto reference = seeded(1);
  Sgd optimizer(model, sgd, group(), {.clip_grad = 0.01, .log_num_zeros_in_grad = true});
  torch::optim::SGD whole(reference->parameters(), sgd);
  for (int64_t step = 0; step < 3; ++step) {
    backward(model, optimizer, step);
    add_mean_gradient(reference, step);
    int64_t zeros = 0;
    for (const auto& parameter : reference->parameters()) {
      zeros += parameter.numel() - parameter.grad().count_nonzero().item<int64_t>();
    }
    const double norm = torch::nn::utils::clip_grad_norm_(reference->parameters(), 0.01);
    const auto result = optimizer.step();
    whole.step();
    EXPECT_TRUE(result.updated);
    EXPECT_NEAR(*result.grad_norm, norm, 1e-12);
    EXPECT_EQ(*result.num_zeros, zeros);
    optimizer.zero_grad();
    whole.zero_grad();
  }
  EXPECT_LT(difference(model->parameters(), reference->parameters()), 1e-11);
}

TEST(Megatron, MEG07_16_bit_parameters_follow_float32_main_parameters) {
  auto model = seeded_as(at::kBFloat16);
  auto reference = seeded_as(at::kBFloat16);
  DistributedOptimizer<torch::optim::AdamW> optimizer(model, AdamWOptions(1e-2), group(),
                                                      {.grad_reduce_in_fp32 = true});
  std::vector<at::Tensor> main;
  for (const auto& parameter : reference->parameters()) {
    main.push_back(parameter.detach().to(at::kFloat).requires_grad_(true));
  }
  torch::optim::AdamW whole(main, AdamWOptions(1e-2));
  for (int64_t step = 0; step < 5; ++step) {
    backward(model, optimizer, step);
    optimizer.step();
    optimizer.zero_grad();
    // One process with float32 main weights: every rank's bfloat16 gradient, added in float32.
    for (size_t i = 0; i < main.size(); ++i) main[i].mutable_grad() = at::zeros_like(main[i]);
    for (int rank = 0; rank < group().size(); ++rank) {
      reference->zero_grad();
      mean_loss(reference->forward(batch(rank, step).to(at::kBFloat16))).backward();
      for (size_t i = 0; i < main.size(); ++i) {
        main[i].mutable_grad() += reference->parameters()[i].grad().to(at::kFloat) / group().size();
      }
    }
    whole.step();
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < main.size(); ++i) reference->parameters()[i].copy_(main[i]);
  }
  EXPECT_LT(difference(model->parameters(), reference->parameters()), 0.01) << "8 bits";
  const auto state = optimizer.state_dict();
  for (const auto& named : reference->named_parameters()) {
    EXPECT_EQ(state.at(named.key()).tensors.at("main_param").scalar_type(), at::kFloat);
  }
  EXPECT_LT(difference({state.at("second.weight").tensors.at("main_param")}, {main[2]}), 1e-4);
}

TEST(Megatron, MEG09_several_chunks_under_one_optimizer) {
  auto reference = seeded(1);
  auto whole_model = seeded(1);
  std::vector<torch::nn::Linear> chunks{whole_model->first, whole_model->second, whole_model->third};
  Sgd optimizer({chunks[0].ptr(), chunks[1].ptr(), chunks[2].ptr()}, sgd, group());
  torch::optim::SGD whole(reference->parameters(), sgd);
  for (int64_t step = 0; step < 3; ++step) {
    auto x = chunks[0](batch(group().rank(), step));
    x = chunks[1](torch::tanh(x));
    mean_loss(chunks[2](torch::tanh(x))).backward();
    optimizer.step();
    optimizer.zero_grad();
    add_mean_gradient(reference, step);
    whole.step();
    whole.zero_grad();
  }
  EXPECT_LT(difference(whole_model->parameters(), reference->parameters()), 1e-12);
  std::set<size_t> numbers;
  for (int rank = 0; rank < group().size(); ++rank) {
    for (const auto& range : optimizer.param_range_map(rank)) numbers.insert(range.chunk);
  }
  EXPECT_EQ(numbers, (std::set<size_t>{0, 1, 2}));
  EXPECT_EQ(optimizer.state_dict().count("chunk1.weight"), 1U);
}

TEST(Megatron, MEG10_inf_on_one_rank_makes_all_skip_and_back_off) {
  auto model = seeded_as(at::kHalf);
  Sgd optimizer(model, SGDOptions(0.1), group(),
                {.scaler = GradScalerOptions{.initial_scale = 1024, .growth_interval = 2, .hysteresis = 1}});
  const auto before = model->first->weight.detach().clone();
  if (group().rank() == group().size() - 1) {
    mean_loss(model->forward(at::full({4, 12}, 60000, at::kHalf))).mul(1e6).backward();
  } else {
    backward(model, optimizer, 0);
  }
  EXPECT_FALSE(optimizer.step().updated);
  EXPECT_EQ(optimizer.scaler()->value(), 512);
  EXPECT_TRUE(at::equal(model->first->weight, before));
  optimizer.zero_grad();
  for (int64_t step = 0; step < 2; ++step) {
    backward(model, optimizer, step);
    EXPECT_TRUE(optimizer.step().updated);
    optimizer.zero_grad();
  }
  EXPECT_EQ(optimizer.scaler()->value(), 1024) << "grows again";
  EXPECT_FALSE(at::equal(model->first->weight, before));
}

TEST(Megatron, MEG11_state_taken_at_one_number_of_ranks_goes_on_at_another) {
  const AdamWOptions defaults(1e-2);
  auto model = seeded(1);
  auto reference = seeded(1);
  DistributedOptimizer<torch::optim::AdamW> optimizer(model, defaults, group());
  torch::optim::AdamW whole(reference->parameters(), defaults);
  for (int64_t step = 0; step < 3; ++step) {
    backward(model, optimizer, step);
    optimizer.step();
    optimizer.zero_grad();
    add_mean_gradient(reference, step);
    whole.step();
    whole.zero_grad();
  }
  const auto state = optimizer.state_dict();
  const auto want = optimizer_state(whole, *reference);
  for (const auto& [name, entry] : want) {
    EXPECT_EQ(state.at(name).numbers, entry.numbers);
    for (const auto& [key, tensor] : entry.tensors) {
      EXPECT_LT(difference({state.at(name).tensors.at(key)}, {tensor}), 1e-12) << name << " " << key;
    }
  }
  auto next = seeded(1);
  {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < next->parameters().size(); ++i) next->parameters()[i].copy_(model->parameters()[i]);
  }
  const int fewer = std::max(1, group().size() / 2);
  backward(model, optimizer, 3);
  optimizer.step();
  if (group().rank() >= fewer) return;
  std::vector<int> ranks(fewer);
  std::iota(ranks.begin(), ranks.end(), 0);
  DistributedOptimizer<torch::optim::AdamW> again(next, defaults, group().subgroup(ranks),
                                                  {.overlap_grad_reduce = false});
  again.load_state_dict(state);
  // Every rank has the whole mean gradient.
  add_mean_gradient(next, 3);
  again.step();
  EXPECT_LT(difference(next->parameters(), model->parameters()), 1e-12);
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

// Bytes per parameter that this rank holds beside activations, by what the method promises.
double bytes_per_parameter(at::ScalarType dtype, bool fp32_gradients) {
  constexpr int64_t width = 512;
  auto& meter = test::MemoryMeter::instance();
  group().broadcast(at::zeros({1000}), 0).wait();
  // Gloo's threads let go of the last operation's tensors a little later.
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const auto shared = [] { return static_cast<int64_t>(state_of(group())->world->memory->bytes_in_use()); };
  const auto before = meter.live() + shared();
  torch::nn::Sequential model;
  for (int i = 0; i < 4; ++i) {
    model->push_back(torch::nn::Linear(torch::nn::LinearOptions(width, width).bias(false)));
  }
  model->to(dtype);
  DistributedOptimizerOptions options{.grad_reduce_in_fp32 = fp32_gradients};
  if (dtype == at::kHalf) options.scaler = GradScalerOptions{.initial_scale = 1};
  DistributedOptimizer<FusedAdamW> optimizer(model, AdamWOptions(1e-3), group(), options);
  optimizer.scale_loss(model->forward(at::ones({1, width}, dtype)).sum()).backward();
  optimizer.step();
  optimizer.zero_grad();
  return static_cast<double>(meter.live() + shared() - before) / (4.0 * width * width);
}

TEST(Megatron, MEG15_bytes_per_parameter_are_what_the_method_promises) {
  const double n = group().size();
  // Parameters that exist once per host are counted by nobody's allocator.
  const double once = group().transport() == "host" ? 0 : 1;
  EXPECT_NEAR(bytes_per_parameter(at::kFloat, false), once * 4 + 4 + 8 / n, 0.05 * (8 + 8 / n));
  EXPECT_NEAR(bytes_per_parameter(at::kBFloat16, true), once * 2 + 4 + 12 / n, 0.05 * (6 + 12 / n));
  EXPECT_NEAR(bytes_per_parameter(at::kBFloat16, false), once * 2 + 2 + 12 / n, 0.05 * (4 + 12 / n));
  EXPECT_NEAR(bytes_per_parameter(at::kHalf, false), once * 2 + 2 + 12 / n, 0.05 * (4 + 12 / n));
}

}  // namespace
}  // namespace shoal
