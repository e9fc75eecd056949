#pragma once
// Key-value store with authenticated values. Only for files of comm/.

#include <charconv>
#include <chrono>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "comm/rendezvous/job_identity.h"
#include "shoal/error.h"

namespace shoal {

// Error for a value in the job's store that no process of this job wrote.
class ForgedValue : public CommError {
 public:
  using CommError::CommError;
};

ForgedValue forgery_of(const std::string& key);

// The number with which `text`, of the value of `key`, begins: up to a blank or the end. ForgedValue if there is none,
// as in a store without a secret, whose values prove nothing.
template <class Number>
Number number_in(const std::string& text, const std::string& key) {
  Number number{};
  const auto* end = text.data() + text.size();
  const auto [after, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || (after != end && *after != ' ')) throw forgery_of(key);
  return number;
}

// Store whose values prove that a process of the job wrote them, because anybody who reaches the port of c10d's store
// can read and write it. Each value carries a MAC over the job's name, its key and itself, so that values of other
// programs, jobs, keys or earlier runs are refused: ForgedValue names the key. A forged value that is waited for counts
// as absent for a few seconds, in which its owner may overwrite it. Not prevented: replay of a value of the same job
// and key, and deletion of keys. Numbers (add) carry no MAC, so nothing that matters may depend on them. Thread-safe.
class AuthenticatedStore : public c10d::Store {
 public:
  AuthenticatedStore(c10::intrusive_ptr<c10d::Store> store, JobIdentity identity);

  c10::intrusive_ptr<c10d::Store> clone() override;
  using c10d::Store::compareSet;
  using c10d::Store::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  // ForgedValue if there is a value already that is not the job's.
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override;
  std::vector<uint8_t> get(const std::string& key) override;
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  // ForgedValue if a forged value has been there for too long.
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;
  bool hasExtendedApi() const override { return false; }

 private:
  std::vector<uint8_t> sealed(const std::string& key, const std::vector<uint8_t>& value) const;
  // Nothing if the value is not the job's.
  std::optional<std::vector<uint8_t>> opened(const std::string& key, std::vector<uint8_t> value) const;
  bool genuine(const std::string& key, std::vector<uint8_t> value);

  c10::intrusive_ptr<c10d::Store> store_;
  const JobIdentity identity_;
  std::mutex mutex_;  // guards what follows
  std::map<std::string, std::chrono::steady_clock::time_point> forged_since_;
};

// Returns `store` itself if the job has no secret.
c10::intrusive_ptr<c10d::Store> authenticated(c10::intrusive_ptr<c10d::Store> store, const JobIdentity& identity);

}  // namespace shoal
