#include "shoal/join.h"

#include "engine/wrapper/join_access.h"
#include "shoal/megatron.h"
#include "wrappers/bind.h"

namespace shoal::python {
namespace {

// Several wrappers as one, since Python makes the list.
class Together : public Joinable {
 public:
  explicit Together(std::vector<Joinable*> joinables) : joinables_(std::move(joinables)) {
    for (const auto* one : joinables_) {
      if (one->group().name() != group().name()) {
        throw UsageError(fmt::format("Join: its wrappers have different groups, {} and {}; wrap them over the same one",
                                     group().name(), one->group().name()));
      }
    }
  }
  const Group& group() const override { return joinables_.front()->group(); }
  void shadow() override {
    for (auto* one : joinables_) one->shadow();
  }

 private:
  void check_shadow() const override {
    for (const auto* one : joinables_) JoinAccess::check_shadow(*one);
  }
  void settle() override {
    for (auto* one : joinables_) JoinAccess::settle(*one);
  }
  void set_join_state(const std::optional<JoinState>& state) override {
    for (auto* one : joinables_) JoinAccess::set_join_state(*one, state);
  }
  void broadcast_model(int rank) override {
    for (auto* one : joinables_) JoinAccess::broadcast_model(*one, rank);
  }

  std::vector<Joinable*> joinables_;
};

struct JoinScope {
  Together together;
  Join join;
  JoinScope(std::vector<Joinable*> joinables, const JoinOptions& options)
      : together(std::move(joinables)), join({together}, options) {}
};

Joinable* joinable_in(const py::handle& core) {
  if (py::isinstance<DataParallelCore>(core)) return core.cast<DataParallelCore*>();
  return core.cast<DistributedOptimizerCore*>();
}

}  // namespace

void bind_join(py::module_& module) {
  py::class_<JoinScope, Held<JoinScope>>(module, "Join")
      .def(py::init([](const py::list& cores, const py::dict& given) {
             JoinOptions options;
             Keywords(given, "Join")
                 .read("divide_by_initial_world_size", options.divide_by_initial_world_size)
                 .read("throw_on_early_termination", options.throw_on_early_termination)
                 .finish();
             std::vector<Joinable*> joinables;
             for (const auto& core : cores) joinables.push_back(joinable_in(core));
             return Held<JoinScope>(new JoinScope(std::move(joinables), options));
           }),
           py::keep_alive<1, 2>())
      .def("next",
           [](JoinScope& scope, bool has_batch) { return unlocked([&] { return scope.join.next(has_batch); }); })
      .def("active", [](const JoinScope& scope) { return scope.join.active(); })
      .def("active_ranks", [](const JoinScope& scope) { return scope.join.active_ranks(); });
  module.def("shadow", [](const py::object& core) {
    auto* joinable = joinable_in(core);
    unlocked([&] { joinable->shadow(); });
  });
}

}  // namespace shoal::python
