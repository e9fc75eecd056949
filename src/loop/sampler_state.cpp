#include "loop/sampler_state.h"

#include <mutex>
#include <utility>

namespace shoal {

struct SharedPosition::Place {
  std::shared_ptr<Place> copied_from;
  std::mutex mutex{};   // data loaders may run on threads of their own
  uint64_t number = 0;  // of what was published last; 0: nothing
  size_t epoch = 0;
  std::shared_ptr<EpochStart> start{};
};

SharedPosition::SharedPosition() : own_(std::make_shared<Place>()) {}

SharedPosition::SharedPosition(const SharedPosition& of)
    : own_(new Place{.copied_from = of.own_}), received_(of.received_) {}

SharedPosition& SharedPosition::operator=(const SharedPosition& of) {
  own_.reset(new Place{.copied_from = of.own_});
  received_ = of.received_;
  return *this;
}

void SharedPosition::publish(size_t epoch, std::shared_ptr<EpochStart> start) {
  static std::atomic<uint64_t> numbers = 0;
  const std::scoped_lock lock(own_->mutex);
  own_->epoch = epoch;
  own_->start = std::move(start);
  received_ = own_->number = ++numbers;
}

bool SharedPosition::receive(size_t& epoch, std::shared_ptr<EpochStart>& start) {
  for (auto* place = own_.get(); place != nullptr; place = place->copied_from.get()) {
    const std::scoped_lock lock(place->mutex);
    if (place->number == 0) continue;
    if (place->number <= received_) return false;
    received_ = place->number;
    epoch = place->epoch;
    start = place->start;
    return true;
  }
  return false;
}

}  // namespace shoal
