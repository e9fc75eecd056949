#pragma once
// Reading at given places of a file.

#include <cstdint>
#include <filesystem>
#include <string>

namespace shoal {

// Reads with system calls rather than through mapped memory: a file that is cut short or a disk that fails while it is
// read is an error then, not a signal, and pages that have been read do not count as this process's memory.
// CheckpointErrors name the file and the reason. Any number of threads.
class InputFile {
 public:
  explicit InputFile(std::filesystem::path path);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  int64_t size() const { return size_; }  // when it was opened
  const std::filesystem::path& path() const { return path_; }
  void read(void* to, int64_t size, int64_t offset) const;
  // Will be read soon: the disk may begin.
  void expect(int64_t size, int64_t offset) const;

 private:
  std::filesystem::path path_;
  int fd_ = -1;
  int64_t size_ = 0;
};

// A whole small file; CheckpointError where it is larger than `limit`.
std::string read_text(const std::filesystem::path& path, int64_t limit);

}  // namespace shoal
