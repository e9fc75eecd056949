#pragma once
// The store of an elastic job on several hosts, which may not answer for a while.

#include <fmt/format.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "comm/membership/patience.h"
#include "comm/store/store.h"
#include "shoal/error.h"

namespace shoal {

// Repeats calls that have no answer. A store that cannot be reached for the time of silence is lost for good: members
// that it separates must not each go on by themselves. Thread-safe.
class PatientStore {
 public:
  // store: a connection that nobody else uses.
  explicit PatientStore(StorePtr store, std::chrono::milliseconds silence = std::chrono::seconds(10))
      : store_(std::move(store)), silence_(silence) {}

  // For calls that begin from now on.
  void set_silence(std::chrono::milliseconds silence) { silence_ = silence; }
  std::chrono::milliseconds silence() const { return silence_; }

  // Calls `act` with the store until it has an answer. CommError if the store is lost.
  template <class Act>
  auto ask(const Act& act) {
    Patience patience(silence_, std::chrono::seconds(5));  // a call that is given up takes seconds
    while (true) {
      if (lost_) throw CommError(why_lost());
      try {
        return act(*store_);
      } catch (const StoreUnreachable& error) {
        if (patience.over()) lose_unreachable(error.what());
      } catch (const std::exception& error) {
        lose(error.what());
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  }
  // For calls that are not repeated.
  DeadlineStore& once() { return *store_; }

  // The first call counts.
  void lose(const std::string& why);
  bool is_lost() const { return lost_; }
  // Empty: it is not.
  std::string why_lost() const;

 private:
  // what: of one call, whose limit is shorter than the time of silence.
  void lose_unreachable(const std::string& what) {
    lose(fmt::format("{}; it was asked again for {} s", what, std::chrono::duration<double>(silence()).count()));
  }

  const StorePtr store_;
  std::atomic<std::chrono::milliseconds> silence_;
  mutable std::mutex mutex_;
  std::string why_lost_;
  std::atomic<bool> lost_ = false;
};

struct Placement;

// A connection of its own to the job's store. UsageError if only the program knows where it is.
StorePtr connect_to_job(const Placement& placement, int timeout_seconds);
// Tells the launchers why an elastic job is lost, which then end the ranks that still stand. rank: number of this
// process from its launcher. Without a launcher it does nothing.
void report_lost(int rank, const std::string& why);

}  // namespace shoal
