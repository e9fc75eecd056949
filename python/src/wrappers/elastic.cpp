#include "shoal/elastic.h"

#include <nlohmann/json.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/group/group_state.h"
#include "comm/rendezvous/world_state.h"
#include "shoal/megatron.h"
#include "shoal/shard_gossip.h"
#include "wrappers/bind.h"
#include "wrappers/calls.h"
#include "wrappers/local_training.h"

namespace shoal::python {
namespace {

// Elastic, and what it needs to outlive it.
class ElasticTrainer {
 public:
  // An optimizer that is whole on each rank.
  ElasticTrainer(DataParallelCore& parallel, const py::object& optimizer, DistributedSampler* sampler,
                 const py::dict& given)
      : world_(world_of(parallel.group())),
        joining_(world_.joining()),
        module_(std::static_pointer_cast<Mirror>(parallel.module())),
        whole_(PythonOptimizer::over(optimizer)) {
    make(sampler, given, parallel, *whole_);
    if (joining_) whole_->write();
  }
  // One that is sharded.
  ElasticTrainer(DataParallelCore& parallel, ShardedOptimizerBase& optimizer, DistributedSampler* sampler,
                 const py::dict& given)
      : ElasticTrainer(parallel.group(), parallel, optimizer, sampler, given) {}
  // The same, where `everybody` has more ranks than the wrapper: those of other hosts, which have models of their own.
  ElasticTrainer(const Group& everybody, DataParallelCore& parallel, ShardedOptimizerBase& optimizer,
                 DistributedSampler* sampler, const py::dict& given)
      : world_(world_of(everybody)),
        joining_(world_.joining()),
        module_(std::static_pointer_cast<Mirror>(parallel.module())),
        sharded_(&optimizer) {
    make(sampler, given, parallel, optimizer);
  }
  ElasticTrainer(DistributedOptimizerCore& optimizer, DistributedSampler* sampler, const py::dict& given)
      : world_(world_of(optimizer.group())),
        joining_(world_.joining()),
        module_(std::static_pointer_cast<Mirror>(optimizer.modules().front())),
        sharded_(&optimizer) {
    make(sampler, given, optimizer);
  }
  // Ranks that train alone, and exchange their parameters.
  ElasticTrainer(LocalTraining& local, DistributedSampler* sampler, const py::dict& given)
      : world_(world_of(local.agreement.group())), joining_(world_.joining()), module_(local.mirror), local_(&local) {
    local.optimizer->read();
    make(sampler, given, *local.updates);
    if (joining_) local.optimizer->write();
  }
  ~ElasticTrainer() { close(); }
  ElasticTrainer(const ElasticTrainer&) = delete;
  ElasticTrainer& operator=(const ElasticTrainer&) = delete;

  // compute: gets (begin, end) of a share if `by_share`, and nothing otherwise. prepare: None, or a function.
  bool step(int64_t samples, const py::object& compute, const py::object& update, const py::object& prepare,
            bool by_share) {
    read();
    const auto forward = share(compute);
    const auto finish = share(update);
    const auto between = share(prepare);
    const std::function<void()> update_all = [&] {
      call(finish);
      const py::gil_scoped_acquire lock;
      read();  // state that the first step has made
    };
    const auto prepare_all = [&] {
      if (!between->is_none()) call(between);
      if (auto* agreement = agreement_of_ranks()) agreement->meet(param_groups(), "");
    };
    const auto compute_share = [&](auto... range) {
      try {
        call(forward, range...);
      } catch (...) {
        try {
          refresh();
        } catch (const Error&) {  // NOLINT(bugprone-empty-catch): the next forward says so; the first error counts
        }
        throw;
      }
      refresh();
    };
    const bool complete = unlocked_with_calls([&] {
      if (by_share) {
        const std::function<void(int64_t, int64_t)> each = compute_share;
        return elastic().step(samples, each, prepare_all, update_all);
      }
      const std::function<void()> all = [&] {
        compute_share();
        prepare_all();
      };
      return elastic().step(samples, all, update_all);
    });
    if (local_ != nullptr) local_->optimizer->write_state();  // which an exchange after the update may have reset
    return complete;
  }
  py::object together(const py::object& work) {
    const auto held = share(work);
    read();
    const auto result = unlocked_with_calls([&] { return elastic().together([&] { return call(held); }); });
    return *result;
  }
  bool in_epoch() {
    return unlocked([&] { return elastic().in_epoch(); });
  }
  void recover() {
    read();
    unlocked_with_calls([&] { elastic().recover(); });
  }
  Elastic& elastic() const {
    if (!elastic_) throw UsageError("Elastic: this one has ended");
    return *elastic_;
  }
  const World& world() const { return world_; }
  // The ranks among which the optimizer is sharded.
  Group shard_group() const {
    if (sharded_ == nullptr) throw UsageError("Elastic: the optimizer is not sharded");
    return sharded_->group();
  }
  bool joining() const { return joining_; }
  // This rank takes no more part; nothing else may be called afterwards.
  void close() {
    if (auto* agreement = agreement_of_ranks(); agreement != nullptr && elastic_) agreement->move_back();
    const py::gil_scoped_release released;  // a thread that it ends may wait for the lock
    elastic_.reset();
  }
  // After a change of the ranks.
  void follow() { agree_before_commit(); }
  // In which the present ranks meet; none for one rank.
  c10::intrusive_ptr<c10d::Store> store() const {
    return world_.size() > 1 ? cell_of(world_)->state->meeting.store : nullptr;
  }

 private:
  static World world_of(const Group& group) {
    const auto& state = *state_of(group);
    if (group.size() != state.world->placement.size) {
      throw UsageError(
          "Elastic: the model's process group has some of the ranks; give it the default one, of all ranks");
    }
    return {state.world, group};
  }
  ElasticOptions options_of(const py::dict& given) const {
    ElasticOptions options;
    Keywords(given, "Elastic")
        .read("min_ranks", options.min_ranks)
        .read("straggler_seconds", options.straggler_seconds)
        .read("silent_host_seconds", options.silent_host_seconds)
        .read("keep_global_batch", options.keep_global_batch)
        .read("batch_slices", options.batch_slices)
        .read("state_has_scaler", options.state_has_scaler)
        .with("tensors", [&](const py::object& list) { options.tensors = list.cast<std::vector<at::Tensor>>(); })
        .with("metrics", [&](const py::object& file) { options.metrics = py::str(file).cast<std::string>(); })
        .with("checkpoints",
              [&](const py::object& folder) { options.checkpoints = py::str(folder).cast<std::string>(); })
        .with("save_state", [&](const py::object& save) { options.save_state = with_kinds(share(save)); })
        .with("load_state", [&](const py::object& load) { options.load_state = for_kinds(share(load)); })
        .with("on_change",
              [&](const py::object& told) {
                options.on_change = [held = share(told)](const ElasticChange& change) { call(held, change); };
              })
        .finish();
    return options;
  }
  // The text that a newcomer gets: a line of JSON with the kinds of the optimizer's numbers, then what the program
  // gives.
  std::function<std::string()> with_kinds(const SharedObject& give) const {
    return [this, give] {
      const auto text = call(give);
      const py::gil_scoped_acquire lock;
      local().require_state_of_parameters();
      return nlohmann::json(local().kinds()).dump() + "\n" + text->cast<std::string>();
    };
  }
  std::function<void(const std::string&)> for_kinds(const SharedObject& take) const {
    return [this, take](const std::string& text) {
      const auto end = text.find('\n');
      local().kinds() = nlohmann::json::parse(text.substr(0, end)).get<NumberKinds>();
      call(take, text.substr(end + 1));
    };
  }
  // The Python optimizer that this rank steps.
  const PythonOptimizer& local() const {
    if (local_ != nullptr) return *local_->optimizer;
    return whole_ ? *whole_ : dynamic_cast<const PythonOptimizer&>(sharded_->local_optimizer());
  }
  template <class... Trained>
  void make(DistributedSampler* sampler, const py::dict& given, Trained&... trained) {
    const auto options = options_of(given);
    auto* agreement = agreement_of_ranks();
    const auto former = agreement != nullptr ? std::optional(*agreement) : std::nullopt;
    agree_before_commit();
    try {
      unlocked([&] {
        elastic_ = sampler != nullptr ? std::make_unique<Elastic>(world_, trained..., *sampler, options)
                                      : std::make_unique<Elastic>(world_, trained..., options);
      });
    } catch (...) {
      if (former) *agreement = *former;
      throw;
    }
  }
  // nullptr: each rank has all of the optimizer, and its options are the program's affair.
  StepAgreement* agreement_of_ranks() const {
    if (local_ != nullptr) return &local_->agreement;
    if (sharded_ == nullptr) return nullptr;
    return local().agreement();
  }
  const ParamGroups& param_groups() const {
    return local_ != nullptr ? local_->optimizer->param_groups() : sharded_->param_groups();
  }
  // Hosts that average their parameters may have options of their own.
  void agree_before_commit() const {
    auto* agreement = agreement_of_ranks();
    if (agreement == nullptr) return;
    const bool of_host = dynamic_cast<ShardGossipOptimizerCore*>(sharded_) != nullptr;
    agreement->move_before_commit(of_host ? sharded_->group() : world_.group());
  }
  // What Python has changed.
  void read() const {
    try {
      module_->refresh();
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): the next forward refuses it
    }
    if (whole_) whole_->read();
    if (local_ != nullptr) local_->optimizer->read();
  }
  // Buffers that forward has replaced.
  void refresh() const {
    const py::gil_scoped_acquire lock;
    module_->refresh();
  }

  World world_;
  bool joining_;
  std::shared_ptr<Mirror> module_;
  // One of them.
  std::unique_ptr<PythonOptimizer> whole_{};
  ShardedOptimizerBase* sharded_ = nullptr;
  LocalTraining* local_ = nullptr;
  std::unique_ptr<Elastic> elastic_;
};

}  // namespace

void bind_elastic(py::module_& module) {
  py::class_<ElasticChange>(module, "ElasticChange", "How the ranks of an elastic job have changed.")
      .def_readonly("generation", &ElasticChange::generation, "Number of the present ranks; the first is 1.")
      .def_readonly("lost", &ElasticChange::lost, "Ranks that have ended, by their number before.")
      .def_readonly("lost_first", &ElasticChange::lost_first, "The same by the launcher's number.")
      .def_readonly("joined", &ElasticChange::joined, "Ranks that have come, by the launcher's number.")
      .def_readonly("ranks", &ElasticChange::ranks, "Ranks that go on.")
      .def_readonly("step", &ElasticChange::step, "Complete steps.")
      .def_readonly("finished_step", &ElasticChange::finished_step,
                    "Whether the step in which a rank died was finished by the others.")
      .def_readonly("seconds", &ElasticChange::seconds, "From the notice of the death until the ranks can go on.")
      .def_readonly("taken_over", &ElasticChange::taken_over, "Who does now what the lost ranks did, in words.")
      .def("__str__", &ElasticChange::text);
  using Trainer = ElasticTrainer;
  py::class_<Trainer>(module, "ElasticTrainer")
      .def(py::init<DataParallelCore&, ShardedOptimizerBase&, DistributedSampler*, const py::dict&>(),
           py::keep_alive<1, 2>(), py::keep_alive<1, 3>(), py::keep_alive<1, 4>())
      .def(py::init<const Group&, DataParallelCore&, ShardedOptimizerBase&, DistributedSampler*, const py::dict&>(),
           py::keep_alive<1, 3>(), py::keep_alive<1, 4>(), py::keep_alive<1, 5>())
      .def(py::init<DistributedOptimizerCore&, DistributedSampler*, const py::dict&>(), py::keep_alive<1, 2>(),
           py::keep_alive<1, 3>())
      .def(py::init<LocalTraining&, DistributedSampler*, const py::dict&>(), py::keep_alive<1, 2>(),
           py::keep_alive<1, 3>())
      .def(py::init<DataParallelCore&, const py::object&, DistributedSampler*, const py::dict&>(),
           py::keep_alive<1, 2>(), py::keep_alive<1, 4>())
      .def("follow", &Trainer::follow)
      .def("step", &Trainer::step)
      .def("together", &Trainer::together)
      .def("in_epoch", &Trainer::in_epoch)
      .def("recover", &Trainer::recover)
      .def("begin_loop", [](Trainer& trainer) { unlocked([&] { trainer.elastic().begin_loop(); }); })
      .def("batch_size", [](const Trainer& trainer) { return trainer.elastic().batch_size(); })
      .def("first_epoch", [](const Trainer& trainer) { return trainer.elastic().first_epoch(); })
      .def("steps", [](const Trainer& trainer) { return trainer.elastic().steps(); })
      .def("generation", [](const Trainer& trainer) { return trainer.elastic().generation(); })
      .def("group", [](const Trainer& trainer) { return trainer.world().group(); })
      .def("shard_group", &Trainer::shard_group)
      .def("joining", &Trainer::joining)
      .def("store", &Trainer::store)
      .def("close", &Trainer::close);
}

}  // namespace shoal::python
