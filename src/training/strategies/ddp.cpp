// Strategy ddp.

#include "shoal/ddp.h"
#include "shoal/optimizer_in_backward.h"
#include "training/builtin.h"
#include "training/strategies/replicated.h"
#include "training/wrapper_options.h"

namespace shoal {
namespace {

class Ddp : public WrappedTraining<OpenCore<DistributedDataParallelCore>, ReplicatedTraining> {
 public:
  explicit Ddp(const TrainingParts& parts)
      : WrappedTraining(parts), parallel_(parts.module, parts.group, ddp_options(parts.values, parts.options)) {}

  Joinable& joinable() override { return parallel_; }
  std::optional<TrainingState> state() override { return scaled(TrainingState(parallel_, *optimizer_)); }

 protected:
  OpenCore<DistributedDataParallelCore>& wrapper() const override { return parallel_; }

  mutable OpenCore<DistributedDataParallelCore> parallel_;
};

WholeGradient whole_gradient(const std::string& text) {
  if (text == "stale") return WholeGradient::stale;
  return text == "per_bucket" ? WholeGradient::per_bucket : WholeGradient::exact;
}

// Variant that updates in backward, bucket by bucket.
class DdpInBackward : public Ddp {
 public:
  explicit DdpInBackward(const TrainingParts& parts)
      : Ddp(parts),
        inside_(parallel_, *optimizer_,
                {.clip_grad = parts.options.clip_grad,
                 .whole_gradient = whole_gradient(parts.values.text("optimizer_in_backward")),
                 .scaler = parts.options.precision.scaler}) {}

  at::Tensor scale_loss(const at::Tensor& loss) const override { return inside_.scale_loss(loss); }
  bool step() override { return true; }
  void zero_grad() override {}
  bool updates_in_backward() const override { return true; }
  std::optional<TrainingState> state() override {
    TrainingState state(parallel_, *optimizer_);
    if (auto* scaler = inside_.scaler()) state.with(*scaler);
    return state;
  }

 private:
  OptimizerInBackward inside_;
};

std::unique_ptr<TrainingCore> make_ddp(const TrainingParts& parts) {
  if (parts.values.text("optimizer_in_backward").empty()) return std::make_unique<Ddp>(parts);
  return std::make_unique<DdpInBackward>(parts);
}

void check_ddp(const OptionValues& values, const TrainingOptions& options, int, std::optional<int>) {
  ddp_options(values, options).validate();
}

}  // namespace

std::vector<Strategy> ddp_strategies() {
  auto options = ddp_option_list();
  options.push_back(
      {.name = "optimizer_in_backward",
       .help = "update each bucket's parameters during backward and free its gradients. With clipping and loss "
               "scaling: exact waits for the last gradient, stale uses the norm of the last step",
       .choices = {"exact", "stale", "per_bucket"},
       .implicit_value = "exact"});
  return {{.name = "ddp",
           .help = "gradients are averaged during backward",
           .options = std::move(options),
           .logging_data = true,
           .elastic = true,
           .check = check_ddp,
           .make = make_ddp}};
}

}  // namespace shoal
