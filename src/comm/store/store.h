#pragma once
// The job's key-value store: c10d's, with deadlines and clear errors. Only for files of comm/.

#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <string>

#include "base/start_thread.h"
#include "comm/rendezvous/job_identity.h"
#include "comm/store/deadline_store.h"

namespace shoal {

using StorePtr = c10::intrusive_ptr<DeadlineStore>;

// Runs `work` in a separate thread. Returns nothing if it takes too long; the thread is then left behind, so `work`
// must own all that it uses. Exceptions of `work` are passed on.
template <class Work>
auto within(std::chrono::milliseconds limit, Work work) -> std::optional<decltype(work())> {
  std::packaged_task<decltype(work())()> task(std::move(work));
  auto result = task.get_future();
  start_thread("waits in place of the caller", std::move(task)).detach();
  if (result.wait_for(limit) != std::future_status::ready) return std::nullopt;
  return result.get();
}

// The same, but returns nothing once `given_up`, which is asked every 2 ms, says so.
template <class GivenUp, class Work>
auto unless(const GivenUp& given_up, Work work) -> std::optional<decltype(work())> {
  std::packaged_task<decltype(work())()> task(std::move(work));
  auto result = task.get_future();
  start_thread("waits in place of the caller", std::move(task)).detach();
  while (result.wait_for(std::chrono::milliseconds(2)) != std::future_status::ready) {
    if (given_up()) return std::nullopt;
  }
  return result.get();
}

std::optional<std::string> store_try_get(c10d::Store& store, const std::string& key);
void store_set(c10d::Store& store, const std::string& key, const std::string& value);
// Sets the key unless the job has set it already; returns its value.
std::string store_set_once(c10d::Store& store, const std::string& key, const std::string& value);

// Limit for calls of the store once the ranks have met.
constexpr std::chrono::seconds store_limit(2);

// Sets the key if its value is `before` (empty: not set yet); returns its value.
std::string store_replace(c10d::Store& store, const std::string& key, const std::string& before,
                          const std::string& value);

// Key and contents of the entry that names the job which owns the store.
constexpr const char* claim_key = "shoal/job";
constexpr const char* claims_secret = "\nsecret";
std::string job_claim(const JobIdentity& job);

// Connects to the store at address:port on behalf of `job`. Retries until `timeout_seconds` while nothing listens
// there, or while the name is not known (UsageError then); calls have the same limit until the caller sets another.
// CommError says whether nobody listened, somebody does not answer, or the one who answers is not a store.
StorePtr connect_store(const std::string& address, int port, int timeout_seconds, const JobIdentity& job = {});

// Silences libtorch, which prints a stack trace for every lost connection and every malformed message; our own errors
// say what happened. For the whole process.
void quiet_c10d();

// Key of the first failure that any rank noticed, a sentence that begins "rank N". A job that a launcher restarts keeps
// its store; each start is a generation.
inline std::string first_failure_key(const std::string& generation) {
  return "shoal/" + generation + "/first_failure";
}

// Key that a launcher sets once the process of a rank has ended.
inline std::string ended_key(const std::string& generation, int rank) {
  return "shoal/" + generation + "/ended/" + std::to_string(rank);
}

// Key of the numbers of ranks that launchers are to kill, as others have waited for them for too long: "3 7".
inline std::string overdue_key(const std::string& generation) {
  return "shoal/" + generation + "/overdue";
}

// Key of the sentence why an elastic job is lost, for launchers.
inline std::string lost_key(const std::string& generation) {
  return "shoal/" + generation + "/lost";
}

// Key that a newcomer of such a job sets for its launcher, once it is a member.
inline std::string joined_key(const std::string& generation, int number) {
  return "shoal/" + generation + "/joined/" + std::to_string(number);
}

}  // namespace shoal
