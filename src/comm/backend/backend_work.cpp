#include "comm/backend/backend_work.h"

#include <utility>

#include "base/start_thread.h"

namespace shoal {
namespace {

FutureErrorMaker make_future_error = nullptr;

}  // namespace

void set_future_error(FutureErrorMaker make) {
  make_future_error = make;
}

BackendWork::BackendWork(std::shared_ptr<BackendFlight> flight, std::shared_ptr<Progress> progress, Parts parts,
                         bool waited_for)
    : Work(parts.rank, parts.type, parts.title,
           parts.inputs.empty() ? std::nullopt : std::optional<Tensors>(parts.inputs)),
      flight_(std::move(flight)),
      progress_(std::move(progress)),
      results_(std::move(parts.results)),
      sequence_(parts.sequence) {
  if (recordFunctionEndCallback_) flight_->when_over(recordFunctionEndCallback_);
  if (waited_for || flight_->over() || ends_in_a_wait_only()) return;
  in_progress_ = true;
  progress_->add(flight_);
}

BackendWork::~BackendWork() {
  if (flight_->over() || progress_->is_forked_copy()) return;
  hurry();
}

// A message over c10d's Gloo, whose wait cannot be interrupted either.
bool BackendWork::ends_in_a_wait_only() const {
  return c10d::isP2POp(opType_) && !flight_->rings_bell();
}

void BackendWork::hurry() {
  if (flight_->over() || flight_->urgent()) return;
  flight_->set_urgent();
  if (ends_in_a_wait_only()) {
    start_thread("waits for a message", [flight = flight_] {
      try {
        flight->wait(Milliseconds(0));
      } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the flight keeps it
      }
    }).detach();
    return;
  }
  if (!in_progress_.exchange(true)) progress_->add(flight_);
  progress_->hurry();
}

bool BackendWork::isCompleted() {
  if (flight_->over()) return true;
  hurry();
  return false;
}

bool BackendWork::wait(Milliseconds timeout) {
  flight_->wait(timeout);
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> BackendWork::getFuture() {
  {
    const std::lock_guard lock(mutex_);
    if (future_) return future_;
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  }
  flight_->when_over(
      [future = future_, flight = flight_.get(), progress = std::weak_ptr(progress_), results = results_] {
        // Callbacks of the future may wait for other futures, as PyTorch's hooks of PowerSGD do.
        if (const auto alive = progress.lock()) alive->make_way();
        if (const auto error = flight->error()) {
          future->setError(make_future_error != nullptr ? make_future_error(error) : error);
        } else {
          future->markCompleted(c10::IValue(results));
        }
      });
  hurry();
  return future_;
}

}  // namespace shoal
