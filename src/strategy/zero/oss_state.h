#pragma once
// What OSS keeps.

#include <memory>
#include <unordered_map>
#include <vector>

#include "engine/parameter_buffer.h"
#include "engine/sharded_state.h"
#include "shoal/strategy/zero/oss.h"

namespace shoal {

struct OSSCore::State {
  Factory make;
  Group group;
  OSSOptions options;
  std::vector<at::Tensor> parameters{};  // the trainable ones
  std::vector<size_t> indices{};         // their places among all parameters of all param groups
  std::vector<size_t> param_groups{};
  std::vector<int> owners{};
  std::unordered_map<const c10::TensorImpl*, size_t> places{};
  std::vector<std::unique_ptr<ParameterBuffer>> buffers{};  // one per dtype and device
  std::unique_ptr<torch::optim::Optimizer> local{};         // its param groups match the whole optimizer's
  int64_t step = 0;

  Label label(const char* what) const { return {step, -1, what}; }

  // Returns those that are new.
  std::vector<at::Tensor> list(const ParamGroups& groups);
  void fill_buffers();
  void make_local(const ParamGroups& groups);
  std::vector<at::Tensor> own_gradients() const;
  std::vector<StatePiece> pieces(const torch::nn::Module& module) const;
  // Every rank gets every share.
  void hand_out(const char* what);
};

}  // namespace shoal
