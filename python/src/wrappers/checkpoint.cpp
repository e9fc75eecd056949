#include "shoal/checkpoint.h"

#include <exception>
#include <utility>

#include "checkpoint/on_all_ranks.h"
#include "engine/checkpoint/training_state.h"
#include "shoal/ddp.h"
#include "shoal/decentralized.h"
#include "shoal/fsdp.h"
#include "shoal/local_updates.h"
#include "shoal/megatron.h"
#include "shoal/shard_gossip.h"
#include "shoal/zero.h"
#include "wrappers/bind.h"

namespace shoal::python {
namespace {

// A TrainingState, and the Python optimizer in it where every rank has the whole one.
struct Training {
  std::unique_ptr<PythonOptimizer> optimizer{};
  TrainingState state;
};

std::string position_of(const py::object& position) {
  if (py::isinstance<py::bytes>(position)) return position.cast<std::string>();
  if (!py::isinstance<py::str>(position)) {
    throw UsageError("save: position must be text or bytes, not " +
                     py::type::of(position).attr("__name__").cast<std::string>());
  }
  const auto* text = PyUnicode_AsUTF8(position.ptr());
  if (text != nullptr) return position.cast<std::string>();
  PyErr_Clear();
  throw UsageError("save: position has characters that UTF-8 cannot encode, such as half a surrogate pair; give bytes");
}

SaveOptions save_options(const py::dict& given) {
  SaveOptions options;
  Keywords(given, "save")
      .read("step", options.step)
      .with("position",
            [&](const py::object& position) {
              if (!position.is_none()) options.position = position_of(position);
            })
      .read("keep_last", options.keep_last)
      .read("snapshot_mb", options.snapshot_mb)
      .finish();
  return options;
}

LoadOptions load_options(const py::dict& given) {
  LoadOptions options;
  Keywords(given, "load")
      .read("partial", options.partial)
      .read("model_only", options.model_only)
      .read("rates", options.rates)
      .read("options", options.options)
      .read("verify", options.verify)
      .finish();
  return options;
}

LoadModuleOptions load_module_options(const py::dict& given) {
  LoadModuleOptions options;
  Keywords(given, "load_module")
      .read("partial", options.partial)
      .with("prefix", [&](const py::object& prefix) { options.prefix = prefix.cast<std::string>(); })
      .read("verify", options.verify)
      .finish();
  return options;
}

py::dict to_dict(const Loaded& loaded) {
  py::dict dict;
  dict["path"] = py::reinterpret_steal<py::object>(PyUnicode_DecodeFSDefault(loaded.path.c_str()));
  dict["step"] = loaded.step;
  dict["strategy"] = loaded.strategy;
  dict["ranks"] = loaded.ranks;
  dict["exact"] = loaded.exact;
  auto* text = PyUnicode_DecodeUTF8(loaded.position.data(), static_cast<Py_ssize_t>(loaded.position.size()), nullptr);
  if (text == nullptr) PyErr_Clear();
  dict["position"] = text != nullptr ? py::reinterpret_steal<py::object>(text) : py::bytes(loaded.position);
  dict["differences"] = loaded.differences;
  return dict;
}

Held<Training> hold(std::shared_ptr<CheckpointSource> source, std::unique_ptr<PythonOptimizer> optimizer = nullptr) {
  return Held<Training>(new Training{std::move(optimizer), TrainingState(std::move(source))});
}

std::string in_words(const py::error_already_set& error) {
  const auto name = py::str(error.type().attr("__name__")).cast<std::string>();
  try {
    const auto text = py::str(error.value()).attr("encode")("utf-8", "backslashreplace").cast<std::string>();
    return error.matches(py::module_::import("shoal").attr("Error")) ? text : name + ": " + text;
  } catch (const py::error_already_set&) {  // of a class that has no text
    return name;
  }
}

// Runs `work` on every rank of the training, which may call Python, and does not communicate. If it fails on some, all
// of them raise: those their own error, and the others that of the lowest rank.
template <class Work>
void on_all_ranks_of(Training& training, const Work& work) {
  std::exception_ptr own;
  std::string failure;
  try {
    work();
  } catch (const py::error_already_set& error) {
    own = std::current_exception();
    failure = in_words(error);
  } catch (const std::exception& error) {
    own = std::current_exception();
    failure = error.what();
  }
  try {
    unlocked([&] {
      on_all_ranks(training.state.state().source->group(), "checkpoint", [&] {
        if (own) throw UsageError(failure);
      });
    });
  } catch (const CommError&) {
    throw;
  } catch (const UsageError&) {
    if (own) std::rethrow_exception(own);
    throw;
  }
}

// request: returns the path and the options, after it has prepared the training; read: reads those options.
template <class Read>
auto prepared(Training& training, const py::function& request, const Read& read) {
  std::pair<std::string, decltype(read(py::dict()))> taken;
  on_all_ranks_of(training, [&] {
    const auto given = request().cast<std::pair<py::bytes, py::dict>>();
    taken = {std::string(given.first), read(given.second)};
    if (training.optimizer) training.optimizer->read();
  });
  return taken;
}

template <class Save>
void save_with(Training& training, const py::function& request, const Save& save) {
  const auto taken = prepared(training, request, save_options);
  unlocked([&] { save(taken.first, training.state, taken.second); });
}

template <class Load>
auto load_with(Training& training, const py::function& request, const Load& load) {
  const auto taken = prepared(training, request, load_options);
  auto loaded = unlocked([&] { return load(taken.first, training.state, taken.second); });
  if (training.optimizer) training.optimizer->write();
  return loaded;
}

}  // namespace

void bind_checkpoint(py::module_& module) {
  using KeepArguments = py::keep_alive<1, 2>;
  py::class_<Training, Held<Training>>(module, "TrainingState")
      .def(py::init([](DataParallelCore& parallel, OSSCore& oss) { return hold(checkpoint_source(parallel, oss)); }),
           KeepArguments(), py::keep_alive<1, 3>())
      .def(py::init([](FullyShardedCore& parallel, ShardGossipOptimizerCore& optimizer, const Group& all) {
             return hold(checkpoint_source(parallel, optimizer, all));
           }),
           KeepArguments(), py::keep_alive<1, 3>())
      .def(py::init([](FullyShardedCore& parallel, FullyShardedOptimizerCore& optimizer) {
             return hold(checkpoint_source(parallel, optimizer));
           }),
           KeepArguments(), py::keep_alive<1, 3>())
      .def(py::init([](DistributedOptimizerCore& optimizer) { return hold(checkpoint_source(optimizer)); }),
           KeepArguments())
      .def(py::init([](LocalUpdates& updates) { return hold(checkpoint_source(updates)); }), KeepArguments())
      .def(py::init([](DecentralizedDataParallelCore& parallel) { return hold(checkpoint_source(parallel)); }),
           KeepArguments())
      .def(py::init([](DataParallelCore& parallel, const py::object& optimizer) {
             auto held = PythonOptimizer::over(optimizer);
             auto source = checkpoint_source(parallel, *held);
             return hold(std::move(source), std::move(held));
           }),
           KeepArguments())
      .def(py::init([](const std::shared_ptr<Mirror>& mirror, const py::object& optimizer, const Group& group) {
        auto held = PythonOptimizer::over(optimizer);
        auto source = checkpoint_source(std::static_pointer_cast<torch::nn::Module>(mirror), *held, group);
        return hold(std::move(source), std::move(held));
      }))
      .def("save",
           [](Training& training, const py::function& request) {
             save_with(training, request, [](auto&&... all) { shoal::save(all...); });
           })
      .def("save_async",
           [](Training& training, const py::function& request) {
             save_with(training, request, [](auto&&... all) { shoal::save_async(all...); });
           })
      .def("load",
           [](Training& training, const py::function& request) {
             return to_dict(load_with(training, request, [](auto&&... all) { return shoal::load(all...); }));
           })
      .def("load_latest",
           [](Training& training, const py::function& request) -> py::object {
             const auto loaded = load_with(training, request, [](auto&&... all) { return shoal::load_latest(all...); });
             return loaded ? py::object(to_dict(*loaded)) : py::none();
           })
      .def("wait", [](Training& training) { unlocked([&] { training.state.wait(); }); })
      .def("saving", [](const Training& training) { return training.state.saving(); });
  module.def("save_module", [](const std::string& file, const Mirror& mirror) {
    unlocked([&] { shoal::save_module(file, mirror); });
  });
  module.def("load_module", [](const std::string& path, Mirror& mirror, const py::dict& given) {
    const auto options = load_module_options(given);
    return to_dict(unlocked([&] { return shoal::load_module(path, mirror, options); }));
  });
}

}  // namespace shoal::python
