#pragma once
// Training of a model with two param groups under a strategy, to be saved and resumed.

#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "shoal/megatron.h"
#include "shoal/zero.h"
#include "tests/strategy/checkpoint/checkpoint_training.h"
#include "tests/support/models.h"

namespace shoal::test::param_groups_training {

using torch::optim::OptimizerParamGroup;
using torch::optim::SGD;
using torch::optim::SGDOptions;
using Groups = std::vector<OptimizerParamGroup>;

// Model with one optimizer under a strategy, and its training step.
struct Trained {
  Mlp model{nullptr};
  std::shared_ptr<void> wrapper, optimizer;
  torch::optim::Optimizer* whole = nullptr;  // the optimizer that schedulers and users see
  std::unique_ptr<TrainingState> state;
  std::function<void(int64_t step)> step;
  std::function<std::vector<at::Tensor>()> parameters;

  ~Trained() {
    step = nullptr;
    state.reset();
    wrapper.reset();
    optimizer.reset();
  }
};

template <class Forward, class Optimizer>
void step_by(Trained& trained, const Forward& forward, Optimizer* optimizer) {
  trained.step = [forward, optimizer](int64_t step) {
    mean_loss(forward(batch(group().rank(), step))).backward();
    optimizer->step();
    optimizer->zero_grad();
  };
}

template <class Local, class Options>
std::unique_ptr<Trained> start(const std::string& strategy, const Options& defaults,
                               const std::function<Groups(Mlp&)>& groups) {
  auto trained = std::make_unique<Trained>();
  auto model = trained->model = seeded(1);
  trained->parameters = [model] { return model->parameters(); };
  if (strategy == "ddp") {
    auto optimizer = std::make_shared<Local>(groups(model), defaults);
    auto parallel = std::make_shared<DistributedDataParallel<MlpImpl>>(model, group());
    trained->whole = optimizer.get();
    trained->state = std::make_unique<TrainingState>(*parallel, *optimizer);
    step_by(
        *trained, [raw = parallel.get()](const at::Tensor& x) { return raw->forward(x); }, optimizer.get());
    trained->wrapper = parallel, trained->optimizer = optimizer;
  } else if (strategy == "zero1") {
    auto optimizer = std::make_shared<OSS<Local>>(groups(model), defaults, group());
    auto parallel = std::make_shared<DistributedDataParallel<MlpImpl>>(model, group());
    trained->whole = optimizer.get();
    trained->state = std::make_unique<TrainingState>(*parallel, *optimizer);
    step_by(
        *trained, [raw = parallel.get()](const at::Tensor& x) { return raw->forward(x); }, optimizer.get());
    trained->wrapper = parallel, trained->optimizer = optimizer;
  } else if (strategy == "megatron") {
    auto optimizer = std::make_shared<DistributedOptimizer<Local>>(DistributedOptimizerCore::Modules{model.ptr()},
                                                                   groups(model), defaults, group());
    trained->whole = optimizer.get();
    trained->state = std::make_unique<TrainingState>(*optimizer);
    step_by(
        *trained, [raw = model.ptr()](const at::Tensor& x) { return raw->forward(x); }, optimizer.get());
    trained->optimizer = optimizer;
  } else if (strategy == "local_updates") {
    auto optimizer = std::make_shared<Local>(groups(model), defaults);
    auto local = std::make_shared<LocalUpdates>(model, *optimizer, group(), LocalUpdatesOptions{.every = 2});
    trained->whole = optimizer.get();
    trained->state = std::make_unique<TrainingState>(*local);
    step_by(
        *trained, [raw = model.ptr()](const at::Tensor& x) { return raw->forward(x); }, local.get());
    trained->wrapper = local, trained->optimizer = optimizer;
  } else {
    auto parallel = std::make_shared<FullyShardedDataParallel<MlpImpl>>(
        model, group(), FullyShardedDataParallelOptions{.shard_by_parameter = !element_wise<Local>});
    auto optimizer = std::make_shared<FullyShardedOptimizer<Local>>(*parallel, groups(model), defaults);
    trained->whole = optimizer.get();
    trained->state = std::make_unique<TrainingState>(*parallel, *optimizer);
    step_by(
        *trained, [raw = parallel.get()](const at::Tensor& x) { return raw->forward(x); }, optimizer.get());
    trained->parameters = [raw = parallel.get(), model] {
      const auto all = raw->full_state_dict();
      std::vector<at::Tensor> list;
      for (const auto& entry : model->named_parameters()) list.push_back(all.at(entry.key()));
      return list;
    };
    trained->wrapper = parallel, trained->optimizer = optimizer;
  }
  return trained;
}

// Weights with the defaults, biases with their own options.
template <class Options>
std::function<Groups(Mlp&)> two_groups(const Options& of_biases) {
  return [=](Mlp& model) {
    std::vector<at::Tensor> weights, biases;
    for (const auto& parameter : model->parameters()) (parameter.dim() > 1 ? weights : biases).push_back(parameter);
    Groups groups;
    groups.emplace_back(weights);
    groups.emplace_back(biases, std::make_unique<Options>(of_biases));
    return groups;
  };
}

inline const SGDOptions fast = SGDOptions(0.1).momentum(0.9).weight_decay(0.2).nesterov(true);
inline const SGDOptions of_biases = SGDOptions(0.3).momentum(0.5).dampening(0.1);

}  // namespace shoal::test::param_groups_training
