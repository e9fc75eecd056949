#pragma once
// Key-value store with a deadline for every call. Only for files of comm/.

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "shoal/error.h"

namespace shoal {

// Error for a store that does not answer: its process is stopped, or its host cannot be reached.
class StoreUnreachable : public CommError {
 public:
  using CommError::CommError;
};

// Its sentence. name: of the store.
StoreUnreachable no_answer(const std::string& name, std::chrono::milliseconds limit);

// Store that does not block forever, as c10d's own client does. A separate thread calls the client, and the caller
// waits for that thread no longer than the limit. Then it throws StoreUnreachable; so do all later calls, at once,
// until the overdue answer has come. Once the connection has ended, all calls throw StoreLost, at once. A call that was
// given up may still take effect. Calls that read or wait for keys poll, so that none of them occupies the client; they
// throw what c10d's store throws after its time-out. Thread-safe. A thread that hangs is left behind.
class DeadlineStore : public c10d::Store {
 public:
  // name: of the store, for errors.
  DeadlineStore(c10::intrusive_ptr<c10d::Store> store, std::string name, std::chrono::milliseconds limit);
  ~DeadlineStore() override;

  // Applies to calls that begin from now on.
  void set_limit(std::chrono::milliseconds limit) { limit_ = limit; }

  c10::intrusive_ptr<c10d::Store> clone() override;
  using c10d::Store::compareSet;
  using c10d::Store::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override;
  std::vector<uint8_t> get(const std::string& key) override;
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;
  bool hasExtendedApi() const override { return false; }

 private:
  class Client;
  template <class Work>
  auto call(Work work);

  std::shared_ptr<Client> client_;
  std::string name_;
  const int pid_;
  std::atomic<std::chrono::milliseconds> limit_;
};

}  // namespace shoal
