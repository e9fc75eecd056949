// LocalUpdates as an elastic training takes it. Ranks update alone. What they exchange after some steps communicates
// first, and changes values once all ranks have the means.

#include <fmt/format.h>

#include <utility>

#include "elastic/elastic_parts.h"
#include "engine/gradients/tensor_hook.h"
#include "engine/wrapper/logging.h"
#include "optim/state.h"
#include "shoal/error.h"
#include "shoal/sync_batch_norm.h"
#include "strategy/local_updates/state.h"

namespace shoal {
namespace {

// Before the name of a parameter: what all ranks have in common of it, beside the inner optimizer's state.
constexpr const char* common_state = "LocalUpdates of ";

class LocalParts : public ElasticParts {
 public:
  explicit LocalParts(LocalUpdates& updates) : ElasticParts(nullptr), updates_(state_of(updates)) {
    for (const auto& named : updates_.module->named_modules()) {
      if (named.value()->as<SyncBatchNorm>() == nullptr) continue;
      throw UsageError(fmt::format("Elastic: {} is a SyncBatchNorm, which keeps its group", named.key()));
    }
  }
  ~LocalParts() override {
    before_backward(nullptr);
    if (guards_) updates_.turn = Turn::free;
  }
  LocalParts(const LocalParts&) = delete;
  LocalParts& operator=(const LocalParts&) = delete;

  torch::nn::Module& module() const override { return *updates_.module; }
  int64_t step() const override { return updates_.steps; }
  int64_t reductions() const override { return updates_.reducer != nullptr ? updates_.reducer->step() : 0; }
  NoSync no_sync(bool /*accumulate*/) override { return NoSync(nullptr); }
  torch::optim::Optimizer& optimizer() const override { return updates_.optimizer; }
  // That of the warm-up begins anew at each change of the ranks.
  Reducer* reducer() const override { return nullptr; }
  ModuleTensors tensors() const override { return updates_.tensors; }
  void set_share(std::optional<double> /*share*/) override {}
  bool takes_shares() const override { return false; }
  std::string in_place_of_lost() const override {
    return "what it has trained since its last exchange is lost, and the others have the rest";
  }
  std::string lost_shards() const override {
    return "each rank that is left has its own parameters, and what the others have trained since their last exchange "
           "is lost";
  }

  LoggingData logging_data() const override {
    LoggingData::Settings settings;
    for (const auto& line : describe(updates_.options)) settings.emplace_back("LocalUpdates", line);
    auto data = log_of("LocalUpdates", *updates_.module, updates_.group, std::move(settings));
    add_model(data, updates_.tensors);
    return data;
  }

  // The wrappers' reducers look before the first gradient, too; here each parameter does.
  void before_backward(std::function<void()> listener) override {
    hooks_.clear();
    if (!listener) return;
    for (const auto& parameter : updates_.parameters()) {
      if (!parameter.requires_grad()) continue;
      hooks_.push_back(std::make_unique<TensorHook>(parameter, listener));
    }
  }

  void guard() override {
    const torch::NoGradGuard no_grad;
    updates_.adopt_changes();
    updates_.note();
    updates_.turn = Turn::no_step;
    guards_ = true;
  }
  bool prepare_commit() override {
    updates_.changes_shared = false;
    updates_.adopt_changes();
    return false;
  }
  bool reduces() const override { return updates_.reducer != nullptr; }
  bool is_broken() const override { return updates_.reducer != nullptr && updates_.reducer->broken(); }
  std::shared_ptr<void> begin_update() override {
    before_ = updates_.steps;
    updates_.turn = Turn::one_step;
    return {&updates_.turn, [](void* turn) { *static_cast<Turn*>(turn) = Turn::no_step; }};
  }
  void check_update() const override {
    if (updates_.steps == before_ + 1) return;
    throw UsageError(
        "Elastic: the second function of step() did not call step() of LocalUpdates, without which ranks exchange "
        "nothing: call it there, in place of the optimizer's, and step(false) for gradients that cannot be used");
  }

  bool exchange_due() const override { return updates_.exchange_due(); }
  void exchange() override {
    const torch::NoGradGuard no_grad;
    updates_.exchange();
  }
  void apply_exchange() override {
    const torch::NoGradGuard no_grad;
    updates_.apply_exchange();
    updates_.note();
  }
  void regroup(const Group& group, int64_t /*step*/) override { updates_.regroup(group); }

  void visit_state(const std::function<void(const std::string& name, const NamedState& state)>& visit) const override {
    ElasticParts::visit_state(visit);
    for (const auto& [name, state] : updates_.named_state(/*in_flight=*/false)) visit(common_state + name, state);
  }
  void take_state(const OptimizerState& whole) const override {
    OptimizerState inner;
    OptimizerState common;
    const std::string mark = common_state;
    for (const auto& [name, state] : whole) {
      name.starts_with(mark) ? common[name.substr(mark.size())] = state : inner[name] = state;
    }
    ElasticParts::take_state(inner);
    updates_.load(common, /*in_flight=*/false);
  }
  void prepare_admission() override {
    updates_.adopt_changes();
    updates_.changes_shared = true;
  }
  void give_rest(const Group& group, const std::vector<bool>& newcomers) override {
    updates_.give_mean(group, newcomers);
  }

 private:
  using Turn = LocalUpdates::State::Turn;

  LocalUpdates::State& updates_;
  std::vector<std::unique_ptr<TensorHook>> hooks_{};
  int64_t before_ = 0;
  bool guards_ = false;
};

}  // namespace

std::unique_ptr<ElasticParts> elastic_parts(const World& world, LocalUpdates& updates) {
  if (state_of(updates).group.name() != world.group().name()) {
    throw UsageError("Elastic: the group of LocalUpdates is not the world's: give it world.group()");
  }
  return std::make_unique<LocalParts>(updates);
}

}  // namespace shoal
