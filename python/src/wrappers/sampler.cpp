#include "shoal/data.h"

#include <limits>

#include "wrappers/bind.h"

namespace shoal::python {
namespace {

DistributedSamplerOptions sampler_options(const py::dict& given) {
  using O = DistributedSamplerOptions;
  return options_from<O>(given, "DistributedSampler", "shuffle", &O::shuffle, "seed", &O::seed, "drop_last",
                         &O::drop_last);
}

}  // namespace

void bind_sampler(py::module_& module) {
  using Sampler = DistributedSampler;
  py::class_<Sampler>(module, "DistributedSampler")
      .def(py::init([](size_t size, size_t num_replicas, size_t rank, const py::dict& given) {
        return std::make_unique<Sampler>(size, num_replicas, rank, sampler_options(given));
      }))
      .def("indices",
           [](const Sampler& sampler) {
             auto copy = sampler;  // as a data loader has
             copy.reset();
             return copy.next(std::numeric_limits<size_t>::max()).value_or(std::vector<size_t>());
           })
      .def("set_epoch", [](Sampler& sampler, size_t epoch) { sampler.set_epoch(epoch); })
      .def("seek", &Sampler::seek)
      .def("epoch", [](const Sampler& sampler) { return sampler.epoch(); })
      .def("num_samples", &Sampler::num_samples)
      .def("num_replicas", &Sampler::num_replicas)
      .def("rank", &Sampler::rank);
}

}  // namespace shoal::python
