#pragma once
// All ranks of a local-update method in one process, from the papers' formulas.

#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/models.h"

namespace shoal::test {

// What an exchange makes of the shared values, given the mean of the ranks'; lr: the inner optimizer's.
using Outer = std::function<void(at::Tensor& shared, at::Tensor& momentum, const at::Tensor& mean, double lr)>;

inline Outer averaging() {
  return [](at::Tensor& shared, at::Tensor&, const at::Tensor& mean, double) { shared.copy_(mean); };
}

// Algorithm 1 of the SlowMo paper.
inline Outer slow_momentum(double alpha, double beta) {
  return [=](at::Tensor& shared, at::Tensor& momentum, const at::Tensor& mean, double lr) {
    momentum.copy_(beta * momentum + (shared - mean) / lr);
    shared.copy_(shared - alpha * lr * momentum);
  };
}

// DiLoCo's outer optimizer is PyTorch's SGD with the difference as gradient.
inline Outer outer_sgd(double lr, double momentum) {
  using Optimizers = std::map<c10::TensorImpl*, std::unique_ptr<torch::optim::SGD>>;
  return [=, all = std::make_shared<Optimizers>()](at::Tensor& shared, at::Tensor&, const at::Tensor& mean, double) {
    auto& optimizer = (*all)[shared.unsafeGetTensorImpl()];
    if (!optimizer) {
      optimizer = std::make_unique<torch::optim::SGD>(std::vector<at::Tensor>{shared},
                                                      torch::optim::SGDOptions(lr).momentum(momentum).nesterov(true));
    }
    shared.mutable_grad() = shared - mean;
    optimizer->step();
  };
}

// Two param groups, so that rates differ between parameters.
inline std::unique_ptr<torch::optim::Optimizer> two_rates(Mlp& model) {
  using torch::optim::SGDOptions;
  std::vector<at::Tensor> rest = model->second->parameters();
  for (const auto& parameter : model->third->parameters()) rest.push_back(parameter);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(model->first->parameters(), std::make_unique<SGDOptions>(SGDOptions(0.2).momentum(0.9)));
  groups.emplace_back(std::move(rest), std::make_unique<SGDOptions>(SGDOptions(0.1).momentum(0.9)));
  return std::make_unique<torch::optim::SGD>(groups, SGDOptions(0.1));
}

// A schedule.
inline void lower_rates(torch::optim::Optimizer& optimizer) {
  for (auto& group : optimizer.param_groups()) group.options().set_lr(0.97 * group.options().get_lr());
}

struct SimulationOptions {
  int64_t every = 1;
  Outer outer = averaging();
  std::vector<std::vector<std::string>> fragments{};  // names of parameters
  int64_t delay = 0;
  double alpha = 0;
  int64_t warmup = 0;
};

class Simulation {
 public:
  Simulation(int ranks, SimulationOptions options) : options_(std::move(options)) {
    for (int rank = 0; rank < ranks; ++rank) {
      models_.push_back(seeded(1));
      optimizers_.push_back(two_rates(models_.back()));
    }
    share();
  }

  // `idle`: a rank that does not update.
  void step(int64_t number, int idle = -1) {
    for (size_t rank = 0; rank < models_.size(); ++rank) {
      mean_loss(models_[rank]->forward(batch(static_cast<int>(rank), number))).backward();
    }
    const torch::NoGradGuard no_grad;
    if (steps_ < options_.warmup) average_gradients();
    for (size_t rank = 0; rank < models_.size(); ++rank) {
      if (static_cast<int>(rank) != idle) optimizers_[rank]->step();
      optimizers_[rank]->zero_grad();
    }
    ++steps_;
    if (steps_ == options_.warmup) share();
    exchange(steps_ - options_.warmup);
    for (auto& optimizer : optimizers_) lower_rates(*optimizer);
  }

  std::vector<at::Tensor> parameters(int rank) { return models_[rank]->parameters(); }

 private:
  struct Sent {
    int64_t arrives;
    std::string name;
    at::Tensor mean;
    double lr;
  };

  at::Tensor& parameter(size_t rank, const std::string& name) { return models_[rank]->named_parameters()[name]; }

  void share() {
    for (const auto& item : models_[0]->named_parameters()) {
      shared_[item.key()] = item.value().detach().clone();
      momentum_[item.key()] = at::zeros_like(shared_[item.key()]);
    }
  }
  void average_gradients() {
    for (const auto& item : models_[0]->named_parameters()) {
      auto sum = at::zeros_like(item.value());
      for (size_t rank = 0; rank < models_.size(); ++rank) sum += parameter(rank, item.key()).grad();
      for (size_t rank = 0; rank < models_.size(); ++rank) {
        parameter(rank, item.key()).mutable_grad() = sum / static_cast<double>(models_.size());
      }
    }
  }
  void exchange(int64_t step) {
    const auto count = static_cast<int64_t>(options_.fragments.size());
    for (int64_t p = 0; p < count; ++p) {
      const int64_t first = (p + 1) * options_.every / count;
      if (step < first || step % options_.every != first % options_.every) continue;
      for (const auto& name : options_.fragments[p]) {
        std::vector<at::Tensor> values;
        for (size_t rank = 0; rank < models_.size(); ++rank) values.push_back(parameter(rank, name));
        const auto& groups = optimizers_[0]->param_groups();
        const double lr = groups[name.rfind("first", 0) == 0 ? 0 : 1].options().get_lr();
        sent_.push_back({step + options_.delay, name, at::stack(values).mean(0), lr});
      }
    }
    for (; !sent_.empty() && sent_.front().arrives == step; sent_.pop_front()) {
      const auto& [arrives, name, mean, lr] = sent_.front();
      options_.outer(shared_[name], momentum_[name], mean, lr);
      for (size_t rank = 0; rank < models_.size(); ++rank) {
        auto& own = parameter(rank, name);
        own.copy_(options_.alpha * own + (1 - options_.alpha) * shared_[name]);
      }
    }
  }

  SimulationOptions options_;
  std::vector<Mlp> models_;
  std::vector<std::unique_ptr<torch::optim::Optimizer>> optimizers_;
  std::map<std::string, at::Tensor> shared_;
  std::map<std::string, at::Tensor> momentum_;
  std::deque<Sent> sent_;
  int64_t steps_ = 0;
};

}  // namespace shoal::test
