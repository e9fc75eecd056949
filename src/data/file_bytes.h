#pragma once
// The bytes of a file, unpacked where it is a gzip file, as they are asked for.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "base/input_file.h"

struct gzFile_s;

namespace shoal::data {

// Reads from the beginning to the end. Throws UsageError, naming the file, where it is missing, no regular file,
// unreadable, or named .gz without being a complete and intact gzip file.
class FileBytes {
 public:
  explicit FileBytes(const std::filesystem::path& file);

  // Up to `size` bytes, less only at the end.
  int64_t read(void* to, int64_t size);
  // What the file may be believed to hold, for the bytes that it takes on its disk.
  int64_t most() const;
  [[noreturn]] void fail(const std::string& problem) const;

 private:
  int64_t read_packed(uint8_t* to, int64_t size);

  InputFile file_;
  std::unique_ptr<gzFile_s, int (*)(gzFile_s*)> packed_;  // null: not packed
  int64_t offset_ = 0;                                    // of a plain file
};

}  // namespace shoal::data
