#pragma once
// A key-value store whose values prove that a process of the job has written them. Only for files of comm/.

#include <chrono>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "comm/rendezvous/job_identity.h"
#include "shoal/error.h"

namespace shoal {

// A value in the job's store is not by a process of this job.
class ForgedValue : public CommError {
 public:
  using CommError::CommError;
};

// Whoever reaches the port of c10d's store can read and write it. Here values carry a MAC over the job's name, their
// key and themselves, so that another program's, another job's, another key's or an earlier run's are refused:
// ForgedValue names the key. One that is waited for has a few seconds to be overwritten by who owns it, and is not
// there until then. A value that was written once under the same key by the same job is taken, and keys can be deleted.
// Numbers (add) carry no MAC: nothing that matters may depend on them. Thread-safe.
class AuthenticatedStore : public c10d::Store {
 public:
  AuthenticatedStore(c10::intrusive_ptr<c10d::Store> store, JobIdentity identity);

  c10::intrusive_ptr<c10d::Store> clone() override;
  using c10d::Store::compareSet;
  using c10d::Store::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  // ForgedValue for a value that is there already and not the job's.
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override;
  std::vector<uint8_t> get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  // ForgedValue for one that has been there for too long.
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;
  bool hasExtendedApi() const override { return false; }

 private:
  std::vector<uint8_t> sealed(const std::string& key, const std::vector<uint8_t>& value) const;
  // None: it is not the job's.
  std::optional<std::vector<uint8_t>> opened(const std::string& key, std::vector<uint8_t> value) const;
  bool genuine(const std::string& key);

  c10::intrusive_ptr<c10d::Store> store_;
  const JobIdentity identity_;
  std::mutex mutex_;  // below
  std::map<std::string, std::chrono::steady_clock::time_point> forged_since_;
};

// The store itself where the job has no secret.
c10::intrusive_ptr<c10d::Store> authenticated(c10::intrusive_ptr<c10d::Store> store, const JobIdentity& identity);

}  // namespace shoal
