// Checkpoint source of DecentralizedDataParallel.

#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>

#include "checkpoint/on_all_ranks.h"
#include "engine/checkpoint/source.h"
#include "shoal/error.h"
#include "strategy/decentralized/training_progress.h"

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
    unbegun_ = begun ? std::vector<GossipBucket>() : state_.buckets_with_optimizers();
    auto& buckets = begun ? state_.buckets : unbegun_;
    const auto& whole = state_.whole;
    if (whole) {
      whole->give_options(buckets);
      view.optimizers.push_back(&whole->optimizer());
    }
    for (auto& bucket : buckets) {
      view.shares.push_back({.pieces = pieces_of(*bucket.optimizer, *state_.module), .local = bucket.optimizer.get()});
      if (!whole || whole->scheduled()) view.optimizers.push_back(bucket.optimizer.get());
      if (bucket.schedule) view.schedules.push_back(bucket.schedule.get());
    }
    view.scaler = state_.scaler ? &*state_.scaler : nullptr;
    add_rest(view, *state_.module);
    return view;
  }

  CarriedStates carried() override {
    if (state_.buckets.empty()) return {};
    CarriedStates all{.own = {.values = to_json(state_)}, .common = {}};
    for (size_t i = 0; i < state_.buckets.size(); ++i) {
      const auto& bucket = state_.buckets[i];
      const auto copies = state_.mixing.copies(i);
      for (size_t round = 0; round < copies.size(); ++round) {
        const auto views = bucket.views_of(copies[round]);
        for (size_t k = 0; k < views.size(); ++k) all.own.tensors[copy_name(round, bucket.members()[k])] = views[k];
      }
    }
    return all;
  }

  // Creates the optimizers, so that there is state to load into.
  void begin_load(const CarriedStates& past) override {
    const torch::NoGradGuard no_grad;
    const auto& own = past.own.values;
    on_all_ranks(group(), "checkpoint", [&] {
      past_ = own.is_null() ? TrainingProgress() : parsed(own);
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

  void end_load(const CarriedStates& past) override {
    const torch::NoGradGuard no_grad;
    auto& state = state_;
    state.step = past_.step;
    if (past_.arrivals.size() == state.expected.size()) state.expected = past_.arrivals;
    auto mass = state.mixing.weights_from(past_.mass, has_same_buckets());
    mass_lost_ = !mass;
    state.mixing.resume_from(std::max<int64_t>(0, past_.version - 1), mass.value_or(std::vector<double>()));
    // On all ranks alike: whoever has failed in its first step is in another one than the others.
    const bool told = past_.step > 0 && !past_.known.empty();
    state.weights_told =
        group().all_reduce(told ? 1 : 0, ReduceOp::min, {past_.step, -1, "weights that are known"}) == 1;
    state.mixing.known().load(past_.known);
    if (past_.version > 0) state.publish_all();
    if (state.scale) state.scale->resume(past_.scale);
    if (state.whole) {
      state.whole->show_rates(state.buckets);
      state.whole->give_options(state.buckets);
    }
    copies_missing_ = false;
    state.separate();
    for (size_t i = 0; i < state.buckets.size(); ++i) resume_copies(i, past.own);
  }

  std::vector<std::string> differences() const override {
    std::vector<std::string> list;
    if (copies_missing_) {
      list.emplace_back("the checkpoint lacks copies for the compressed exchange; they begin with the parameters");
    }
    if (mass_lost_) list.emplace_back(push_sum_begins_anew);
    return list;
  }

 private:
  static std::string copy_name(size_t round, const NamedParameter& member) {
    return fmt::format("copy.{}.{}", round, member.name);
  }

  // Copies begin with the parameters where the checkpoint has none.
  void resume_copies(size_t index, const Carried& past) {
    auto& bucket = state_.buckets[index];
    bucket.adopt();
    auto copies = state_.mixing.copies(index);
    for (size_t round = 0; round < copies.size(); ++round) {
      copies[round] = at::zeros_like(copies[round]);
      bucket.write_to(copies[round]);
      const auto views = bucket.views_of(copies[round]);
      for (size_t k = 0; k < views.size(); ++k) {
        const auto stored = past.tensors.find(copy_name(round, bucket.members()[k]));
        if (stored != past.tensors.end() && stored->second.sizes() == views[k].sizes()) {
          at::Tensor(views[k]).copy_(stored->second);
        } else if (!past.values.is_null()) {
          copies_missing_ = true;
        }
      }
    }
    if (!copies.empty()) state_.mixing.resume_copies(index, copies);
  }

  bool has_same_buckets() const {
    if (past_.members.empty()) return true;  // of a checkpoint that does not say; their number is compared
    std::vector<size_t> sizes;
    std::vector<size_t> order;
    for (const auto& members : state_.members) {
      sizes.push_back(members.size());
      order.insert(order.end(), members.begin(), members.end());
    }
    return past_.members == sizes && past_.order == order;
  }

  // Refuses a load that would have to move a schedule back, which libtorch's schedules cannot.
  void require_way_back() const {
    for (const auto& bucket : state_.buckets) {
      if (!bucket.schedule || dynamic_cast<LambdaLR*>(bucket.schedule.get()) != nullptr) continue;
      throw UsageError(
          "DecentralizedDataParallel: the schedule cannot be reset after training has begun; load before the first "
          "step, or use a LambdaLR");
    }
  }

  TrainingProgress parsed(const Json& own) const {
    const auto refuse = [&] {  // a file's content is not trusted
      throw CheckpointError(fmt::format("the state of a decentralised rank was not written by shoal: {}", own.dump()));
    };
    TrainingProgress progress;
    try {
      progress = parse_progress(state_, own);
      if (state_.scaler && !progress.scale.steps.empty()) GradScaler(*state_.scaler).load(progress.scale.before);
    } catch (const Json::exception&) {
      refuse();
    } catch (const UsageError&) {  // of the scaler
      refuse();
    }
    return progress;
  }

  DecentralizedDataParallelCore::State& state_;
  TrainingProgress past_;              // of the loaded rank
  bool copies_missing_ = false;        // in the last load
  bool mass_lost_ = false;             // in the last load
  std::vector<GossipBucket> unbegun_;  // in a view from before the first step, which makes the buckets
};

}  // namespace

std::shared_ptr<CheckpointSource> checkpoint_source(DecentralizedDataParallelCore& parallel) {
  return std::make_shared<DecentralizedSource>(*parallel.state_);
}

}  // namespace shoal
