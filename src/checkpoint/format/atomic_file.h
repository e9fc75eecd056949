#pragma once
// Files that appear complete or not at all.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace shoal {

// File that gets its name in complete() and disappears otherwise. Until then it is called NAME.tmp-HOST-PROCESS, where
// a long NAME is cut and has a checksum, and an older file NAME stays. The constructor removes unfinished copies of
// NAME by processes of this host that were killed. Errors are CheckpointErrors with file and reason.
class AtomicFile {
 public:
  // The file gets the permissions of the one that it replaces.
  explicit AtomicFile(std::filesystem::path path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, size_t size, size_t offset);
  // Syncs the file and renames it to its final name, which sync_folder() makes durable.
  void complete();
  const std::filesystem::path& path() const { return path_; }

 private:
  [[noreturn]] void fail(const char* action) const;

  std::filesystem::path path_;
  std::filesystem::path temporary_;
  int fd_ = -1;
  size_t begun_ = 0;  // bytes whose writeback has begun
  bool complete_ = false;
};

// Writes a small file, durable on return.
void write_atomically(const std::filesystem::path& path, std::string_view text);

// File that is meant by a path which the user has given: of a symbolic link the target, which need not exist, so that
// the link stays. CheckpointError for what is no regular file.
std::filesystem::path target_of(const std::filesystem::path& path);

// Makes names in the folder durable. No effect on file systems that cannot.
void sync_folder(const std::filesystem::path& folder);

// "cannot ACTION PATH: No space left on device", from errno.
[[noreturn]] void throw_system_error(const char* action, const std::filesystem::path& path);

}  // namespace shoal
