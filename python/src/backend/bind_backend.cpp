#include <fmt/format.h>
#include <pybind11/chrono.h>

#include <algorithm>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "backend/interrupts.h"
#include "bindings.h"
#include "comm/backend/backend.h"
#include "comm/membership/join_board.h"
#include "comm/rendezvous/launch_environment.h"
#include "shoal/error.h"
#include "shoal/world.h"

namespace shoal::python {
namespace {

int whole_seconds(std::chrono::milliseconds time) {
  constexpr int64_t most = int64_t{10} * 365 * 24 * 3600;  // "for ever" is a usual value, too
  return static_cast<int>(std::clamp<int64_t>((time.count() + 999) / 1000, 1, most));
}

Group join_world(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout,
                 const std::string& transport) {
  WorldOptions options;
  options.rank = rank;
  options.size = size;
  options.transport = transport;
  options.timeout_seconds = whole_seconds(timeout);
  options.rendezvous_timeout_seconds = options.timeout_seconds;
  options.while_waiting = run_signal_handlers;
  return init(store, options).group();
}

// Rank, size, and the store's address and port, as the launcher says; and how it said so.
auto find_place() {
  auto place = find_placement({}, process_environment());
  return std::make_tuple(place.rank, place.size, std::move(place.address), place.port, std::move(place.source));
}

// UsageError if variables that are left over make this rank a world of its own.
void refuse_leftover_rank() {
  refuse_contradiction(process_environment());
}

// Whether this process is to join an elastic job that runs already.
bool joins_a_job() {
  return find_join(process_environment()).number.has_value();
}

}  // namespace

void bind_backend(py::module_& module) {
  using ReleaseGil = py::call_guard<py::gil_scoped_release>;
  py::class_<Group>(module, "Group", "The ranks that communicate: the C++ class shoal::Group.")
      .def_property_readonly("rank", &Group::rank, "Rank of this process in the group.")
      .def_property_readonly("size", &Group::size, "Number of ranks.")
      .def_property_readonly("name", &Group::name)
      .def_property_readonly("transport", &Group::transport,
                             "\"host\", \"tcp\", \"host+tcp\", \"gloo\", \"identity\", ...")
      .def("subgroup", &Group::subgroup, py::arg("ranks"), py::arg("timeout") = py::none(), ReleaseGil(),
           "The group of some of this group's ranks. Collective over those ranks. timeout: of the wait for them.")
      .def("__repr__", [](const Group& group) {
        return fmt::format("<shoal.Group '{}', rank {} of {}, transport {}>", group.name(), group.rank(), group.size(),
                           group.transport());
      });
  module.def("join_world", &join_world, py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"),
             py::arg("transport"), ReleaseGil());
  module.def("find_place", &find_place);
  module.def("refuse_leftover_rank", &refuse_leftover_rank);
  module.def("joins_a_job", &joins_a_job);
  module.def("make_backend", &make_backend, py::arg("group"), py::arg("timeout"), ReleaseGil());
  module.def("group_of_backend", &group_of_backend, py::arg("backend"));
}

}  // namespace shoal::python
