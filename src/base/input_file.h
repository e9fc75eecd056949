#pragma once
// Regular files from untrusted sources.

#include <cstdint>
#include <filesystem>
#include <string>

#include "base/refuse.h"

namespace shoal {

// Opens regular files only, and never blocks: named pipes, devices and folders are refused at once. Reads with system
// calls rather than through mapped memory: a truncated file or a failing disk is then an error rather than a signal,
// and pages that were read do not count as this process's memory. Refusals name file and reason. Any number of threads.
class InputFile {
 public:
  InputFile(std::filesystem::path path, Refuse refuse);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  int64_t size() const { return size_; }  // at the time of opening
  // Bytes that the file occupies on disk, which bounds what it is trusted with. A sparse file has few, whatever its
  // size.
  int64_t stored() const { return stored_; }
  const std::filesystem::path& path() const { return path_; }
  int descriptor() const { return fd_; }
  void read(void* to, int64_t size, int64_t offset) const;
  // Reads up to `size` bytes; 0 at the end of the file.
  int64_t read_some(void* to, int64_t size, int64_t offset) const;
  // Starts prefetching bytes that are about to be read.
  void expect(int64_t size, int64_t offset) const;

 private:
  [[noreturn]] void fail(const char* action) const;

  std::filesystem::path path_;
  Refuse refuse_;
  int fd_ = -1;
  int64_t size_ = 0;
  int64_t stored_ = 0;
};

// Reads a small text file; refuses one that is larger than `limit` or has holes.
std::string read_text(const std::filesystem::path& path, int64_t limit, Refuse refuse);

}  // namespace shoal
