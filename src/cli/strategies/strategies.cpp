#include "cli/strategies/strategies.h"

#include "cli/strategies/decentralized.h"
#include "cli/strategies/fsdp.h"
#include "cli/strategies/optimizers.h"
#include "engine/gradients/gradient_norm.h"
#include "engine/paging/operator_watch.h"
#include "shoal/ddp.h"
#include "shoal/error.h"
#include "shoal/local_sgd.h"
#include "shoal/megatron.h"
#include "shoal/optimizer_in_backward.h"
#include "shoal/zero.h"

namespace shoal::cli {
namespace {

std::unique_ptr<OSSCore> make_oss(const TrainOptions& options, const models::Model& model, const Group& group) {
  auto kind = optimizer_kind(options);
  return std::make_unique<OSSCore>(kind.groups(model), std::move(kind.defaults), kind.make, group, OSSOptions());
}

// Every rank updates everything: alone, or with DistributedDataParallel's gradients.
class Replicated : public Strategy {
 public:
  Replicated(const TrainOptions& options, const std::shared_ptr<models::Model>& model) : Strategy(options, model) {
    const auto kind = optimizer_kind(options);
    optimizer_ = kind.make(kind.groups(*model));
  }

  at::Tensor forward(const at::Tensor& input) override {
    const Precision::Scope scope(options_.precision(), at::kCPU);
    return model_->forward(input);
  }
  void backward(const at::Tensor& loss, bool) override { scaled(loss).backward(); }
  // Where every rank has the same gradients, all of them find the same.
  void step() override {
    const bool found = scaler_ && scaler_->unscale(gradients());
    if (scaler_) scaler_->update(found);
    if (!found && options_.clip > 0) clip_to_norm(gradients(), local_norm(gradients(), 2), options_.clip);
    update(!found);
  }
  void zero_grad() override { optimizer_->zero_grad(); }
  torch::optim::Optimizer& optimizer() override { return *optimizer_; }
  std::vector<const torch::optim::Optimizer*> local_optimizers() const override { return {optimizer_.get()}; }
  std::optional<TrainingState> training_state(const Group& group) override {
    if (options_.strategy == "local") return std::nullopt;
    return scaled(TrainingState(model_, *optimizer_, group));
  }

 protected:
  // With gradients that are finite, or not.
  virtual void update(bool finite) {
    if (finite) optimizer_->step();
  }

  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

class Ddp : public Replicated {
 public:
  Ddp(const TrainOptions& options, const std::shared_ptr<models::Model>& model, const Group& group)
      : Replicated(options, model), parallel_(model, group, options.ddp) {}

  at::Tensor forward(const at::Tensor& input) override { return parallel_.forward(input); }
  void backward(const at::Tensor& loss, bool last) override {
    const auto scope = parallel_.no_sync(!last);
    scaled(loss).backward();
  }
  std::optional<TrainingState> training_state(const Group&) override {
    return scaled(TrainingState(parallel_, *optimizer_));
  }
  std::optional<LoggingData> logging_data() const override { return parallel_.logging_data(); }

 protected:
  DistributedDataParallel<models::Model> parallel_;
};

// Backward updates, bucket by bucket.
class DdpInBackward : public Ddp {
 public:
  DdpInBackward(const TrainOptions& options, const std::shared_ptr<models::Model>& model, const Group& group)
      : Ddp(options, model, group),
        inside_(parallel_, *optimizer_,
                {.clip_grad = options.clip,
                 .whole_gradient = options.whole_gradient(),
                 .scaler = options.precision().scaler}) {}

  void backward(const at::Tensor& loss, bool last) override {
    const auto scope = parallel_.no_sync(!last);
    inside_.scale_loss(loss).backward();
  }
  void step() override {}
  void zero_grad() override {}
  std::optional<TrainingState> training_state(const Group&) override {
    TrainingState training(parallel_, *optimizer_);
    if (auto* scaler = inside_.scaler()) training.with(*scaler);
    return training;
  }

 private:
  OptimizerInBackward inside_;
};

// local_sgd, slowmo, diloco. What is evaluated and saved is the mean of the ranks' parameters.
class WithLocalUpdates : public Replicated {
 public:
  WithLocalUpdates(const TrainOptions& options, const std::shared_ptr<models::Model>& model, const Group& group)
      : Replicated(options, model), local_(model, *optimizer_, group, options.local_updates) {}

  void zero_grad() override { local_.zero_grad(); }
  std::shared_ptr<void> whole_parameters() override {
    return std::make_shared<MeanParameters>(local_.mean_parameters());
  }
  std::optional<TrainingState> training_state(const Group&) override { return scaled(TrainingState(local_)); }

 private:
  void update(bool finite) override { local_.step(finite); }

  LocalUpdates local_;
};

// A wrapper over an OSS.
template <class Wrapper>
class Zero : public Strategy {
 public:
  template <class Make>
  Zero(const TrainOptions& options, const std::shared_ptr<models::Model>& model, const Group& group, const Make& make)
      : Strategy(options, model), optimizer_(make_oss(options, *model, group)), parallel_(make(*optimizer_)) {}

  at::Tensor forward(const at::Tensor& input) override { return parallel_->forward(input); }
  void backward(const at::Tensor& loss, bool last) override {
    const auto scope = parallel_->no_sync(!last);
    scaled(loss).backward();
  }
  void step() override {
    if (scaler_) {
      optimizer_->step(*scaler_, options_.clip);
      return;
    }
    if (options_.clip > 0) optimizer_->clip_grad_norm(options_.clip);
    optimizer_->step();
  }
  void zero_grad() override { optimizer_->zero_grad(); }
  torch::optim::Optimizer& optimizer() override { return *optimizer_; }
  std::vector<const torch::optim::Optimizer*> local_optimizers() const override {
    return {&optimizer_->local_optimizer()};
  }
  std::optional<TrainingState> training_state(const Group&) override {
    return scaled(TrainingState(*parallel_, *optimizer_));
  }
  std::optional<LoggingData> logging_data() const override { return parallel_->logging_data(); }

 private:
  std::unique_ptr<OSSCore> optimizer_;
  std::unique_ptr<Wrapper> parallel_;
};

class Megatron : public Strategy {
 public:
  Megatron(const TrainOptions& options, const std::shared_ptr<models::Model>& model, const Group& group)
      : Strategy(options, model) {
    auto kind = optimizer_kind(options);
    optimizer_ = std::make_unique<DistributedOptimizerCore>(DistributedOptimizerCore::Modules{model},
                                                            kind.groups(*model), std::move(kind.defaults), kind.make,
                                                            kind.element_wise, group, options.megatron);
  }

  at::Tensor forward(const at::Tensor& input) override { return model_->forward(input); }
  void backward(const at::Tensor& loss, bool last) override {
    const auto scope = optimizer_->no_sync(!last);
    optimizer_->scale_loss(loss).backward();
  }
  void step() override { optimizer_->step(); }
  void zero_grad() override { optimizer_->zero_grad(); }
  std::vector<at::Tensor> gradients() const override {
    std::vector<at::Tensor> list;
    for (const auto& parameter : model_->parameters()) list.push_back(optimizer_->main_grad(parameter));
    std::erase_if(list, [](const at::Tensor& tensor) { return !tensor.defined(); });
    return list;
  }
  torch::optim::Optimizer& optimizer() override { return *optimizer_; }
  std::vector<const torch::optim::Optimizer*> local_optimizers() const override {
    return {&optimizer_->local_optimizer()};
  }
  std::optional<TrainingState> training_state(const Group&) override { return TrainingState(*optimizer_); }
  std::optional<LoggingData> logging_data() const override { return optimizer_->logging_data(); }

 private:
  std::unique_ptr<DistributedOptimizerCore> optimizer_;
};

}  // namespace

Strategy::Strategy(const TrainOptions& options, std::shared_ptr<models::Model> model)
    : options_(options), model_(std::move(model)) {
  if (const auto scaler = options.precision().scaler) scaler_.emplace(*scaler);
}

at::Tensor Strategy::scaled(const at::Tensor& loss) const {
  return scaler_ ? scaler_->scale(loss) : loss;
}

std::optional<TrainingState> Strategy::scaled(TrainingState training) {
  if (scaler_) training.with(*scaler_);
  return training;
}

std::vector<at::Tensor> Strategy::gradients() const {
  std::vector<at::Tensor> list;
  for (const auto& parameter : model_->parameters()) {
    const auto& grad = parameter.grad();
    if (grad.defined() && !is_watchable(grad)) list.push_back(grad);  // a stand-in has no memory
  }
  return list;
}

std::vector<std::string> strategy_names() {
  return {"ddp",       "zero1",  "zero2",  "megatron",      "fsdp",          "fsdp_grad_op", "hybrid",
          "local_sgd", "slowmo", "diloco", "decentralized", "hybrid_gossip", "none",         "local"};
}

std::unique_ptr<Strategy> make_strategy(const TrainOptions& options, const std::shared_ptr<models::Model>& model,
                                        const Group& group, int64_t total_steps) {
  if (!options.optimizer_in_backward.empty()) return std::make_unique<DdpInBackward>(options, model, group);
  if (options.strategy == "ddp") return std::make_unique<Ddp>(options, model, group);
  if (options.strategy == "zero1") {
    using Wrapper = DistributedDataParallel<models::Model>;
    return std::make_unique<Zero<Wrapper>>(
        options, model, group, [&](OSSCore&) { return std::make_unique<Wrapper>(model, group, options.ddp); });
  }
  if (options.strategy == "zero2") {
    using Wrapper = ShardedDataParallel<models::Model>;
    return std::make_unique<Zero<Wrapper>>(options, model, group, [&](OSSCore& optimizer) {
      return std::make_unique<Wrapper>(model, optimizer, group, options.zero2);
    });
  }
  if (options.strategy == "decentralized") return make_decentralized(options, model, group, total_steps);
  if (options.strategy == "megatron") return std::make_unique<Megatron>(options, model, group);
  if (auto fsdp = make_fsdp(options, model, group)) return fsdp;
  if (options.takes_local_updates()) return std::make_unique<WithLocalUpdates>(options, model, group);
  return std::make_unique<Replicated>(options, model);
}

}  // namespace shoal::cli
