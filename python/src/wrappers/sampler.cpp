#include "shoal/data.h"

#include <torch/serialize.h>

#include <limits>
#include <sstream>

#include "wrappers/bind.h"

namespace shoal::python {
namespace {

using Sampler = DistributedSampler;

DistributedSamplerOptions sampler_options(const py::dict& given) {
  using O = DistributedSamplerOptions;
  return options_from<O>(given, "DistributedSampler", "shuffle", &O::shuffle, "seed", &O::seed, "drop_last",
                         &O::drop_last);
}

py::dict to_dict(const DistributedSamplerOptions& options) {
  py::dict dict;
  dict["shuffle"] = options.shuffle;
  dict["seed"] = options.seed;
  dict["drop_last"] = options.drop_last;
  return dict;
}

// What it is made of, and its place.
py::tuple state_of(const Sampler& sampler) {
  torch::serialize::OutputArchive archive;
  sampler.save(archive);
  std::ostringstream place;
  archive.save_to(place);
  return py::make_tuple(sampler.size(), sampler.num_replicas(), sampler.rank(), to_dict(sampler.options()),
                        py::bytes(place.str()));
}

std::unique_ptr<Sampler> from_state(const py::tuple& state) {
  auto sampler = std::make_unique<Sampler>(state[0].cast<size_t>(), state[1].cast<size_t>(), state[2].cast<size_t>(),
                                           sampler_options(state[3].cast<py::dict>()));
  std::istringstream place(state[4].cast<std::string>());
  torch::serialize::InputArchive archive;
  archive.load_from(place);
  sampler->load(archive);
  return sampler;
}

}  // namespace

void bind_sampler(py::module_& module) {
  py::class_<Sampler>(module, "DistributedSampler")
      .def(py::init([](size_t size, size_t num_replicas, size_t rank, const py::dict& given) {
        return std::make_unique<Sampler>(size, num_replicas, rank, sampler_options(given));
      }))
      .def("indices",
           [](const Sampler& sampler) {
             auto copy = sampler.clone();
             copy.reset();
             return copy.next(std::numeric_limits<size_t>::max()).value_or(std::vector<size_t>());
           })
      .def("set_epoch", [](Sampler& sampler, size_t epoch) { sampler.set_epoch(epoch); })
      .def("seek", &Sampler::seek)
      .def("epoch", [](const Sampler& sampler) { return sampler.epoch(); })
      .def("remaining", &Sampler::remaining)
      .def("num_replicas", &Sampler::num_replicas)
      .def("rank", &Sampler::rank)
      .def("options", [](const Sampler& sampler) { return to_dict(sampler.options()); })
      .def("set_options", [](Sampler& sampler, const py::dict& given) { sampler.set_options(sampler_options(given)); })
      .def("__copy__", &Sampler::clone)
      .def("__deepcopy__", [](const Sampler& sampler, const py::dict& /*memo*/) { return sampler.clone(); })
      .def(py::pickle(&state_of, &from_state));
}

}  // namespace shoal::python
