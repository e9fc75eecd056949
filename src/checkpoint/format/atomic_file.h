#pragma once
// Files that are there completely or not at all.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace shoal {

// A file that takes its name when complete() is called, and vanishes otherwise: until then it is called
// NAME.tmp-HOST-PROCESS, and an older file of its name stays. What processes of this host that were killed have left of
// NAME in this way goes when the next one begins. All errors are CheckpointErrors with the file and the reason.
class AtomicFile {
 public:
  explicit AtomicFile(std::filesystem::path path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, size_t size, size_t offset);
  // Syncs it and gives it its name, which sync_folder() makes durable.
  void complete();
  const std::filesystem::path& path() const { return path_; }

 private:
  [[noreturn]] void fail(const char* action) const;

  std::filesystem::path path_;
  std::filesystem::path temporary_;
  int fd_ = -1;
  size_t begun_ = 0;  // bytes whose way to the disk has begun
  bool complete_ = false;
};

// A small file, durable when it returns.
void write_atomically(const std::filesystem::path& path, std::string_view text);

// Makes names in the folder durable. File systems that cannot are left alone.
void sync_folder(const std::filesystem::path& folder);

// "cannot ACTION PATH: No space left on device", from errno.
[[noreturn]] void throw_system_error(const char* action, const std::filesystem::path& path);

}  // namespace shoal
