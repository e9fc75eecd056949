#pragma once
// Regular files that somebody else may have made.

#include <cstdint>
#include <filesystem>
#include <string>

#include "base/refuse.h"

namespace shoal {

// Opens regular files only, and never waits: a named pipe, a device and a folder are refused at once. Reads at given
// places with system calls rather than through mapped memory: a file that is cut short or a disk that fails while it is
// read is an error then, not a signal, and pages that have been read do not count as this process's memory.
// Refusals name the file and the reason. Any number of threads.
class InputFile {
 public:
  InputFile(std::filesystem::path path, Refuse refuse);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  int64_t size() const { return size_; }  // when it was opened
  // Bytes that its disk really holds: what it may be trusted with. A sparse file has few of them, whatever its size.
  int64_t stored() const { return stored_; }
  const std::filesystem::path& path() const { return path_; }
  int descriptor() const { return fd_; }
  void read(void* to, int64_t size, int64_t offset) const;
  // Up to `size` bytes; 0 at the end of the file.
  int64_t read_some(void* to, int64_t size, int64_t offset) const;
  // Will be read soon: the disk may begin.
  void expect(int64_t size, int64_t offset) const;

 private:
  [[noreturn]] void fail(const char* action) const;

  std::filesystem::path path_;
  Refuse refuse_;
  int fd_ = -1;
  int64_t size_ = 0;
  int64_t stored_ = 0;
};

// InputFile::stored() of a file that need not be opened; 0 where there is no regular file.
int64_t stored_bytes(const std::filesystem::path& path);

// A whole small file of text; refused where it is larger than `limit` or has holes.
std::string read_text(const std::filesystem::path& path, int64_t limit, Refuse refuse);

}  // namespace shoal
