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

// The optimizer of Python whose param groups a schedule changes.
struct Followed {
  SharedObject optimizer{};  // weak: the wrapper keeps it

  // Of a bucket's optimizer, whose groups have what a checkpoint has of the parameters in them.
  void write(const ParamGroups& loaded) const {
    if (!optimizer) return;
    const py::gil_scoped_acquire lock;
    const auto now = object_in(optimizer);
    if (now.is_none()) return;  // nobody can change its groups any more
    const auto list = now.attr("param_groups").cast<py::list>();
    for (size_t number = 0; number < loaded.size(); ++number) {
      if (loaded[number].params().empty()) continue;
      static_cast<const PythonOptions&>(loaded[number].options()).write_to(list[number].cast<py::dict>());
    }
  }

  void read(ParamGroups& own) const {
    if (!optimizer) return;
    const py::gil_scoped_acquire lock;
    const auto now = object_in(optimizer);
    if (now.is_none()) return;  // nobody can change its groups any more
    const auto list = now.attr("param_groups").cast<py::list>();
    for (size_t number = 0; number < own.size(); ++number) {
      const auto& kept = static_cast<const PythonOptions&>(own[number].options());
      own[number].set_options(std::make_unique<PythonOptions>(list[number].cast<py::dict>(), kept.optimizer()));
    }
  }
};

// Recipe of the buckets' optimizers, with the groups' present options, which each step reads again.
OptimizerRecipe recipe_of_buckets(const std::shared_ptr<Recipe>& recipe, const std::shared_ptr<Followed>& followed) {
  const auto groups = [recipe, followed](const torch::nn::Module&) {
    followed->read(recipe->groups);
    return recipe->groups;
  };
  const auto make = [recipe, followed](const ParamGroups& part) {
    auto made = recipe->make(part);
    static_cast<PythonOptimizer&>(*made).follow([followed](ParamGroups& own) { followed->read(own); });
    return made;
  };
  return {.groups = groups, .make = make};
}

class DecentralizedCore : public OpenCore<DecentralizedDataParallelCore> {
 public:
  DecentralizedCore(const std::shared_ptr<Mirror>& mirror, const std::shared_ptr<Recipe>& recipe, const Group& group,
                    const DecentralizedDataParallelOptions& options)
      : DecentralizedCore(mirror, recipe, group, options, std::make_shared<Followed>()) {}
  const std::shared_ptr<Mirror>& module() const { return mirror_; }

  // Takes options from the param groups of this optimizer from now on, when buckets are updated. Call it with the lock.
  void follow(const py::object& optimizer) {
    followed_->optimizer = share_weakly(optimizer);
    read_options();
  }
  // Takes them now.
  void read_options() {
    followed_->read(recipe_->groups);
    for (auto* optimizer : optimizers()) followed_->read(optimizer->param_groups());
  }
  // What was loaded into the buckets' optimizers goes to the optimizers of Python.
  void write_local() {
    for (auto* optimizer : optimizers()) {
      static_cast<PythonOptimizer&>(*optimizer).write();
      followed_->write(optimizer->param_groups());
    }
  }

 private:
  DecentralizedCore(const std::shared_ptr<Mirror>& mirror, const std::shared_ptr<Recipe>& recipe, const Group& group,
                    const DecentralizedDataParallelOptions& options, const std::shared_ptr<Followed>& followed)
      : OpenCore(mirror, recipe_of_buckets(recipe, followed), group, options),
        mirror_(mirror),
        recipe_(recipe),
        followed_(followed) {}

  std::shared_ptr<Mirror> mirror_;
  std::shared_ptr<Recipe> recipe_;
  std::shared_ptr<Followed> followed_;
};

}  // namespace

void bind_decentralized(py::module_& module) {
  py::class_<DecentralizedDataParallelCore, Held<DecentralizedDataParallelCore>>(module, "DecentralizedBase");
  py::class_<DecentralizedCore, DecentralizedDataParallelCore, Held<DecentralizedCore>> bound(
      module, "DecentralizedDataParallelCore");
  bound
      .def(py::init([](const std::shared_ptr<Mirror>& mirror, const py::list& groups, const py::dict& defaults,
                       const std::string& name, const py::object& make, const Group& group, const py::dict& given) {
        const auto options = decentralized_options(given, group.size());
        auto recipe = std::make_shared<Recipe>(recipe_of(groups, defaults, name, make, nullptr));
        return unlocked([&] { return Held<DecentralizedCore>(new DecentralizedCore(mirror, recipe, group, options)); });
      }))
      .def("follow", [](DecentralizedCore& core, const py::object& optimizer) { core.follow(optimizer); })
      .def("read_options", [](DecentralizedCore& core) { core.read_options(); })
      .def("before_loading", [](DecentralizedCore& core) { core.before_loading(); })
      .def("parameters_loaded", [](DecentralizedCore& core) { core.parameters_loaded(); })
      .def("scale_loss", [](const DecentralizedCore& core, const at::Tensor& loss) { return core.scale_loss(loss); })
      .def("global_avg", [](DecentralizedCore& core) { unlocked([&] { core.global_avg(); }); })
      .def("consensus_distance",
           [](DecentralizedCore& core) { return unlocked([&] { return core.consensus_distance(); }); })
      .def("step_without_update", [](DecentralizedCore& core) { unlocked([&] { core.step_without_update(); }); })
      .def("leave", [](DecentralizedCore& core) { unlocked([&] { core.leave(); }); })
      .def("check_gradients", [](const DecentralizedCore& core) { core.check_gradients(); })
      .def("last_norm", [](const DecentralizedCore& core) { return core.last_norm(); })
      .def("write_local", [](DecentralizedCore& core) { core.write_local(); });
  bind_parallel<DecentralizedCore>(bound);
}

}  // namespace shoal::python
