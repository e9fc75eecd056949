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
#include <random>
#include <stdexcept>
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

[[noreturn]] void fail(const std::string& why) {
  throw CommError("the job's store in shared memory: " + why);
}

void require(int error, const char* what) {
  if (error != 0) fail(fmt::format("{}: {}", what, std::strerror(error)));
}

template <class Open>
shm::MemoryFile opened(const Open& open) {
  try {
    return open();
  } catch (const std::runtime_error& error) {
    fail(error.what());
  }
}

[[noreturn]] void throw_missing(const std::vector<std::string>& keys) {
  C10_THROW_ERROR(DistStoreError, fmt::format("nobody has set {} in the job's store", fmt::join(keys, ", ")));
}

}  // namespace

struct MemoryStore::Header {
  uint64_t nonce;
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
  explicit Turn(MemoryStore& store) : lock_(store.header().mutex) { store.catch_up(); }

 private:
  struct Lock {
    explicit Lock(pthread_mutex_t& of) : mutex(of) {
      const int error = pthread_mutex_lock(&mutex);
      require(error == EOWNERDEAD ? pthread_mutex_consistent(&mutex) : error, "pthread_mutex_lock");
    }
    ~Lock() { pthread_mutex_unlock(&mutex); }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;
    pthread_mutex_t& mutex;
  };
  Lock lock_;
};

MemoryStore::MemoryStore(size_t bytes) : file_(opened([bytes] { return shm::MemoryFile::create(bytes); })) {
  pthread_mutexattr_t attributes;
  require(pthread_mutexattr_init(&attributes), "pthread_mutexattr_init");
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  auto* made = new (file_.data()) Header{};
  const int error = pthread_mutex_init(&made->mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
  require(error, "pthread_mutex_init");
  std::random_device random;
  made->nonce = uint64_t{random()} << 32 | random();
}

MemoryStore::MemoryStore(int pid, int descriptor, uint64_t nonce, size_t bytes)
    : file_(opened([=] { return shm::MemoryFile::open(pid, descriptor, bytes); })) {
  if (header().nonce != nonce) fail(fmt::format("process {} has closed it", pid));
}

uint64_t MemoryStore::nonce() const {
  return header().nonce;
}

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
  const auto require_whole = [](bool whole) {
    if (!whole) fail("it is damaged");
  };
  require_whole(used <= room());
  while (read_ < used) {
    Record record{};
    require_whole(used - read_ >= sizeof record);
    std::memcpy(&record, log.records + read_, sizeof record);
    const size_t value = record.value_bytes == removed ? 0 : record.value_bytes;
    require_whole(bytes_of(record.key_bytes, value) <= used - read_);
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
  if (half(moves_).used.load() + bytes > room()) {
    if (value == nullptr) values_.erase(key);
    move_to_other_half();
    if (value == nullptr) return;
  }
  if (half(moves_).used.load() + bytes > room()) {
    fail(fmt::format(
        "it is full: {} keys, and {} needs {} bytes more; it has an entry for each rank of each group, so make "
        "fewer groups, once",
        values_.size(), key, bytes));
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
