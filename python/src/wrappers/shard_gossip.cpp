#include "shoal/shard_gossip.h"

#include "wrappers/bind.h"

namespace shoal::python {
namespace {

ShardGossipOptions gossip_options(const py::dict& given, int hosts) {
  ShardGossipOptions options;
  Keywords(given, "ShardGossipOptimizer")
      .with("topology",
            [&](const py::object& name) {
              if (!name.is_none()) options.topology = make_topology(name.cast<std::string>(), hosts);
            })
      .read("overlap", options.overlap)
      .read("neighbour_timeout_seconds", options.neighbour_timeout_seconds)
      .read("bucket_cap_mb", options.bucket_cap_mb)
      .read("exchange_dtype", options.exchange_dtype)
      .finish();
  return options;
}

FullyShardedOptimizerOptions gossip_optimizer_options(double clip_grad, const py::object& scaler) {
  FullyShardedOptimizerOptions options;
  options.clip_grad = clip_grad;
  options.scaler = scaler_of(scaler);
  return options;
}

}  // namespace

void bind_shard_gossip(py::module_& module) {
  module.def("host_groups", [](const Group& group, std::optional<int> size) {
    auto groups = unlocked([&] { return host_groups(group, size); });
    return py::make_tuple(std::move(groups.inside), std::move(groups.across));
  });
  using Core = ShardGossipOptimizerCore;
  py::class_<Core, FullyShardedOptimizerCore, Held<Core>>(module, "ShardGossipOptimizerCore")
      .def(py::init([](FullyShardedCore& parallel, const Group& across, const py::list& groups,
                       const py::dict& defaults, const std::string& name, const py::object& make, bool element_wise,
                       double clip_grad, const py::object& scaler, const py::dict& given) {
             const auto gossip = gossip_options(given, across.size());
             const auto options = gossip_optimizer_options(clip_grad, scaler);
             auto recipe = recipe_of(groups, defaults, name, make,
                                     std::make_shared<StepAgreement>(parallel.group(), "ShardGossipOptimizer"));
             return unlocked([&] {
               return Held<Core>(new Core(parallel, std::move(recipe.groups), std::move(recipe.defaults), recipe.make,
                                          element_wise, across, gossip, options));
             });
           }),
           py::keep_alive<1, 2>())
      .def("step_without_update", [](Core& core) { unlocked([&] { core.step_without_update(); }); })
      .def("global_avg", [](Core& core) { unlocked([&] { core.global_avg(); }); })
      .def(
          "mean_parameters",
          [](Core& core) {
            return unlocked([&] { return Held<MeanParameters>(new MeanParameters(core.mean_parameters())); });
          },
          py::keep_alive<0, 1>())
      .def("consensus_distance", [](Core& core) { return unlocked([&] { return core.consensus_distance(); }); })
      .def("leave", [](Core& core) { unlocked([&] { core.leave(); }); });
}

}  // namespace shoal::python
