// DistributedOptimizer: results of training, rows MEG04 to MEG11, beyond strategies_test.cpp, zoo_test.cpp and
// faults_test.cpp. Its buffers are in megatron_buffers_test.cpp.

#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>

#include <numeric>
#include <set>

#include "shoal/error.h"
#include "shoal/optim.h"
#include "tests/strategy/megatron/megatron_training.h"

namespace shoal::test::megatron_test {
namespace {

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
    // One process with float32 main weights: every rank's bfloat16 gradient, summed in float32.
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

TEST(Megatron, MEG10_BEY07_inf_on_one_rank_makes_all_skip_and_back_off) {
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

// Sums of an incomplete round move with the moments, to one process and back.
TEST(Megatron, DEC15_state_taken_within_a_round_goes_on_without_shards_and_with) {
  const auto options = AccumAdamOptions(1e-2).weight_decay(0.1).accum_iter(3);
  using Sharded = DistributedOptimizer<AccumAdamW>;
  const auto train = [](Sharded& optimizer, Mlp& model, int64_t begin, int64_t end) {
    for (int64_t step = begin; step < end; ++step) {
      backward(model, optimizer, step);
      optimizer.step();
      optimizer.zero_grad();
    }
  };
  const auto copy = [](const Mlp& from, const Mlp& to) {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < to->parameters().size(); ++i) to->parameters()[i].copy_(from->parameters()[i]);
  };
  auto model = seeded(1), between = seeded(1), next = seeded(1);
  Sharded uninterrupted(model, options, group());
  train(uninterrupted, model, 0, 4);
  copy(model, between);
  AccumAdamW whole(between->parameters(), options);
  load_optimizer_state(whole, *between, uninterrupted.state_dict());
  add_mean_gradient(between, 4);
  whole.step();
  copy(between, next);
  Sharded again(next, options, group());
  again.load_state_dict(optimizer_state(whole, *between));
  train(uninterrupted, model, 4, 8);
  train(again, next, 5, 8);
  EXPECT_LT(difference(next->parameters(), model->parameters()), 1e-10);
}

}  // namespace
}  // namespace shoal::test::megatron_test
