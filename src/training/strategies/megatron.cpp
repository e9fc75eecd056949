// Strategy megatron.

#include "shoal/megatron.h"

#include "training/builtin.h"
#include "training/parts.h"
#include "training/wrapper_options.h"

namespace shoal {
namespace {

class Megatron : public TrainingCore {
 public:
  explicit Megatron(const TrainingParts& parts)
      : TrainingCore(parts),
        optimizer_({parts.module}, parts.recipe.groups ? groups_of(parts) : OptimizerRecipe::ParamGroups(),
                   parts.recipe.defaults->clone(), parts.recipe.make, parts.recipe.element_wise, parts.group,
                   megatron_options(parts.values, parts.options)) {}

  using TrainingCore::backward;
  void backward(const at::Tensor& loss_sum, double weight) override {
    optimizer_.backward(scale_loss(loss_sum), weight);
  }
  at::Tensor scale_loss(const at::Tensor& loss) const override { return optimizer_.scale_loss(loss); }
  NoSync no_sync(bool accumulate) override { return optimizer_.no_sync(accumulate); }
  bool step() override { return optimizer_.step().updated; }
  void abandon_step() override { optimizer_.abandon_step(); }
  void abandon_failed_step() override { JoinAccess::settle(optimizer_); }
  std::string open_scope() const override { return optimizer_.open_scope(); }
  Joinable& joinable() override { return optimizer_; }
  torch::optim::Optimizer& optimizer() override { return optimizer_; }
  std::vector<const torch::optim::Optimizer*> local_optimizers() const override {
    return {&optimizer_.local_optimizer()};
  }
  OptimizerState optimizer_state() override { return optimizer_.state_dict(); }
  std::optional<TrainingState> state() override { return TrainingState(optimizer_); }
  std::vector<at::Tensor> gradients() const override {
    std::vector<at::Tensor> list;
    for (const auto& parameter : distinct(module_->parameters())) {
      if (!parameter.requires_grad()) continue;
      if (auto grad = optimizer_.main_grad(parameter); grad.defined()) list.push_back(std::move(grad));
    }
    return list;
  }
  std::shared_ptr<void> full_parameters() override {
    optimizer_.finish_param_sync();
    return nullptr;
  }
  std::optional<LoggingData> logging_data() const override { return optimizer_.logging_data(); }

 private:
  DistributedOptimizerCore optimizer_;
};

void check_megatron(const OptionValues& values, const TrainingOptions& options, int, std::optional<int>) {
  check_hook_of_parts("megatron", values);
  megatron_options(values, options).validate();
}

}  // namespace

std::vector<Strategy> megatron_strategies() {
  return {{.name = "megatron",
           .help = "zero1 with equal ranges of contiguous gradient buffers",
           .options = megatron_option_list(),
           .main_copies = true,
           .logging_data = true,
           .elastic = true,
           .check = check_megatron,
           .make = [](const TrainingParts& parts) { return std::make_unique<Megatron>(parts); }}};
}

}  // namespace shoal
