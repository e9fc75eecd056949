#include "cli/strategies.h"

#include "shoal/base/error.h"
#include "shoal/strategy/ddp.h"

namespace shoal::cli {
namespace {

class Ddp : public Strategy {
 public:
  Ddp(const TrainOptions& options, const std::shared_ptr<models::Model>& model, const Group& group)
      : parallel_(model, group, options.ddp) {}

  at::Tensor forward(const at::Tensor& input) override { return parallel_.forward(input); }

  void backward(const at::Tensor& loss, bool last) override {
    const auto scope = parallel_.no_sync(!last);
    loss.backward();
  }

 private:
  DistributedDataParallel<models::Model> parallel_;
};

class Alone : public Strategy {
 public:
  explicit Alone(std::shared_ptr<models::Model> model) : model_(std::move(model)) {}
  at::Tensor forward(const at::Tensor& input) override { return model_->forward(input); }
  void backward(const at::Tensor& loss, bool) override { loss.backward(); }

 private:
  std::shared_ptr<models::Model> model_;
};

}  // namespace

std::vector<std::string> strategy_names() {
  return {"ddp", "none", "local"};
}

std::unique_ptr<Strategy> make_strategy(const TrainOptions& options, const std::shared_ptr<models::Model>& model,
                                        const Group& group) {
  if (options.strategy == "ddp") return std::make_unique<Ddp>(options, model, group);
  return std::make_unique<Alone>(model);
}

}  // namespace shoal::cli
