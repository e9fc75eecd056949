// Construction: options, and what ranks agree on.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "engine/sharded/ownership.h"
#include "engine/wrapper/data_parallel_state.h"
#include "shoal/error.h"
#include "shoal/group.h"
#include "strategy/local_updates/state.h"

namespace shoal {

void LocalUpdatesOptions::validate() const {
  std::vector<std::string> faults;
  const auto require = [&](bool good, const char* name, double value, const char* wanted) {
    if (!good) faults.push_back(fmt::format("{} is {}: give {}", name, value, wanted));
  };
  const auto positive = [&](const char* name, double value) {
    require(value > 0 && std::isfinite(value), name, value, "a positive number");
  };
  const auto below_one = [&](const char* name, double value) {
    require(value >= 0 && value < 1, name, value, "a number from 0 to below 1");
  };
  const auto steps = [](int64_t number) { return static_cast<double>(number); };
  require(every >= 1, "every", steps(every), "at least 1 step");
  require(fragments >= 1 && fragments <= every, "fragments", fragments, "at least 1 and at most `every`");
  require(delay >= 0 && delay < every, "delay", steps(delay), "a number of steps from 0 to below `every`");
  require(warmup_steps >= 0, "warmup_steps", steps(warmup_steps), "0 or more");
  if (alpha) below_one("alpha", *alpha);
  if (const auto* slow = std::get_if<SlowMo>(&outer)) {
    positive("slow_lr", slow->slow_lr);
    below_one("slow_momentum", slow->slow_momentum);
  }
  if (const auto* nesterov = std::get_if<OuterNesterov>(&outer)) {
    positive("lr of OuterNesterov", nesterov->lr);
    below_one("momentum of OuterNesterov", nesterov->momentum);
  }
  if (reduce_dtype && *reduce_dtype != at::kFloat && *reduce_dtype != at::kBFloat16) {
    faults.push_back(fmt::format("reduce_dtype is {}: give float32 or bfloat16", c10::toString(*reduce_dtype)));
  }
  if (!faults.empty()) throw UsageError(fmt::format("LocalUpdates: {}", fmt::join(faults, "; ")));
}

std::vector<std::string> describe(const LocalUpdatesOptions& options) {
  const auto outer = [&] {
    if (const auto* slow = std::get_if<SlowMo>(&options.outer)) {
      return fmt::format("SlowMo with slow_lr {}, slow_momentum {}", slow->slow_lr, slow->slow_momentum);
    }
    if (const auto* nesterov = std::get_if<OuterNesterov>(&options.outer)) {
      return fmt::format("OuterNesterov with lr {}, momentum {}", nesterov->lr, nesterov->momentum);
    }
    return std::string("Averaging");
  };
  return {fmt::format("every {}", options.every),
          fmt::format("outer {}", outer()),
          fmt::format("fragments {}", options.fragments),
          fmt::format("delay {}", options.delay),
          options.alpha ? fmt::format("alpha {}", *options.alpha) : "alpha by default",
          fmt::format("warmup_steps {}", options.warmup_steps),
          fmt::format("reset_optimizer {}", options.reset_optimizer),
          fmt::format("average_buffers {}", options.average_buffers),
          fmt::format("reduce_dtype {}", options.reduce_dtype ? c10::toString(*options.reduce_dtype) : "by default")};
}

namespace {

// Param group of each of the optimizer's parameters.
std::map<const c10::TensorImpl*, size_t> groups_of(const torch::optim::Optimizer& optimizer) {
  std::map<const c10::TensorImpl*, size_t> groups;
  for (size_t i = 0; i < optimizer.param_groups().size(); ++i) {
    for (const auto& parameter : optimizer.param_groups()[i].params()) groups[parameter.unsafeGetTensorImpl()] = i;
  }
  return groups;
}

void check_parameters(const torch::nn::Module& module, const std::vector<NamedTensor>& trainable,
                      std::map<const c10::TensorImpl*, size_t> optimized, int fragments) {
  std::vector<std::string> faults;
  for (const auto& entry : trainable) {
    if (entry.tensor.is_complex()) {
      faults.push_back(
          fmt::format("parameter {} is complex: hold it as a real tensor with a last dimension of 2 "
                      "(view_as_real)",
                      entry.name));
    }
    if (optimized.count(entry.tensor.unsafeGetTensorImpl()) > 0) continue;
    faults.push_back(
        fmt::format("the optimizer does not have parameter {}: give it to the optimizer, freeze it, or name it in "
                    "`ignored`",
                    entry.name));
  }
  for (const auto& parameter : module.parameters()) optimized.erase(parameter.unsafeGetTensorImpl());
  if (!optimized.empty()) {
    faults.push_back(
        fmt::format("the optimizer has {} parameter(s) that do not belong to the module, so they would never be "
                    "exchanged; remove them",
                    optimized.size()));
  }
  if (fragments > static_cast<int>(trainable.size())) {
    faults.push_back(
        fmt::format("fragments is {}: the module has {} trainable parameters", fragments, trainable.size()));
  }
  if (!faults.empty()) throw UsageError(fmt::format("LocalUpdates: {}", fmt::join(faults, "; ")));
}

std::vector<Fragment> make_fragments(const std::vector<NamedTensor>& trainable,
                                     const torch::optim::Optimizer& optimizer, const LocalUpdatesOptions& options) {
  const auto param_groups = groups_of(optimizer);
  std::vector<at::Tensor> parameters;
  for (const auto& entry : trainable) parameters.push_back(entry.tensor);
  std::vector<int> owners(parameters.size(), -1);
  assign_owners(parameters, options.fragments, owners);
  std::vector<Fragment> fragments;
  for (int number = 0; number < options.fragments; ++number) {
    std::vector<Fragment::Piece> pieces;
    for (size_t i = 0; i < trainable.size(); ++i) {
      if (owners[i] != number) continue;
      const auto& entry = trainable[i];
      pieces.push_back({.name = entry.name,
                        .parameter = entry.tensor,
                        .param_group = param_groups.at(entry.tensor.unsafeGetTensorImpl())});
    }
    fragments.emplace_back(std::move(pieces), (number + 1) * options.every / options.fragments, options);
  }
  return fragments;
}

}  // namespace

LocalUpdates::State::State(std::shared_ptr<torch::nn::Module> of, torch::optim::Optimizer& inner, const Group& over,
                           ModuleTensors walked, const LocalUpdatesOptions& chosen)
    : module(std::move(of)), optimizer(inner), group(over), options(chosen), tensors(std::move(walked)) {
  const at::NoGradGuard no_grad;
  const auto trainable = tensors.trainable();
  check_parameters(*module, trainable, groups_of(optimizer), options.fragments);
  auto lines = describe(options);
  for (auto& line : rates()) lines.push_back(std::move(line));
  agree(group, "the options of LocalUpdates", lines);
  for (const auto& entry : trainable) exchanged.insert(entry.tensor.unsafeGetTensorImpl());
  fragments = make_fragments(trainable, optimizer, options);
  watch = ParameterWatch(parameters(), ParameterWatch::Versions::counted);
  set_steps(0);
}

// Without the last digits, in which schedules that began elsewhere may differ.
std::vector<std::string> LocalUpdates::State::rates() const {
  std::vector<std::string> lines;
  if (!std::holds_alternative<SlowMo>(options.outer)) return lines;
  for (size_t i = 0; i < optimizer.param_groups().size(); ++i) {
    lines.push_back(
        fmt::format("learning rate {:.12g} of param group {}", optimizer.param_groups()[i].options().get_lr(), i));
  }
  return lines;
}

void LocalUpdates::State::require_equal_rates() const {
  std::vector<double> values;
  for (const auto& param_group : optimizer.param_groups()) values.push_back(param_group.options().get_lr());
  const auto own = at::tensor(values, at::kDouble);
  const auto most = at::stack({own, -own});
  group.all_reduce(most, ReduceOp::max, {steps, -1, "learning rates"}).wait();
  if (at::allclose(most[0], -most[1], /*rtol=*/1e-9, /*atol=*/0)) return;
  agree(group, "learning rates of LocalUpdates with SlowMo (change them alike on every rank)", rates());
}

LocalUpdates::LocalUpdates(std::shared_ptr<torch::nn::Module> module, torch::optim::Optimizer& optimizer,
                           const Group& group, const LocalUpdatesOptions& options) {
  options.validate();
  auto wrapped = wrap(module, group, "LocalUpdates", options.ignored, /*sync=*/true);
  state_ = std::make_shared<State>(std::move(module), optimizer, group, std::move(wrapped->tensors), options);
}

}  // namespace shoal
