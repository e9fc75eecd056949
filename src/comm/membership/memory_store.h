#pragma once
// Key-value store of a generation, in memory that its members share.

#include <cstdint>
#include <map>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "comm/shm/memory_file.h"

namespace shoal {

// It needs no server, and outlives every member: whoever ends, also in the middle of a call, leaves it whole. A log of
// writes in a memory file, of which each process keeps a map. When the log is full, its last values move to the file's
// other half. Thread-safe. Calls wait for each other without a deadline of their own (DeadlineStore); CommError if
// values take more than half of the file, or if the memory is damaged.
class MemoryStore : public c10d::Store {
 public:
  // bytes: of the file; pages take memory once they are written. CommError if the system has none.
  explicit MemoryStore(size_t bytes = default_bytes);
  // That of another process; CommError says why it cannot be opened.
  MemoryStore(int pid, int descriptor, uint64_t nonce, size_t bytes = default_bytes);
  ~MemoryStore() override;

  // For the constructor of others, as long as this object lives. The nonce proves that they have opened this memory and
  // not another file that has its number since.
  int descriptor() const { return file_.descriptor(); }
  uint64_t nonce() const;

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
  static constexpr size_t default_bytes = 64 << 20;
  struct Header;
  struct Half;
  class Turn;

  Header& header() const;
  Half& half(uint64_t which) const;
  size_t room() const;
  void catch_up();
  void read_records();
  void write(const std::string& key, const std::vector<uint8_t>* value);
  void write_into(Half& half, const std::string& key, const std::vector<uint8_t>* value) const;
  void move_to_other_half();

  shm::MemoryFile file_;
  std::map<std::string, std::vector<uint8_t>> values_;
  uint64_t moves_ = 0;  // of the log that values_ has been read from
  uint64_t read_ = 0;   // bytes of it
};

}  // namespace shoal
