#include "cli/strategies.h"

#include "cli/optimizers.h"
#include "engine/gradient_norm.h"
#include "shoal/base/error.h"
#include "shoal/strategy/ddp.h"
#include "shoal/strategy/megatron/distributed_optimizer.h"
#include "shoal/strategy/zero/sharded_ddp.h"

namespace shoal::cli {
namespace {

OptimizerKind::ParamGroups one_group(const models::Model& model) {
  OptimizerKind::ParamGroups groups;
  groups.emplace_back(model.parameters());
  return groups;
}

std::unique_ptr<OSSCore> make_oss(const TrainOptions& options, const models::Model& model, const Group& group) {
  auto kind = optimizer_kind(options.optimizer, options.lr);
  return std::make_unique<OSSCore>(one_group(model), std::move(kind.defaults), kind.make, group, OSSOptions());
}

// Every rank updates everything: alone, or with DistributedDataParallel's gradients.
class Replicated : public Strategy {
 public:
  Replicated(const TrainOptions& options, const std::shared_ptr<models::Model>& model)
      : Strategy(options, model), optimizer_(optimizer_kind(options.optimizer, options.lr).make(one_group(*model))) {}

  at::Tensor forward(const at::Tensor& input) override {
    const Precision::Scope scope(options_.precision(), at::kCPU);
    return model_->forward(input);
  }
  void backward(const at::Tensor& loss, bool) override { scaled(loss).backward(); }
  // Every rank has the same gradients, so all of them find the same.
  void step() override {
    const bool found = scaler_ && scaler_->unscale(gradients());
    if (scaler_) scaler_->update(found);
    if (found) return;
    if (options_.clip > 0) clip_to_norm(gradients(), local_norm(gradients(), 2), options_.clip);
    optimizer_->step();
  }
  void zero_grad() override { optimizer_->zero_grad(); }
  const torch::optim::Optimizer& local_optimizer() const override { return *optimizer_; }

 private:
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

 private:
  DistributedDataParallel<models::Model> parallel_;
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
  const torch::optim::Optimizer& local_optimizer() const override { return optimizer_->local_optimizer(); }

 private:
  std::unique_ptr<OSSCore> optimizer_;
  std::unique_ptr<Wrapper> parallel_;
};

class Megatron : public Strategy {
 public:
  Megatron(const TrainOptions& options, const std::shared_ptr<models::Model>& model, const Group& group)
      : Strategy(options, model) {
    auto kind = optimizer_kind(options.optimizer, options.lr);
    optimizer_ = std::make_unique<DistributedOptimizerCore>(DistributedOptimizerCore::Modules{model},
                                                            OptimizerKind::ParamGroups(), std::move(kind.defaults),
                                                            kind.make, kind.element_wise, group, options.megatron);
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
  const torch::optim::Optimizer& local_optimizer() const override { return optimizer_->local_optimizer(); }

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

std::vector<at::Tensor> Strategy::gradients() const {
  std::vector<at::Tensor> list;
  for (const auto& parameter : model_->parameters()) {
    if (parameter.grad().defined()) list.push_back(parameter.grad());
  }
  return list;
}

std::vector<std::string> strategy_names() {
  return {"ddp", "zero1", "zero2", "megatron", "none", "local"};
}

std::unique_ptr<Strategy> make_strategy(const TrainOptions& options, const std::shared_ptr<models::Model>& model,
                                        const Group& group) {
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
  if (options.strategy == "megatron") return std::make_unique<Megatron>(options, model, group);
  return std::make_unique<Replicated>(options, model);
}

}  // namespace shoal::cli
