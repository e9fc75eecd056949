#include "comm/membership/memory_store.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <pthread.h>

#include <torch/csrc/distributed/c10d/exception.h>
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <new>
#include <system_error>
#include <thread>

#include "shoal/error.h"

namespace shoal {
namespace {

// In front of its key and value.
struct Record {
  uint32_t key_bytes;
  uint32_t value_bytes;  // removed: the key has no value any more
};
constexpr uint32_t removed = UINT32_MAX;

constexpr size_t behind_header = 4096;

size_t bytes_of(size_t key, size_t value) {
  const size_t bytes = sizeof(Record) + key + value;
  return (bytes + alignof(Record) - 1) / alignof(Record) * alignof(Record);
}

void require(int error, const char* what) {
  if (error != 0) throw std::system_error(error, std::generic_category(), what);
}

[[noreturn]] void throw_missing(const std::vector<std::string>& keys) {
  C10_THROW_ERROR(DistStoreError, fmt::format("nobody has set {} in the job's store", fmt::join(keys, ", ")));
}

}  // namespace

struct MemoryStore::Header {
  pthread_mutex_t mutex;
  std::atomic<uint64_t> moves;  // the log is in half moves % 2
};

// A record counts once `used` covers it, so one that was cut off is written over.
struct MemoryStore::Half {
  std::atomic<uint64_t> used;
  std::byte records[1];
};

// Excludes other threads and processes. The system gives a turn whose owner has ended to the next one.
class MemoryStore::Turn {
 public:
  explicit Turn(MemoryStore& store) : mutex_(store.header().mutex) {
    const int error = pthread_mutex_lock(&mutex_);
    if (error == EOWNERDEAD) {
      pthread_mutex_consistent(&mutex_);
    } else {
      require(error, "the job's store");
    }
    store.catch_up();
  }
  ~Turn() { pthread_mutex_unlock(&mutex_); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  pthread_mutex_t& mutex_;
};

MemoryStore::MemoryStore(size_t bytes) : file_(MemoryFile::create(bytes)) {
  pthread_mutexattr_t attributes;
  require(pthread_mutexattr_init(&attributes), "pthread_mutexattr_init");
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  auto* made = new (file_.data()) Header{};
  const int error = pthread_mutex_init(&made->mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
  require(error, "pthread_mutex_init");
}

MemoryStore::MemoryStore(int pid, int descriptor, size_t bytes) : file_(MemoryFile::open(pid, descriptor, bytes)) {}

MemoryStore::~MemoryStore() = default;

MemoryStore::Header& MemoryStore::header() const {
  return *reinterpret_cast<Header*>(file_.data());
}

MemoryStore::Half& MemoryStore::half(uint64_t which) const {
  static_assert(sizeof(Header) <= behind_header);
  const size_t bytes = offsetof(Half, records) + room();
  return *reinterpret_cast<Half*>(file_.data() + behind_header + which % 2 * bytes);
}

// Bytes of a half's records.
size_t MemoryStore::room() const {
  const size_t each = (file_.size() - behind_header) / 2 - offsetof(Half, records);
  return each / alignof(std::max_align_t) * alignof(std::max_align_t);
}

void MemoryStore::catch_up() {
  const auto moves = header().moves.load();
  if (moves != moves_) {
    values_.clear();
    moves_ = moves;
    read_ = 0;
  }
  read_records();
}

void MemoryStore::read_records() {
  const auto& log = half(moves_);
  const auto used = log.used.load();
  const auto damaged = [] { return CommError("the job's store in shared memory is damaged"); };
  if (used > room()) throw damaged();
  while (read_ < used) {
    Record record{};
    if (used - read_ < sizeof record) throw damaged();
    std::memcpy(&record, log.records + read_, sizeof record);
    const size_t value = record.value_bytes == removed ? 0 : record.value_bytes;
    if (bytes_of(record.key_bytes, value) > used - read_) throw damaged();
    const auto* begin = reinterpret_cast<const uint8_t*>(log.records + read_ + sizeof record);
    const std::string key(begin, begin + record.key_bytes);
    if (record.value_bytes == removed) {
      values_.erase(key);
    } else {
      values_[key].assign(begin + record.key_bytes, begin + record.key_bytes + value);
    }
    read_ += bytes_of(record.key_bytes, value);
  }
}

void MemoryStore::write_into(Half& half, const std::string& key, const std::vector<uint8_t>* value) const {
  const size_t value_bytes = value != nullptr ? value->size() : 0;
  const auto used = half.used.load();
  const Record record{static_cast<uint32_t>(key.size()),
                      value != nullptr ? static_cast<uint32_t>(value_bytes) : removed};
  auto* to = half.records + used;
  std::memcpy(to, &record, sizeof record);
  std::memcpy(to + sizeof record, key.data(), key.size());
  if (value_bytes > 0) std::memcpy(to + sizeof record + key.size(), value->data(), value_bytes);
  half.used.store(used + bytes_of(key.size(), value_bytes));
}

// value: nullptr removes the key.
void MemoryStore::write(const std::string& key, const std::vector<uint8_t>* value) {
  const auto bytes = bytes_of(key.size(), value != nullptr ? value->size() : 0);
  if (half(moves_).used.load() + bytes > room()) move_to_other_half();
  if (half(moves_).used.load() + bytes > room()) {
    throw CommError(
        fmt::format("the job's store is full: {} keys, and {} has {} bytes more", values_.size(), key, bytes));
  }
  write_into(half(moves_), key, value);
  read_records();
}

// The log counts until the other half is whole.
void MemoryStore::move_to_other_half() {
  auto& other = half(moves_ + 1);
  other.used.store(0);
  for (const auto& [key, value] : values_) write_into(other, key, &value);
  header().moves.store(moves_ + 1);
  catch_up();
}

c10::intrusive_ptr<c10d::Store> MemoryStore::clone() {
  return c10::intrusive_ptr<c10d::Store>::unsafe_reclaim_from_nonowning(this);  // thread-safe as it is
}

void MemoryStore::set(const std::string& key, const std::vector<uint8_t>& value) {
  const Turn turn(*this);
  write(key, &value);
}

// As c10d's: an empty value counts as absent, and the result is `expected` where the key is absent.
std::vector<uint8_t> MemoryStore::compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                             const std::vector<uint8_t>& desired) {
  const Turn turn(*this);
  const auto found = values_.find(key);
  const bool present = found != values_.end();
  if (present ? found->second != expected : !expected.empty()) return present ? found->second : expected;
  write(key, &desired);
  return desired;
}

std::vector<uint8_t> MemoryStore::get(const std::string& key) {
  const Turn turn(*this);
  const auto found = values_.find(key);
  if (found == values_.end()) throw_missing({key});
  return found->second;
}

std::vector<std::vector<uint8_t>> MemoryStore::multiGet(const std::vector<std::string>& keys) {
  std::vector<std::vector<uint8_t>> values;
  for (const auto& key : keys) values.push_back(get(key));
  return values;
}

int64_t MemoryStore::add(const std::string& key, int64_t value) {
  const Turn turn(*this);
  int64_t sum = value;
  if (const auto found = values_.find(key); found != values_.end()) {
    sum += std::stoll(std::string(found->second.begin(), found->second.end()));
  }
  const auto text = std::to_string(sum);
  const std::vector<uint8_t> bytes(text.begin(), text.end());
  write(key, &bytes);
  return sum;
}

bool MemoryStore::deleteKey(const std::string& key) {
  const Turn turn(*this);
  if (values_.count(key) == 0) return false;
  write(key, nullptr);
  return true;
}

bool MemoryStore::check(const std::vector<std::string>& keys) {
  const Turn turn(*this);
  return std::all_of(keys.begin(), keys.end(), [this](const auto& key) { return values_.count(key) > 0; });
}

int64_t MemoryStore::getNumKeys() {
  const Turn turn(*this);
  return static_cast<int64_t>(values_.size());
}

void MemoryStore::wait(const std::vector<std::string>& keys) {
  wait(keys, getTimeout());
}

void MemoryStore::wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (!check(keys)) {
    if (std::chrono::steady_clock::now() > deadline) throw_missing(keys);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace shoal
