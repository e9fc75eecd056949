// Programs that put other values (averages, say) in place of the parameters for a while: saves and reads show these,
// and the training's own come back as they were.

#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <map>
#include <optional>

#include "checkpoint/loading/reader.h"
#include "shoal/checkpoint.h"
#include "shoal/fsdp.h"
#include "shoal/optim.h"
#include "shoal/training.h"
#include "tests/support/models.h"
#include "tests/support/shared_folder.h"
#include "tests/support/variants.h"
#include "tests/support/world.h"

namespace shoal::test::swapped_values_test {
namespace {

using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;

constexpr double other = 7;

class SwappedValues : public testing::TestWithParam<std::string> {
 public:
  static auto make(const std::string& name, const Mlp& model, const OptimizerRecipe& recipe) {
    auto chosen = variant(name, group());
    add_known(chosen, {{"unit_numel", "100"}});
    return make_training(chosen.strategy, model, recipe, group(), {.options = chosen.options});
  }
  static OptimizerRecipe adamw() { return optimizer_recipe<AdamW>(AdamWOptions(1e-2)); }
};

using Run = shoal::Training<MlpImpl>;

void train(Run& training, int64_t step, at::ScalarType dtype = at::kDouble) {
  training->backward(mean_loss(training.forward(batch(group().rank(), step).to(dtype))));
  training->step();
  training->zero_grad();
}

std::vector<at::Tensor> whole(Run& training, const Mlp& model) {
  const auto full = training->full_parameters();
  return copies(*model);
}

bool all_other(const std::vector<at::Tensor>& list) {
  return std::all_of(list.begin(), list.end(),
                     [](const auto& one) { return one.eq(other).all().template item<bool>(); });
}

// As most programs do it, which hold the memory of the parameters meanwhile.
template <class Act>
void with_other_values(const Mlp& model, const Act& act) {
  std::vector<at::Tensor> own;
  for (auto& parameter : model->parameters()) {
    own.push_back(parameter.data());
    parameter.set_data(at::full_like(parameter, other));
  }
  act();
  const auto parameters = model->parameters();
  for (size_t i = 0; i < own.size(); ++i) parameters[i].set_data(own[i]);
}

TEST_P(SwappedValues, BEY05_saves_and_reads_show_other_values_and_leave_the_trainings_own_alone) {
  const SharedFolder folder;
  std::vector<std::vector<at::Tensor>> ends;
  for (const bool swaps : {false, true}) {
    const auto model = seeded(1);
    auto training = make(GetParam(), model, adamw());
    auto state = training->state().value();
    const std::vector<std::function<void()>> acts{[&] {
                                                    save(folder / "run", state, {.step = 1});
                                                    const CheckpointReader reader(folder / "run");
                                                    for (const auto& entry : model->named_parameters())
                                                      EXPECT_TRUE(all_other({reader.read(entry.key())}));
                                                  },
                                                  [&] {
                                                    save_async(folder / "later", state, {.step = 2});
                                                    state.wait();
                                                  },
                                                  [&] { EXPECT_TRUE(all_other(whole(training, model))); },
                                                  [&] { training->save_module(folder / "module.safetensors"); },
                                                  [&] { training->optimizer_state(); },
                                                  [&] {
                                                    const torch::NoGradGuard no_grad;
                                                    training.forward(batch(group().rank(), 50));
                                                  }};
    for (size_t step = 0; step <= acts.size(); ++step) {
      train(training, static_cast<int64_t>(step));
      if (swaps && step < acts.size()) with_other_values(model, acts[step]);
    }
    ends.push_back(whole(training, model));
  }
  EXPECT_EQ(difference(ends[1], ends[0]), 0);
}

TEST_P(SwappedValues, BEY04_a_backward_or_a_step_with_other_values_leaves_those_that_the_program_holds) {
  std::vector<std::vector<at::Tensor>> ends;
  for (const auto& name : {std::string("ddp"), GetParam()}) {
    const auto model = seeded(1);
    auto training = make(name, model, adamw());
    for (int64_t step = 0; step < 2; ++step) {
      train(training, step);
      with_other_values(model, [&] {
        training->backward(mean_loss(training.forward(batch(group().rank(), 20 + step))));
        if (step > 0) training->step();
        training->zero_grad();
      });
      train(training, 10 + step);
    }
    ends.push_back(whole(training, model));
  }
  EXPECT_LT(difference(ends[1], ends[0]), 1e-10);
}

INSTANTIATE_TEST_SUITE_P(All, SwappedValues,
                         testing::Values("ddp", "zero1", "zero2", "megatron", "megatron_in_grads", "fsdp",
                                         "fsdp_grad_op", "fsdp_no_shard", "fsdp_hybrid"),
                         [](const auto& info) { return info.param; });

// The float32 copies of 16-bit parameters have bits that neither the averages nor what comes back can hold.
TEST(SwappedCopies, BEY05_saves_and_reads_with_other_values_keep_the_copies) {
  for (const std::string name : {"megatron", "megatron_in_grads", "fsdp", "fsdp_no_shard"}) {
    SCOPED_TRACE(name);
    const SharedFolder folder;
    std::vector<OptimizerState> ends;
    for (const bool reads : {false, true}) {
      auto model = seeded(1);
      model->to(at::kBFloat16);
      auto training = SwappedValues::make(name, model, optimizer_recipe<SGD>(SGDOptions(1e-3)));
      auto state = training->state().value();
      const std::vector<std::function<void()>> acts{[&] { save(folder / "run", state, {.step = 1}); },
                                                    [&] { EXPECT_TRUE(all_other(whole(training, model))); },
                                                    [&] { training->optimizer_state(); }};
      for (size_t step = 0; step <= acts.size(); ++step) {
        train(training, static_cast<int64_t>(step), at::kBFloat16);
        const torch::NoGradGuard no_grad;
        const auto own = copies(*model);
        for (auto& parameter : model->parameters()) parameter.fill_(other);
        if (reads && step < acts.size()) acts[step]();
        const auto parameters = model->parameters();
        for (size_t i = 0; i < own.size(); ++i) at::Tensor(parameters[i]).copy_(own[i]);
      }
      ends.push_back(training->optimizer_state());
    }
    for (const auto& [parameter, entry] : ends[0]) {
      const auto& copy = entry.tensors.at("main_param");
      EXPECT_FALSE(at::equal(copy, copy.to(at::kBFloat16).to(at::kFloat)));
      EXPECT_TRUE(at::equal(ends[1].at(parameter).tensors.at("main_param"), copy)) << parameter;
    }
  }
}

using Values = std::map<std::string, at::Tensor>;

struct Fsdp16 {
  Fsdp16() : model(seeded(1)) {
    model->to(at::kFloat);
    model->second->weight.set_requires_grad(false);
    const FullyShardedDataParallelOptions options{.auto_wrap_policy = wrap_type<torch::nn::LinearImpl>(),
                                                  .param_dtype = at::kBFloat16};
    parallel.emplace(model, group(), options);
    optimizer.emplace(*parallel, SGDOptions(1e-4));
  }
  void train(int64_t step) {
    mean_loss(parallel->forward(batch(group().rank(), step))).backward();
    optimizer->step();
    optimizer->zero_grad();
  }
  void evaluate() {
    const torch::NoGradGuard no_grad;
    parallel->forward(batch(group().rank(), 50));
  }
  void summon() { const auto whole = parallel->summon_full_params(false); }

  Mlp model;
  std::optional<FullyShardedDataParallel<MlpImpl>> parallel{};
  std::optional<FullyShardedOptimizer<SGD>> optimizer{};
};

// How averages take the place of parameters, and how the training's own come back.
using Swap = std::function<void(Fsdp16&, const Values& averages, const std::function<void()>& act)>;

void in_place(Fsdp16& run, const Values& averages, const std::function<void()>& act) {
  const torch::NoGradGuard no_grad;
  const auto own = copies(*run.model);
  for (auto& entry : run.model->named_parameters()) entry.value().copy_(averages.at(entry.key()));
  act();
  const auto parameters = run.model->parameters();
  for (size_t i = 0; i < own.size(); ++i) at::Tensor(parameters[i]).copy_(own[i]);
}

void in_scopes(Fsdp16& run, const Values& averages, const std::function<void()>& act) {
  const torch::NoGradGuard no_grad;
  std::vector<at::Tensor> own;
  {
    const auto whole = run.parallel->summon_full_params();
    own = copies(*run.model);
    for (auto& entry : run.model->named_parameters()) entry.value().copy_(averages.at(entry.key()));
  }
  act();
  const auto whole = run.parallel->summon_full_params();
  const auto parameters = run.model->parameters();
  for (size_t i = 0; i < own.size(); ++i) at::Tensor(parameters[i]).copy_(own[i]);
}

Swap in_other_memory(at::ScalarType dtype) {
  return [dtype](Fsdp16& run, const Values& averages, const std::function<void()>& act) {
    std::vector<at::Tensor> own;
    for (auto& entry : run.model->named_parameters()) {
      own.push_back(entry.value().data());
      entry.value().set_data(averages.at(entry.key()).to(dtype, /*non_blocking=*/false, /*copy=*/true));
    }
    act();
    const auto parameters = run.model->parameters();
    for (size_t i = 0; i < own.size(); ++i) parameters[i].set_data(own[i]);
  };
}

void expect_equal(const Values& values, const Values& expected, const std::string& when) {
  for (const auto& [name, value] : expected) EXPECT_TRUE(at::equal(values.at(name), value)) << name << ' ' << when;
}

// The averages are adopted meanwhile. Most are so near that they are the same in 16 bits.
TEST(SwappedCopies, FSDP05_after_an_evaluation_with_averages_the_copies_have_all_their_bits) {
  const std::vector<std::pair<std::string, Swap>> ways{{"in place", in_place},
                                                       {"in scopes", in_scopes},
                                                       {"in other memory", in_other_memory(at::kBFloat16)},
                                                       {"in float32", in_other_memory(at::kFloat)}};
  Fsdp16 run;
  int64_t step = 0;
  for (const auto& [name, swap] : ways) {
    SCOPED_TRACE(name);
    for (const double factor : {1.0001, 1.5}) {
      run.train(step++);
      const auto own = run.parallel->full_state_dict();
      Values averages;
      for (const auto& [parameter, value] : own) averages[parameter] = value * factor;
      swap(run, averages, [&] {
        run.evaluate();
        run.summon();
        for (const auto& [parameter, value] : run.parallel->full_state_dict()) {
          EXPECT_TRUE(at::equal(value.to(at::kBFloat16), averages.at(parameter).to(at::kBFloat16))) << parameter;
        }
        run.evaluate();
      });
      expect_equal(run.parallel->full_state_dict(), own, "at once");
      run.summon();
      expect_equal(run.parallel->full_state_dict(), own, "adopted");
    }
  }
}

// What is not an evaluation: float32 values that stay count to the last bit, though they are the same in 16 bits.
TEST(SwappedCopies, FSDP05_averages_that_stay_count_to_the_last_bit) {
  Fsdp16 run;
  run.train(0);
  Values averages;
  for (const auto& [name, value] : run.parallel->full_state_dict()) averages[name] = value * 1.0001;
  for (auto& entry : run.model->named_parameters()) entry.value().set_data(averages.at(entry.key()).clone());
  run.evaluate();
  run.summon();
  { const auto whole = run.parallel->summon_full_params(); }
  expect_equal(run.parallel->full_state_dict(), averages, "");
  // A write in place leaves the other elements alone.
  for (auto& entry : run.model->named_parameters()) entry.value().data().flatten()[0] = 0;
  for (auto& [name, value] : averages) value.flatten()[0] = 0;
  run.evaluate();
  expect_equal(run.parallel->full_state_dict(), averages, "after a write");
  {
    const auto whole = run.parallel->summon_full_params();
    for (auto& parameter : run.model->parameters()) parameter.data().clamp_(-100, 100);
  }
  expect_equal(run.parallel->full_state_dict(), averages, "after a clamp");
}

}  // namespace
}  // namespace shoal::test::swapped_values_test
