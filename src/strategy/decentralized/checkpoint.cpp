// DecentralizedDataParallel in checkpoints.

#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>

#include "checkpoint/on_all_ranks.h"
#include "engine/checkpoint/source.h"
#include "shoal/base/error.h"
#include "shoal/checkpoint/checkpoint_error.h"
#include "strategy/decentralized/state.h"

namespace shoal {
namespace {

using Json = nlohmann::json;

class DecentralizedSource : public CheckpointSource {
 public:
  explicit DecentralizedSource(DecentralizedDataParallelCore::State& state) : state_(state) {}

  std::string strategy() const override { return "decentralized"; }
  Group group() override { return state_.mixing.remaining(); }
  bool diverges() const override { return true; }

  CheckpointView view() override {
    CheckpointView view;
    for (auto& bucket : state_.buckets) {
      view.shares.push_back({.pieces = pieces_of(*bucket.optimizer, *state_.module), .local = bucket.optimizer.get()});
      view.rates.push_back(bucket.optimizer.get());
      if (auto* schedule = dynamic_cast<LambdaLR*>(bucket.schedule.get())) view.schedules.push_back(schedule);
    }
    if (state_.buckets.empty()) view.shares.push_back({.pieces = fresh_pieces()});
    view.scaler = state_.scaler ? &*state_.scaler : nullptr;
    add_rest(view, *state_.module);
    return view;
  }

  // Order and number of gradients decide when a bucket is mixed; the version, with whom.
  Json own_state() override {
    if (state_.buckets.empty()) return nullptr;
    Json order = Json::array();
    for (const auto& bucket : state_.buckets) {
      for (const auto& member : bucket.members()) order.push_back(member.name);
    }
    return {{"order", std::move(order)},
            {"arrivals", state_.expected},
            {"step", state_.step},
            {"version", state_.mixing.version()},
            {"mass", state_.mixing.mass()}};
  }

  // The optimizers are made here, so that there is somewhere to load to.
  void begin_load(const Json& own) override {
    const torch::NoGradGuard no_grad;
    on_all_ranks(group(), "checkpoint", [&] { past_ = own.is_null() ? Past() : parsed(own); });
    if (!state_.buckets.empty()) return;
    state_.order = past_.order;
    state_.build_buckets();
  }

  void end_load(const Json&) override {
    const torch::NoGradGuard no_grad;
    auto& state = state_;
    state.step = past_.step;
    if (past_.arrivals.size() == state.expected.size()) state.expected = past_.arrivals;
    auto mass = past_.mass;
    mass.resize(state.buckets.size(), 1);
    state.mixing.go_on_from(std::max<int64_t>(0, past_.version - 1), std::move(mass));
    if (past_.version == 0) return;
    for (size_t i = 0; i < state.buckets.size(); ++i) {
      state.mixing.show(i, [&](const at::Tensor& flat, double scale) { state.buckets[i].write_to(flat, scale); });
    }
    state.mixing.end_step();
  }

 private:
  // own_state() of the rank that goes on.
  struct Past {
    std::vector<size_t> order{};
    std::vector<int> arrivals{};
    int64_t step = 0;
    int64_t version = 0;
    std::vector<double> mass{};
  };

  std::vector<StatePiece> fresh_pieces() const {
    std::vector<StatePiece> pieces;
    for (const auto& gradient : state_.gradients) {
      const auto& parameter = gradient.parameter;
      pieces.push_back(
          {.name = gradient.name, .parameter = parameter, .range = {0, parameter.numel()}, .updated = parameter});
    }
    return pieces;
  }

  Past parsed(const Json& own) const {
    try {
      Past past{
          .arrivals = own.at("arrivals"), .step = own.at("step"), .version = own.at("version"), .mass = own.at("mass")};
      for (const auto& name : own.at("order").get<std::vector<std::string>>()) {
        const auto& all = state_.gradients;
        const auto found = std::find_if(all.begin(), all.end(), [&](const auto& one) { return one.name == name; });
        const auto place = static_cast<size_t>(found - all.begin());
        if (found != all.end() && std::count(past.order.begin(), past.order.end(), place) == 0) {
          past.order.push_back(place);
        }
      }
      return past;
    } catch (const Json::exception&) {  // what a file says is as trustworthy as the file
      throw CheckpointError(fmt::format("a decentralised rank's state is not what shoal writes: {}", own.dump()));
    }
  }

  DecentralizedDataParallelCore::State& state_;
  Past past_;
};

}  // namespace

std::shared_ptr<CheckpointSource> checkpoint_source(DecentralizedDataParallelCore& parallel) {
  return std::make_shared<DecentralizedSource>(*parallel.state_);
}

}  // namespace shoal
