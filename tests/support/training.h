#pragma once
// Training loop over any strategy of the registry, so that a test is written once and runs on all of them.

#include <fmt/format.h>

#include <memory>
#include <string>
#include <vector>

#include "shoal/ddp.h"
#include "shoal/fsdp.h"
#include "shoal/megatron.h"
#include "shoal/training.h"
#include "shoal/zero.h"
#include "tests/support/variants.h"

namespace shoal::test {

struct TrainingOptions {
  bool find_unused_parameters = false;
  bool static_graph = false;  // if the strategy has it
  double bucket_mb = 25;
  double clip = 0;              // maximum norm of all gradients together; 0: no clipping
  Precision precision{};        // for a model that already has its dtype
  bool fp32_gradients = false;  // for 16-bit parameters
  std::shared_ptr<CommunicationHook> hook{};
};

// Without repetitions: libtorch lists a tied parameter under each of its names.
inline std::vector<at::Tensor> distinct(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> list;
  for (const auto& parameter : parameters) {
    const bool seen = std::any_of(list.begin(), list.end(), [&](const at::Tensor& t) { return t.is_same(parameter); });
    if (!seen) list.push_back(parameter);
  }
  return list;
}

// Model under a strategy, with its optimizer.
template <class Module>
class Training {
 public:
  // strategy: a name that variant() knows. The optimizer gets frozen parameters, too, if it accepts them.
  template <class Optimizer, class Defaults>
  static Training make(const std::string& strategy, std::shared_ptr<Module> model, const Group& group,
                       const Defaults& defaults, const TrainingOptions& options = {}) {
    auto chosen = variant(strategy, group);
    const auto text = [](bool flag) { return flag ? "true" : "false"; };
    const auto bucket_mb = fmt::format("{}", options.bucket_mb);
    const auto bucket_elements = std::to_string(static_cast<int64_t>(options.bucket_mb * (1 << 18)) + 1);
    add_known(chosen, {{"find_unused_parameters", text(options.find_unused_parameters)},
                       {"static_graph", text(options.static_graph)},
                       {"grad_reduce_in_fp32", text(options.fp32_gradients)},
                       {"bucket_cap_mb", bucket_mb},
                       {"first_bucket_mb", bucket_mb},
                       {"bucket_size", bucket_elements},
                       {"reduce_buffer_size", bucket_elements},
                       {"unit_numel", bucket_elements}});
    const bool whole = !find_strategy(chosen.strategy).main_copies;
    auto recipe = optimizer_recipe<Optimizer>(defaults, whole ? all_parameters : nullptr);
    return Training(make_training(chosen.strategy, std::move(model), std::move(recipe), group,
                                  {.options = chosen.options,
                                   .clip_grad = options.clip,
                                   .precision = options.precision,
                                   .communication_hook = options.hook}));
  }

  template <class... Arguments>
  auto forward(Arguments&&... arguments) {
    return training_.forward(std::forward<Arguments>(arguments)...);
  }
  void backward(const at::Tensor& loss_sum, double weight) { training_->backward(loss_sum, weight); }
  void shadow() { training_->joinable().shadow(); }
  operator Joinable&() { return training_->joinable(); }
  NoSync no_sync(bool accumulate) { return training_->no_sync(accumulate); }
  LoggingData logging_data() { return training_->logging_data().value(); }
  // Not for megatron.
  std::vector<std::vector<std::string>> buckets() const { return training_->buckets(); }
  void step() { training_->step(); }
  void zero_grad() { training_->zero_grad(); }
  // Call after an exception on this rank.
  void abandon_step() { training_->abandon_step(); }
  torch::optim::Optimizer& optimizer() { return training_->optimizer(); }

 private:
  explicit Training(shoal::Training<Module> training) : model(training.module()), training_(std::move(training)) {}

  static OptimizerRecipe::ParamGroups all_parameters(const torch::nn::Module& module) {
    OptimizerRecipe::ParamGroups groups;
    groups.emplace_back(distinct(module.parameters()));
    return groups;
  }

 public:
  std::shared_ptr<Module> model;

 private:
  shoal::Training<Module> training_;
};

}  // namespace shoal::test
