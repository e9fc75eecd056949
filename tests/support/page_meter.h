#pragma once
// Meter of this process's memory, from the kernel.

#include <malloc.h>
#include <sys/resource.h>

#include <cstdint>
#include <fstream>
#include <string>

namespace shoal::test {

// The address sanitizer keeps freed memory.
#ifdef __SANITIZE_ADDRESS__
constexpr bool counts_freed_memory = true;
#else
constexpr bool counts_freed_memory = false;
#endif

// Returns memory that malloc has free, which it would otherwise hand out again without new pages, and makes large
// blocks go back when they are freed.
inline void return_freed_memory() {
  mallopt(M_MMAP_THRESHOLD, 1 << 16);
  malloc_trim(0);
}

// Bytes of pages with the process's own data, and its share of pages that it shares with other processes; without the
// pages of programs and libraries.
inline int64_t proportional_bytes() {
  std::ifstream file("/proc/self/smaps_rollup");
  int64_t kibibytes = 0;
  for (std::string line; std::getline(file, line);) {
    const auto colon = line.find(':');
    const auto field = line.substr(0, colon);
    if (field == "Pss_Anon" || field == "Pss_Shmem") kibibytes += std::stoll(line.substr(colon + 1));
  }
  return kibibytes << 10;
}

// Bytes of the process's own writable memory, used or not.
inline int64_t data_bytes() {
  std::ifstream file("/proc/self/status");
  int64_t kibibytes = 0;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("VmData:")) kibibytes = std::stoll(line.substr(line.find(':') + 1));
  }
  return kibibytes << 10;
}

// Scope in which the process gets at most this much more of that memory.
class DataLimit {
 public:
  explicit DataLimit(int64_t bytes) {
    getrlimit(RLIMIT_DATA, &before_);
    auto limit = before_;
    limit.rlim_cur = static_cast<rlim_t>(data_bytes() + bytes);
    setrlimit(RLIMIT_DATA, &limit);
  }
  ~DataLimit() { setrlimit(RLIMIT_DATA, &before_); }
  DataLimit(const DataLimit&) = delete;
  DataLimit& operator=(const DataLimit&) = delete;

 private:
  rlimit before_{};
};

}  // namespace shoal::test
