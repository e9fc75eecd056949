#include "shoal/decentralized.h"

#include <algorithm>
#include <memory>

#include "wrappers/bind.h"

namespace shoal::python {
namespace {

DecentralizedDataParallelOptions decentralized_options(const py::dict& given, int ranks) {
  DecentralizedDataParallelOptions options;
  std::string topology = "one-peer-exp";
  int local_size = 1;
  uint64_t seed = 0;
  Keywords(given, "DecentralizedDataParallel")
      .with("topology", [&](const py::object& name) { topology = name.cast<std::string>(); })
      .read("topology_local_size", local_size)
      .read("seed", seed)
      .read("clip_grad", options.clip_grad)
      .with("scaler", [&](const py::object& scaler) { options.scaler = scaler_of(scaler); })
      .read("average_buffers", options.average_buffers)
      .read("ignored", options.ignored)
      .read("neighbour_timeout_seconds", options.neighbour_timeout_seconds)
      .read("bucket_cap_mb", options.bucket_cap_mb)
      .read("param_as_bucket_view", options.param_as_bucket_view)
      .read("exchange_dtype", options.exchange_dtype)
      .finish();
  options.topology = make_topology(topology, ranks, local_size, seed);
  return options;
}

// Makes the optimizer of a bucket: of the part of the param groups that is in it, with the groups' present options.
OptimizerOfNamed maker_of(std::shared_ptr<Recipe> recipe) {
  return [recipe = std::move(recipe)](const std::vector<NamedParameter>& named) {
    ParamGroups part;
    for (const auto& group : recipe->groups) {
      auto parameters = group.params();
      std::erase_if(parameters, [&](const at::Tensor& parameter) {
        return std::none_of(named.begin(), named.end(),
                            [&](const NamedParameter& entry) { return entry.parameter.is_same(parameter); });
      });
      part.emplace_back(std::move(parameters), group.options().clone());
    }
    return recipe->make(part);
  };
}

class DecentralizedCore : public OpenCore<DecentralizedDataParallelCore> {
 public:
  DecentralizedCore(const std::shared_ptr<Mirror>& mirror, const std::shared_ptr<Recipe>& recipe, const Group& group,
                    const DecentralizedDataParallelOptions& options)
      : OpenCore(mirror, maker_of(recipe), group, options), mirror_(mirror), recipe_(recipe) {}
  const std::shared_ptr<Mirror>& module() const { return mirror_; }

  // Options from Python's param groups: for the buckets' optimizers, and for those that the first step will make.
  void read_options(const py::list& groups) {
    read_options(groups, recipe_->groups);
    for (auto* optimizer : optimizers()) read_options(groups, optimizer->param_groups());
  }

 private:
  static void read_options(const py::list& groups, ParamGroups& own) {
    for (size_t number = 0; number < own.size(); ++number) {
      const auto& now = static_cast<const PythonOptions&>(own[number].options());
      own[number].set_options(std::make_unique<PythonOptions>(groups[number].cast<py::dict>(), now.optimizer()));
    }
  }

  std::shared_ptr<Mirror> mirror_;
  std::shared_ptr<Recipe> recipe_;
};

}  // namespace

void bind_decentralized(py::module_& module) {
  py::class_<DecentralizedDataParallelCore, Held<DecentralizedDataParallelCore>>(module, "DecentralizedBase");
  py::class_<DecentralizedCore, DecentralizedDataParallelCore, Held<DecentralizedCore>> bound(
      module, "DecentralizedDataParallelCore");
  bound
      .def(py::init([](const std::shared_ptr<Mirror>& mirror, const py::list& groups, const py::dict& defaults,
                       const std::string& name, py::object make, const Group& group, const py::dict& given) {
        const auto options = decentralized_options(given, group.size());
        auto recipe = std::make_shared<Recipe>(recipe_of(groups, defaults, name, std::move(make), nullptr));
        return unlocked([&] { return Held<DecentralizedCore>(new DecentralizedCore(mirror, recipe, group, options)); });
      }))
      .def("read_options", [](DecentralizedCore& core, const py::list& groups) { core.read_options(groups); })
      .def("scale_loss", [](const DecentralizedCore& core, const at::Tensor& loss) { return core.scale_loss(loss); })
      .def("global_avg", [](DecentralizedCore& core) { unlocked([&] { core.global_avg(); }); })
      .def("consensus_distance",
           [](DecentralizedCore& core) { return unlocked([&] { return core.consensus_distance(); }); })
      .def("pass_step", [](DecentralizedCore& core) { unlocked([&] { core.pass(); }); })
      .def("leave", [](DecentralizedCore& core) { unlocked([&] { core.leave(); }); })
      .def("last_norm", [](const DecentralizedCore& core) { return core.last_norm(); })
      .def("write_local", [](const DecentralizedCore& core) {
        for (auto* optimizer : core.optimizers()) static_cast<PythonOptimizer&>(*optimizer).write();
      });
  bind_parallel<DecentralizedCore>(bound);
}

}  // namespace shoal::python
