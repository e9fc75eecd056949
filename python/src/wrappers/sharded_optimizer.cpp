#include <ATen/record_function.h>

#include "engine/changes/operator_watch.h"
#include "wrappers/bind.h"

namespace shoal::python {
namespace {

PythonOptimizer& local_of(const ShardedOptimizerBase& optimizer) {
  return const_cast<PythonOptimizer&>(dynamic_cast<const PythonOptimizer&>(optimizer.local_optimizer()));
}

// Options from Python's param groups, which the user's schedules change.
void read_options(ShardedOptimizerBase& optimizer, const py::list& groups) {
  auto& own = optimizer.param_groups();
  if (groups.size() != own.size()) {
    throw UsageError("the optimizer's param groups were changed past add_param_group(); construct it again");
  }
  for (size_t number = 0; number < groups.size(); ++number) {
    const auto& now = static_cast<const PythonOptions&>(own[number].options());
    own[number].set_options(std::make_unique<PythonOptions>(groups[number].cast<py::dict>(), now.optimizer()));
  }
}

void write_options(ShardedOptimizerBase& optimizer, const py::list& groups) {
  for (size_t number = 0; number < groups.size(); ++number) {
    static_cast<const PythonOptions&>(optimizer.param_groups()[number].options())
        .write_to(groups[number].cast<py::dict>());
  }
}

// Gradients other than zero that are no stand-ins for reduced ones, under the numbers of their parameters.
std::vector<std::pair<size_t, at::Tensor>> gradients_by_hand(const ShardedOptimizerCore& optimizer) {
  std::vector<std::pair<size_t, at::Tensor>> found;
  size_t number = 0;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      const auto& gradient = parameter.grad();
      const bool plain = gradient.defined() && !is_watchable(gradient);
      if (plain && gradient.count_nonzero().item<int64_t>() > 0) found.emplace_back(number, gradient);
      ++number;
    }
  }
  return found;
}

// As torch.optim's. libtorch's also detaches what it drops, and PyTorch's profiler, told of an operator, reads the
// memory of its tensors, which stand-ins do not have.
void zero_grad(ShardedOptimizerBase& optimizer, bool set_to_none) {
  for (auto& group : optimizer.param_groups()) {
    for (auto& parameter : group.params()) {
      auto& gradient = parameter.mutable_grad();
      if (!gradient.defined()) continue;
      if (set_to_none) {
        gradient.reset();
      } else {
        const at::RecordFunctionGuard recorded(!is_watchable(gradient) && at::isRecordFunctionEnabled());
        if (gradient.grad_fn()) {
          gradient.detach_();
        } else {
          gradient.requires_grad_(false);  // of a view, which cannot be detached in place
        }
        gradient.zero_();
      }
    }
  }
}

}  // namespace

void bind_sharded_optimizer(py::module_& module) {
  py::class_<ShardedOptimizerBase, Held<ShardedOptimizerBase>>(module, "ShardedOptimizerBase")
      .def("step",
           [](ShardedOptimizerBase& optimizer) {
             const auto step = unlocked([&] { return optimizer.step(); });
             local_of(optimizer).raise_failure();
             return py::make_tuple(step.updated, step.grad_norm, step.num_zeros);
           })
      .def("zero_grad", [](ShardedOptimizerBase& optimizer,
                           bool set_to_none) { unlocked([&] { zero_grad(optimizer, set_to_none); }); })
      .def("read_options", &read_options)
      .def("write_options", &write_options)
      .def("know_kinds",
           [](ShardedOptimizerBase& optimizer, NumberKinds kinds) { local_of(optimizer).kinds().merge(kinds); })
      .def("write_local", [](ShardedOptimizerBase& optimizer) { local_of(optimizer).write(); })
      .def("local", [](ShardedOptimizerBase& optimizer) { return local_of(optimizer).python(); })
      .def("all_reduce_max", [](const ShardedOptimizerBase& optimizer, at::Tensor tensor) {
        unlocked([&] {
          optimizer.group().all_reduce(std::move(tensor), ReduceOp::max, {-1, -1, "inf or NaN in gradients"}).wait();
        });
      });
  py::class_<ShardedOptimizerCore, ShardedOptimizerBase, Held<ShardedOptimizerCore>>(module, "ShardedOptimizerCore")
      .def("scale_loss",
           [](const ShardedOptimizerCore& optimizer, const at::Tensor& loss) { return optimizer.scale_loss(loss); })
      .def("gradients_by_hand", &gradients_by_hand)
      .def("scale",
           [](const ShardedOptimizerCore& optimizer) {
             const auto* scaler = optimizer.scaler();
             return scaler == nullptr ? std::nullopt : std::optional(scaler->value());
           })
      .def("state_dict",
           [](const ShardedOptimizerCore& optimizer, std::optional<int> recipient) {
             return to_dict(unlocked([&] { return optimizer.state_dict(recipient); }));
           })
      .def("load_state_dict", [](ShardedOptimizerCore& optimizer, const py::dict& state) {
        const auto named = from_dict(state);
        unlocked([&] { optimizer.load_state_dict(named); });
        local_of(optimizer).write();
      });
}

}  // namespace shoal::python
