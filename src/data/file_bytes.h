#pragma once
// Stream of a file's bytes, unpacked if it is a gzip file.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "base/input_file.h"

struct gzFile_s;

namespace shoal::data {

// Reads from beginning to end. UsageError, which names the file, if it is missing, not a regular file, unreadable, or
// named .gz without being a complete and intact gzip file.
class FileBytes {
 public:
  explicit FileBytes(const std::filesystem::path& file);

  // Reads up to `size` bytes; fewer only at the end.
  int64_t read(void* to, int64_t size);
  // Plausible maximum of the contents, given the bytes that the file takes on disk.
  int64_t most() const;
  [[noreturn]] void fail(const std::string& problem) const;

 private:
  int64_t read_packed(uint8_t* to, int64_t size);

  InputFile file_;
  std::unique_ptr<gzFile_s, int (*)(gzFile_s*)> packed_;  // nullptr: not packed
  int64_t offset_ = 0;                                    // in a plain file
};

}  // namespace shoal::data
