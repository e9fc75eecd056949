// Strategies zero1 and zero2.

#include "shoal/zero.h"

#include "training/builtin.h"
#include "training/parts.h"
#include "training/wrapper_options.h"

namespace shoal {
namespace {

// A wrapper around an OSS optimizer.
template <class Core>
class Zero : public WrappedTraining<OpenCore<Core>, ScaledTraining> {
 public:
  // make: makes the wrapper from the module and the optimizer.
  template <class Make>
  Zero(const TrainingParts& parts, const Make& make)
      : WrappedTraining<OpenCore<Core>, ScaledTraining>(parts),
        optimizer_(groups_of(parts), parts.recipe.defaults->clone(), parts.recipe.make, parts.recipe.element_wise,
                   parts.group, OSSOptions()),
        parallel_(make(optimizer_)) {}

  bool step() override {
    if (this->scaler_) return optimizer_.step(*this->scaler_, this->clip_grad_);
    if (!std::exchange(clipped_, false)) clip();
    optimizer_.step();
    return true;
  }
  void prepare_step() override {
    clip();
    clipped_ = true;
  }
  Joinable& joinable() override { return *parallel_; }
  torch::optim::Optimizer& optimizer() override { return optimizer_; }
  std::vector<const torch::optim::Optimizer*> local_optimizers() const override {
    return {&optimizer_.local_optimizer()};
  }
  OptimizerState optimizer_state() override { return optimizer_.state_dict(*this->module_); }
  std::optional<TrainingState> state() override { return this->scaled(TrainingState(*parallel_, optimizer_)); }

 protected:
  OpenCore<Core>& wrapper() const override { return *parallel_; }

 private:
  void clip() {
    if (this->clip_grad_ > 0) optimizer_.clip_grad_norm(this->clip_grad_);
  }

  bool clipped_ = false;  // by prepare_step()
  OSSCore optimizer_;     // must outlive the wrapper
  std::unique_ptr<OpenCore<Core>> parallel_;
};

std::unique_ptr<TrainingCore> make_zero1(const TrainingParts& parts) {
  using Core = DistributedDataParallelCore;
  return std::make_unique<Zero<Core>>(parts, [&](OSSCore&) {
    return std::make_unique<OpenCore<Core>>(parts.module, parts.group, ddp_options(parts.values, parts.options));
  });
}

std::unique_ptr<TrainingCore> make_zero2(const TrainingParts& parts) {
  using Core = ShardedDataParallelCore;
  return std::make_unique<Zero<Core>>(parts, [&](OSSCore& optimizer) {
    return std::make_unique<OpenCore<Core>>(parts.module, std::vector<OSSCore*>{&optimizer}, parts.group,
                                            zero2_options(parts.values, parts.options));
  });
}

}  // namespace

std::vector<Strategy> zero_strategies() {
  return {{.name = "zero1",
           .help = "ddp with sharded optimizer state",
           .options = ddp_option_list(),
           .logging_data = true,
           .elastic = true,
           .check = [](const OptionValues& values, const TrainingOptions& options, int,
                       std::optional<int>) { ddp_options(values, options).validate(); },
           .make = make_zero1},
          {.name = "zero2",
           .help = "zero1 with sharded gradients",
           .options = zero2_option_list(),
           .logging_data = true,
           .elastic = true,
           .check =
               [](const OptionValues& values, const TrainingOptions& options, int, std::optional<int>) {
                 check_hook_of_parts("zero2", values);
                 zero2_options(values, options).validate();
               },
           .make = make_zero2}};
}

}  // namespace shoal
