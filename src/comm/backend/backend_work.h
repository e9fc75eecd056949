#pragma once
// Handle of a flight in c10d's form.

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "comm/backend/flight.h"
#include "comm/backend/operands.h"
#include "comm/backend/progress.h"

namespace shoal {

// What a future keeps for an error: another one that stands for it, where a binding of another language asks for that.
// PyTorch rethrows it where it knows no classes of shoal. Not thread-safe: set it before the first operation.
using FutureErrorMaker = std::exception_ptr (*)(const std::exception_ptr& error);
void set_future_error(FutureErrorMaker make);

// Thread-safe. If the handle is dropped, its operations go on.
class BackendWork : public c10d::Work {
 public:
  struct Parts {
    c10d::OpType type;
    const char* title;  // for the profiler
    Tensors inputs;     // for the profiler
    Tensors results;
    uint64_t sequence;
    int rank;
  };
  // waited_for: the caller waits at once, so nobody else has to see to its progress.
  BackendWork(std::shared_ptr<BackendFlight> flight, std::shared_ptr<Progress> progress, Parts parts, bool waited_for);
  ~BackendWork() override;

  bool isCompleted() override;
  bool isSuccess() const override { return flight_->over() && !flight_->error(); }
  std::exception_ptr exception() const override { return flight_->error(); }
  int sourceRank() const override { return flight_->source(); }
  Tensors result() override { return results_; }
  void synchronize() override { flight_->wait(Milliseconds(0)); }
  bool wait(Milliseconds timeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return sequence_; }

 private:
  bool ends_in_a_wait_only() const;
  // Sees to it that the flight ends although nobody waits.
  void hurry();

  const std::shared_ptr<BackendFlight> flight_;
  const std::shared_ptr<Progress> progress_;
  const Tensors results_;
  const uint64_t sequence_;
  std::atomic<bool> in_progress_ = false;  // the progress thread knows the flight
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace shoal
