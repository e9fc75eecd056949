#pragma once
// Parts that the registry's strategies share.

#include <vector>

#include "engine/wrapper/join_access.h"
#include "shoal/training.h"

namespace shoal {

// Checks the arguments of make_training(), and collects them. Throws its errors. Not collective.
TrainingParts checked_parts(const std::string& strategy, std::shared_ptr<torch::nn::Module> module,
                            OptimizerRecipe recipe, const Group& group, const TrainingOptions& options);

// Without repetitions: libtorch lists a tied parameter under each of its names, and its optimizers update it as often.
std::vector<at::Tensor> distinct(const std::vector<at::Tensor>& tensors);

// The recipe's groups, or one group of all trainable parameters that are not ignored.
OptimizerRecipe::ParamGroups groups_of(const TrainingParts& parts);

// Adds a loss scaler, if precision requires one, to strategies that have none of their own.
class ScaledTraining : public TrainingCore {
 public:
  explicit ScaledTraining(const TrainingParts& parts) : TrainingCore(parts) {
    if (precision_.scaler) scaler_.emplace(*precision_.scaler);
  }
  at::Tensor scale_loss(const at::Tensor& loss) const override { return scaler_ ? scaler_->scale(loss) : loss; }
  GradScaler* loss_scaler() override { return scaler_ ? &*scaler_ : nullptr; }

 protected:
  TrainingState scaled(TrainingState state) {
    if (scaler_) state.with(*scaler_);
    return state;
  }

  std::optional<GradScaler> scaler_;
};

// Core of a wrapper without the module's type, for use with a forward of another object.
template <class Core>
class OpenCore : public Core {
 public:
  using Core::after_forward;
  using Core::before_forward;
  using Core::Core;
  using Core::forward_failed;
  using Core::precision;
};

// Training with a wrapper, through its OpenCore.
template <class Core, class Base>
class WrappedTraining : public Base {
 public:
  using Base::Base;

  using TrainingCore::backward;
  void backward(const at::Tensor& loss_sum, double weight) override {
    wrapper().backward(this->scale_loss(loss_sum), weight);
  }
  DataParallelCore* data_parallel() override {
    if constexpr (std::is_base_of_v<DataParallelCore, Core>) {
      return &wrapper();
    } else {
      return nullptr;
    }
  }
  NoSync no_sync(bool accumulate) override { return wrapper().no_sync(accumulate); }
  void abandon_step() override { wrapper().abandon_step(); }
  void abandon_failed_step() override {
    if constexpr (std::is_base_of_v<Joinable, Core>) {
      JoinAccess::settle(wrapper());
    } else {
      wrapper().abandon_step();
    }
  }
  std::string open_scope() const override { return wrapper().open_scope(); }
  std::optional<LoggingData> logging_data() const override { return wrapper().logging_data(); }
  std::vector<std::vector<std::string>> buckets() const override { return wrapper().buckets(); }
  void before_forward() override { wrapper().before_forward(); }
  void after_forward(const std::vector<at::Tensor>& outputs) override { wrapper().after_forward(outputs); }
  void forward_failed() override { wrapper().forward_failed(); }
  const Precision& precision() const override { return wrapper().precision(); }

 protected:
  virtual Core& wrapper() const = 0;
};

}  // namespace shoal
