#include "wrappers/python_optimizer.h"

#include <fmt/format.h>
#include <torch/serialize.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "comm/group/group_state.h"
#include "shoal/error.h"
#include "shoal/optimizer_state.h"

namespace shoal::python {
namespace {

// State that is one number also where the parameter is one.
const std::set<std::string> scalars{"step", "mu_product", "mu", "eta"};

py::object optimizer_in(const SharedObject& reference) {
  auto optimizer = object_in(reference);
  if (optimizer.is_none()) throw UsageError("the optimizer has been destroyed: keep it as long as it is in use");
  return optimizer;
}

// "AdamW" for torch.optim's classes; other names are complete.
std::string class_of(const py::object& optimizer) {
  const auto kind = py::type::of(optimizer);
  const auto module = py::str(kind.attr("__module__")).cast<std::string>();
  const auto name = py::str(kind.attr("__qualname__")).cast<std::string>();
  return module.starts_with("torch.optim") ? name : module + "." + name;
}

// State of one parameter: that of a Python optimizer, or one that was loaded and which it does not have yet.
class PythonState : public torch::optim::OptimizerParamState {
 public:
  explicit PythonState(NamedState loaded) : loaded_(std::move(loaded)) {}
  PythonState(SharedObject optimizer, SharedObject parameter, std::shared_ptr<NumberKinds> kinds)
      : optimizer_(std::move(optimizer)), parameter_(std::move(parameter)), kinds_(std::move(kinds)) {}

  std::unique_ptr<OptimizerParamState> clone() const override { return std::make_unique<PythonState>(*this); }
  bool is_loaded() const { return optimizer_ == nullptr; }
  bool is_of(const SharedObject& optimizer) const { return optimizer_ == optimizer; }
  // The dictionary of a Python optimizer, empty if it has none of this parameter. Call it with the lock.
  py::dict entry() const {
    const auto state = optimizer_in(optimizer_).attr("state").cast<py::dict>();
    return state.contains(*parameter_) ? state[*parameter_].cast<py::dict>() : py::dict();
  }

  NamedState read() const {
    if (is_loaded()) return loaded_;
    const py::gil_scoped_acquire lock;
    NamedState named;
    const auto state = optimizer_in(optimizer_).attr("state").cast<py::dict>();
    if (!state.contains(*parameter_)) return named;
    for (const auto& [key, value] : state[*parameter_].cast<py::dict>()) {
      const auto name = key.cast<std::string>();
      if (value.is_none()) continue;
      if (!THPVariable_Check(value.ptr())) {
        named.numbers[name] = number(value, name);
        (*kinds_)[name] = kind_of(value);
        continue;
      }
      const auto tensor = value.cast<at::Tensor>();
      if (tensor.dim() == 0 && (parameter_->cast<at::Tensor>().dim() > 0 || scalars.contains(name))) {
        named.numbers[name] = number(py::object(value.attr("item")()), name);
        (*kinds_)[name] = kind_of(value);
      } else {
        named.tensors[name] = tensor.detach();
      }
    }
    return named;
  }

 private:
  double number(const py::handle& value, const std::string& name) const {
    if (py::isinstance<py::float_>(value) || py::isinstance<py::int_>(value)) {
      if (const auto exact = exact_float(value)) return *exact;
      throw UsageError(fmt::format(
          "the state {} of the optimizer {} is {}, and shoal moves and saves numbers of state as floats, of "
          "which none is equal to it: keep it in a tensor of one dimension",
          name, class_of(optimizer_in(optimizer_)), py::str(value).cast<std::string>()));
    }
    throw UsageError(
        fmt::format("the state {} of the optimizer {} is a {}; shoal moves and saves tensors and numbers: use another "
                    "optimizer, or save the module alone, with save_module()",
                    name, class_of(optimizer_in(optimizer_)), Py_TYPE(value.ptr())->tp_name));
  }

  SharedObject optimizer_, parameter_;
  std::shared_ptr<NumberKinds> kinds_;
  NamedState loaded_;
};

// Loads a state into Python's, or copies of it. Numbers become what they are there already, or of the kinds that are
// known.
void load_into(const py::object& optimizer, const py::object& parameter, const NamedState& loaded,
               const NumberKinds& kinds, bool copy) {
  auto all = optimizer.attr("state");
  auto state = all[parameter].cast<py::dict>();  // a defaultdict
  py::dict fresh;
  for (const auto& [name, number] : loaded.numbers) {
    const auto key = py::str(name);
    const auto kind = kinds.find(name);
    fresh[key] = number_in_python(number, state.contains(key)   ? kind_of(py::object(state[key]))
                                          : kind != kinds.end() ? kind->second
                                                                : std::string());
  }
  for (const auto& [name, tensor] : loaded.tensors) fresh[py::str(name)] = py::cast(copy ? tensor.clone() : tensor);
  all[parameter] = fresh;
}

std::unique_ptr<PythonOptions> options_in(const py::object& optimizer, const py::dict& group) {
  return std::make_unique<PythonOptions>(group, class_of(optimizer));
}

}  // namespace

PythonOptimizer::PythonOptimizer(SharedObject object, OptionsOf options_of, std::unique_ptr<PythonOptions> defaults)
    : Optimizer(ParamGroups(), std::move(defaults)), python_(std::move(object)), options_of_(options_of) {
  for (const auto& entry : python().attr("param_groups")) {
    const auto group = entry.cast<py::dict>();
    param_groups_.emplace_back(group["params"].cast<std::vector<at::Tensor>>(), options_in(python(), group));
  }
  read_state();
}

std::unique_ptr<PythonOptimizer> PythonOptimizer::make(const ParamGroups& groups, const SharedObject& make,
                                                       std::shared_ptr<StepAgreement> agreement,
                                                       std::shared_ptr<NumberKinds> kinds) {
  const py::gil_scoped_acquire lock;
  py::list list;
  for (const auto& group : groups) {
    py::dict entry;
    py::list parameters;
    for (const auto& parameter : group.params()) parameters.append(py::cast(parameter));
    entry["params"] = parameters;
    if (group.has_options()) static_cast<const PythonOptions&>(group.options()).write_to(entry);
    list.append(entry);
  }
  const auto maker = object_in(make);
  if (maker.is_none()) throw UsageError("the optimizer has been destroyed: keep it as long as it is in use");
  auto python = maker(list);
  auto defaults = options_in(python, python.attr("defaults").cast<py::dict>());
  auto made = std::unique_ptr<PythonOptimizer>(
      new PythonOptimizer(share(std::move(python)), OptionsOf::libtorch, std::move(defaults)));
  made->agreement_ = std::move(agreement);
  made->kinds_ = std::move(kinds);
  return made;
}

std::unique_ptr<PythonOptimizer> PythonOptimizer::over(const py::object& optimizer) {
  auto defaults = options_in(optimizer, optimizer.attr("defaults").cast<py::dict>());
  return std::unique_ptr<PythonOptimizer>(
      new PythonOptimizer(share_weakly(optimizer), OptionsOf::python, std::move(defaults)));
}

py::object PythonOptimizer::python() const {
  return optimizer_in(python_);
}

at::Tensor PythonOptimizer::step(LossClosure) {
  if (!agreement_ || agreement_->before_commit()) {
    step_alone();
    if (agreement_) {  // one part of the parameters after the other
      const py::gil_scoped_acquire lock;
      require_state_of_parameters();
    }
    return {};
  }
  std::string failure;
  try {
    step_alone();
  } catch (const std::exception& error) {
    failure = error.what();
    failure_ = std::current_exception();
  }
  try {
    agreement_->meet(param_groups_, failure);
  } catch (const CommError&) {
    throw;
  } catch (const Error&) {
    if (!state_of(agreement_->group())->progress->failure.text().empty()) throw;
    if (!failure_) failure_ = std::current_exception();
  }
  return {};
}

void PythonOptimizer::raise_failure() {
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void PythonOptimizer::step_alone() {
  const py::gil_scoped_acquire lock;
  if (options_of_ == OptionsOf::libtorch) {
    if (source_) source_(param_groups_);
    write_parameters();
    write_options();
  } else {
    read_options();
  }
  write_state();
  const bool empty =
      std::all_of(param_groups_.begin(), param_groups_.end(), [](const auto& group) { return group.params().empty(); });
  if (!empty && source_) python().attr("step")();  // the program steps no other one
  if (!empty && !source_) py::module_::import("shoal.optim._state").attr("step_within")(python());
  read_state();
}

// A part of its parameters may take the place of all of them for a step, as in an elastic job.
void PythonOptimizer::write_parameters() {
  const auto groups = python().attr("param_groups").cast<py::list>();
  for (size_t number = 0; number < groups.size(); ++number) {
    const auto& parameters = param_groups_[number].params();
    const py::list present = groups[number].cast<py::dict>()["params"];
    const auto is_same = [&](size_t place) { return present[place].cast<at::Tensor>().is_same(parameters[place]); };
    bool same = present.size() == parameters.size();
    for (size_t place = 0; same && place < parameters.size(); ++place) same = is_same(place);
    if (same) continue;
    py::list list;
    for (const auto& parameter : parameters) list.append(py::cast(parameter));
    groups[number].cast<py::dict>()["params"] = list;
  }
}

void PythonOptimizer::read() {
  if (options_of_ == OptionsOf::python) read_options();
  read_state();
}

void PythonOptimizer::write() {
  write_options();
  write_state();
}

void PythonOptimizer::read_options() {
  const auto groups = python().attr("param_groups").cast<py::list>();
  if (groups.size() != param_groups_.size()) {
    throw UsageError("the optimizer has other param groups than at construction; construct it again");
  }
  for (size_t number = 0; number < groups.size(); ++number) {
    param_groups_[number].set_options(options_in(python(), groups[number].cast<py::dict>()));
  }
}

void PythonOptimizer::write_options() {
  const auto groups = python().attr("param_groups").cast<py::list>();
  for (size_t number = 0; number < groups.size(); ++number) {
    static_cast<const PythonOptions&>(param_groups_[number].options()).write_to(groups[number].cast<py::dict>());
  }
}

void PythonOptimizer::read_state() {
  const auto state = python().attr("state").cast<py::dict>();
  for (const auto& group : param_groups_) {
    for (const auto& parameter : group.params()) {
      auto& slot = state_[parameter.unsafeGetTensorImpl()];
      if (slot) continue;
      const auto object = py::cast(parameter);
      if (!state.contains(object)) {
        state_.erase(parameter.unsafeGetTensorImpl());
        continue;
      }
      slot = std::make_unique<PythonState>(python_, share(object), kinds_);
      known_[parameter.unsafeGetTensorImpl()] = share(object);
    }
  }
}

void PythonOptimizer::require_state_of_parameters() const {
  for (const auto& [key, value] : python().attr("state").cast<py::dict>()) {
    if (THPVariable_Check(key.ptr())) continue;
    throw UsageError(
        fmt::format("Elastic: the optimizer keeps state under {}, which is no parameter: keep it in param_groups, or "
                    "for each parameter",
                    py::repr(key).cast<std::string>()));
  }
}

// Numbers of a state that is loaded are what they would be in this optimizer, which may not have taken a step yet.
void PythonOptimizer::learn_kinds() {
  if (options_of_ == OptionsOf::libtorch || std::exchange(knows_kinds_, true)) return;
  const auto state = py::module_::import("shoal.optim._state");
  const auto kinds = state.attr("number_kinds")(state.attr("maker_of")(python()), python().attr("param_groups"));
  kinds_->merge(kinds.cast<NumberKinds>());
}

// State that C++ has set, dropped, or taken over from another Python optimizer.
void PythonOptimizer::write_state() {
  const auto state = python().attr("state").cast<py::dict>();
  // In an elastic job C++ keeps the state, in memory that ranks share, and Python has it for a step.
  const bool lends = agreement_ && agreement_->before_commit();
  for (auto known = known_.begin(); known != known_.end();) {
    const auto found = state_.find(known->first);
    const bool dropped =
        found == state_.end() || (lends && !static_cast<const PythonState&>(*found->second).is_of(python_));
    if (dropped) state.attr("pop")(*known->second, py::none());
    known = dropped ? known_.erase(known) : std::next(known);
  }
  for (const auto& group : param_groups_) {
    for (const auto& parameter : group.params()) {
      auto* key = parameter.unsafeGetTensorImpl();
      const auto found = state_.find(key);
      if (found == state_.end()) continue;
      const auto& held = static_cast<const PythonState&>(*found->second);
      if (held.is_of(python_)) continue;
      const auto object = py::cast(parameter);
      if (held.is_loaded()) {
        learn_kinds();
        load_into(python(), object, held.read(), *kinds_, /*copy=*/!lends);
      } else {
        state[object] = held.entry();  // of the optimizer that had this parameter before shares were made again
      }
      found->second = std::make_unique<PythonState>(python_, share(object), kinds_);
      known_[key] = share(object);
    }
  }
}

void register_python_state() {
  detail::add_state_kind(
      {[](const torch::optim::Optimizer& optimizer) {
         return dynamic_cast<const PythonOptimizer*>(&optimizer) != nullptr;
       },
       [](const torch::optim::OptimizerParamState& state) {
         return dynamic_cast<const PythonState*>(&state) != nullptr;
       },
       [](const torch::optim::OptimizerParamState& state) { return dynamic_cast<const PythonState&>(state).read(); },
       [](const NamedState& named, const std::string&) { return std::make_unique<PythonState>(named); }});
}

}  // namespace shoal::python
