// Checkpoint source of DecentralizedDataParallel.

#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>

#include "checkpoint/on_all_ranks.h"
#include "engine/checkpoint/source.h"
#include "shoal/error.h"
#include "strategy/decentralized/standing.h"

namespace shoal {
namespace {

using Json = nlohmann::json;

class DecentralizedSource : public CheckpointSource {
 public:
  explicit DecentralizedSource(DecentralizedDataParallelCore::State& state) : state_(state) {}

  std::string strategy() const override { return "decentralized"; }
  Group group() override {
    state_.require_present("a checkpoint");
    return state_.mixing.remaining();
  }
  std::optional<Group> peers() override { return group(); }

  CheckpointView view() override {
    CheckpointView view;
    const bool begun = !state_.buckets.empty();
    unbegun_ = begun ? std::vector<GossipBucket>() : state_.equipped_parts();
    for (auto& bucket : begun ? state_.buckets : unbegun_) {
      view.shares.push_back({.pieces = pieces_of(*bucket.optimizer, *state_.module), .local = bucket.optimizer.get()});
      view.optimizers.push_back(bucket.optimizer.get());
      if (auto* schedule = dynamic_cast<LambdaLR*>(bucket.schedule.get())) view.schedules.push_back(schedule);
    }
    view.scaler = state_.scaler ? &*state_.scaler : nullptr;
    add_rest(view, *state_.module);
    return view;
  }

  CarriedStates carried() override {
    if (state_.buckets.empty()) return {};
    return {.own = {.values = to_json(state_)}, .common = {}};
  }

  // Creates the optimizers, so that there is state to load into.
  void begin_load(const CarriedStates& past) override {
    const torch::NoGradGuard no_grad;
    const auto& own = past.own.values;
    on_all_ranks(group(), "checkpoint", [&] {
      past_ = own.is_null() ? Standing() : parsed(own);
      require_way_back();
    });
    if (!state_.buckets.empty()) return;
    state_.build_buckets(past_.order);
    for (auto& bucket : state_.buckets) {
      // A LambdaLR gets its position with the rest of the state.
      if (!bucket.schedule || dynamic_cast<LambdaLR*>(bucket.schedule.get()) != nullptr) continue;
      for (int64_t done = 0; done < past_.step; ++done) bucket.schedule->step();
    }
  }

  void end_load(const CarriedStates&) override {
    const torch::NoGradGuard no_grad;
    auto& state = state_;
    state.step = past_.step;
    if (past_.arrivals.size() == state.expected.size()) state.expected = past_.arrivals;
    auto mass = past_.mass;
    mass.resize(state.buckets.size(), 1);
    state.mixing.resume_from(std::max<int64_t>(0, past_.version - 1), std::move(mass));
    state.mixing.known().load(past_.known);
    if (past_.version > 0) state.show_all();
  }

 private:
  // Refuses a load that would have to move a schedule back, which libtorch's schedules cannot.
  void require_way_back() const {
    for (const auto& bucket : state_.buckets) {
      if (!bucket.schedule || dynamic_cast<LambdaLR*>(bucket.schedule.get()) != nullptr) continue;
      throw UsageError(
          "DecentralizedDataParallel: the schedule cannot be reset after training has begun; load before the first "
          "step, or use a LambdaLR");
    }
  }

  Standing parsed(const Json& own) const {
    try {
      return parse_standing(state_, own);
    } catch (const Json::exception&) {  // a file's content is not trusted
      throw CheckpointError(fmt::format("the state of a decentralised rank was not written by shoal: {}", own.dump()));
    }
  }

  DecentralizedDataParallelCore::State& state_;
  Standing past_;                      // of the loaded rank
  std::vector<GossipBucket> unbegun_;  // in a view from before the first step, which makes the buckets
};

}  // namespace

std::shared_ptr<CheckpointSource> checkpoint_source(DecentralizedDataParallelCore& parallel) {
  return std::make_shared<DecentralizedSource>(*parallel.state_);
}

}  // namespace shoal
