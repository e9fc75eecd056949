#pragma once
// Decentralised training of all ranks in one process, with whole matrices.

#include <torch/nn/module.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <functional>
#include <memory>
#include <vector>

#include "shoal/topology.h"

namespace shoal::test {

template <class Module>
class Simulation {
 public:
  Simulation(Topology topology, const std::function<std::shared_ptr<Module>()>& make,
             const torch::optim::SGDOptions& options)
      : topology_(std::move(topology)) {
    for (int rank = 0; rank < topology_.size(); ++rank) {
      models_.push_back(make());
      optimizers_.push_back(std::make_unique<torch::optim::SGD>(distinct_parameters(rank), options));
    }
  }

  Module& model(int rank) { return *models_[rank]; }

  // Computes every rank's gradient of `loss` at its own parameters, then the exchange that the last step began, then
  // updates.
  void step(const std::function<at::Tensor(Module&, int rank)>& loss) {
    for (size_t rank = 0; rank < models_.size(); ++rank) {
      const auto value = loss(*models_[rank], static_cast<int>(rank));
      if (value.defined()) value.backward();
    }
    finish_step();
  }
  // Uses the gradients that are defined; a rank without any only mixes.
  void finish_step() {
    if (steps_ > 0) mix(topology_.round(steps_));
    for (auto& optimizer : optimizers_) {
      optimizer->step();
      optimizer->zero_grad();
    }
    ++steps_;
  }

  // Everybody gets the mean; a step of the topology.
  void average() {
    const torch::NoGradGuard no_grad;
    for_each_parameter([](at::Tensor& rows) { rows.copy_(rows.mean(0, true).expand_as(rows)); });
    ++steps_;
  }

  // sqrt(mean over ranks of the squared distance to the mean).
  double consensus_distance() {
    double sum = 0;
    for_each_parameter([&](at::Tensor& rows) {
      sum += (rows - rows.mean(0, true)).pow(2).sum().template item<double>() / static_cast<double>(models_.size());
    });
    return std::sqrt(sum);
  }

 private:
  std::vector<at::Tensor> distinct_parameters(int rank) const {
    std::vector<at::Tensor> list;
    for (const auto& parameter : models_[rank]->parameters()) {
      const bool seen =
          std::any_of(list.begin(), list.end(), [&](const at::Tensor& t) { return t.is_same(parameter); });
      if (!seen && parameter.requires_grad()) list.push_back(parameter);
    }
    return list;
  }

  // Calls act(rows), one row per rank, for every parameter; what it writes there goes back.
  void for_each_parameter(const std::function<void(at::Tensor&)>& act) {
    const torch::NoGradGuard no_grad;
    for (size_t p = 0; p < distinct_parameters(0).size(); ++p) {
      std::vector<at::Tensor> list;
      for (size_t rank = 0; rank < models_.size(); ++rank) {
        list.push_back(distinct_parameters(static_cast<int>(rank))[p].flatten());
      }
      auto rows = at::stack(list);
      act(rows);
      for (size_t rank = 0; rank < models_.size(); ++rank) {
        auto parameter = distinct_parameters(static_cast<int>(rank))[p];
        parameter.copy_(rows[static_cast<int64_t>(rank)].view_as(parameter));
      }
    }
  }

  void mix(const MixingRound& round) {
    const auto n = static_cast<int>(models_.size());
    auto matrix = at::zeros({n, n}, at::kDouble);
    for (int i = 0; i < n; ++i) {
      matrix[i][i] = round.self(i);
      for (const auto& [j, weight] : round.sources(i)) matrix[i][j] = weight;
    }
    for_each_parameter([&](at::Tensor& rows) { rows.copy_(at::matmul(matrix, rows.to(at::kDouble))); });
  }

  Topology topology_;
  std::vector<std::shared_ptr<Module>> models_;
  std::vector<std::unique_ptr<torch::optim::SGD>> optimizers_;
  int64_t steps_ = 0;
};

}  // namespace shoal::test
