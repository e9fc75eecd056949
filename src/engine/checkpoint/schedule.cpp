#include "engine/checkpoint/schedule.h"

#include <cmath>
#include <limits>
#include <string>

#include "shoal/schedules.h"

namespace shoal {
namespace {

using Json = nlohmann::json;
using torch::optim::LRScheduler;
using Plateau = torch::optim::ReduceLROnPlateauScheduler;

// Access to the count, which libtorch gives to derived classes only.
struct Counter : LRScheduler {
  static unsigned& of(LRScheduler& schedule) { return schedule.*(&Counter::step_count_); }
};

// Access to the state of ReduceLROnPlateauScheduler, which libtorch keeps private. Names in an explicit instantiation
// are not checked for access, so it can hand out pointers to private members. If libtorch renames the members, this
// does not compile.
template <class Field, typename Field::Type member>
struct Reach {
  friend typename Field::Type member_of(Field) { return member; }
};
struct Best {
  using Type = float Plateau::*;
  friend Type member_of(Best);
};
struct CooldownCounter {
  using Type = int Plateau::*;
  friend Type member_of(CooldownCounter);
};
struct LastEpoch {
  using Type = int Plateau::*;
  friend Type member_of(LastEpoch);
};
struct BadEpochs {
  using Type = int Plateau::*;
  friend Type member_of(BadEpochs);
};
template struct Reach<Best, &Plateau::best>;
template struct Reach<CooldownCounter, &Plateau::cooldown_counter>;
template struct Reach<LastEpoch, &Plateau::last_epoch>;
template struct Reach<BadEpochs, &Plateau::num_bad_epochs>;

// JSON has no infinity.
Json number(float value) {
  return std::isfinite(value) ? Json(value) : Json(value > 0 ? "inf" : "-inf");
}

float number(const Json& value) {
  if (!value.is_string()) return value.get<float>();
  const auto infinity = std::numeric_limits<float>::infinity();
  return value.get<std::string>() == "inf" ? infinity : -infinity;
}

}  // namespace

int64_t steps_of(LRScheduler& schedule) {
  const auto* lambda = dynamic_cast<const LambdaLR*>(&schedule);
  return lambda != nullptr ? lambda->position() : Counter::of(schedule);
}

void set_steps(LRScheduler& schedule, int64_t steps) {
  if (auto* lambda = dynamic_cast<LambdaLR*>(&schedule)) {
    lambda->set_position(steps);
  } else {
    Counter::of(schedule) = static_cast<unsigned>(steps);
  }
}

Json state_of(const Schedule& schedule) {
  if (auto* const* counting = std::get_if<LRScheduler*>(&schedule)) return {{"steps", steps_of(**counting)}};
  const auto& plateau = *std::get<Plateau*>(schedule);
  return {{"best", number(plateau.*member_of(Best()))},
          {"cooldown_counter", plateau.*member_of(CooldownCounter())},
          {"last_epoch", plateau.*member_of(LastEpoch())},
          {"num_bad_epochs", plateau.*member_of(BadEpochs())}};
}

void load_state(const Schedule& schedule, const Json& state) {
  if (auto* const* counting = std::get_if<LRScheduler*>(&schedule)) {
    set_steps(**counting, static_cast<int64_t>(state.at("steps").get_ref<const Json::number_unsigned_t&>()));
    return;
  }
  const auto best = number(state.at("best"));
  const int cooldown = state.at("cooldown_counter"), last = state.at("last_epoch"), bad = state.at("num_bad_epochs");
  auto& plateau = *std::get<Plateau*>(schedule);
  plateau.*member_of(Best()) = best;
  plateau.*member_of(CooldownCounter()) = cooldown;
  plateau.*member_of(LastEpoch()) = last;
  plateau.*member_of(BadEpochs()) = bad;
}

}  // namespace shoal
