#pragma once
// The job's key-value store: c10d's, with deadlines and clear errors. Only for files of comm/.

#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "comm/rendezvous/job_identity.h"
#include "comm/store/deadline_store.h"

namespace shoal {

using StorePtr = c10::intrusive_ptr<DeadlineStore>;

// Runs `work` in a thread of its own, which is left behind when it
// has not come back in time; so it must own all that it touches. Then, no value; its exceptions come through.
template <class Work>
auto within(std::chrono::milliseconds limit, Work work) -> std::optional<decltype(work())> {
  std::packaged_task<decltype(work())()> task(std::move(work));
  auto result = task.get_future();
  std::thread(std::move(task)).detach();
  if (result.wait_for(limit) != std::future_status::ready) return std::nullopt;
  return result.get();
}

std::optional<std::string> store_try_get(c10d::Store& store, const std::string& key);
void store_set(c10d::Store& store, const std::string& key, const std::string& value);
// Sets the key unless it is set already, by the job; returns the value it has afterwards.
std::string store_set_once(c10d::Store& store, const std::string& key, const std::string& value);

// How long a call of the store may take once the ranks have met.
constexpr std::chrono::seconds store_limit(2);

// Sets the key if it has the value `before` (empty: if nobody has set it); returns the value it has afterwards.
std::string store_replace(c10d::Store& store, const std::string& key, const std::string& before,
                          const std::string& value);

// Under which a store says whose it is, and what it says there.
constexpr const char* claim_key = "shoal/job";
constexpr const char* claims_secret = "\nsecret";
std::string job_claim(const JobIdentity& job);

// Connects to the store at address:port, to read and write what belongs to `job`. Retries until `timeout_seconds` while
// nothing listens there; until the caller sets another limit, its calls may take as long. Throws CommError that says
// whether nobody listened, somebody does not answer, or somebody answers who is not a store.
StorePtr connect_store(const std::string& address, int port, int timeout_seconds, const JobIdentity& job = {});

// libtorch prints a stack trace for every lost connection to a store and for every message that is none; our own errors
// say what happened. For all of this process.
void quiet_c10d();

// Where the first failure that anyone noticed is published, as a sentence that begins "rank N". A job that a launcher
// restarts keeps its store; each start is a generation.
inline std::string first_failure_key(const std::string& generation) {
  return "shoal/" + generation + "/first_failure";
}

}  // namespace shoal
