#pragma once
// Memory that processes of one user on one host can share.

#include <cstddef>
#include <string>

namespace shoal::shm {

// Mapped file without a name in any file system. It disappears with the last process that maps it, however that process
// ends, and does not count against /dev/shm. Move-only.
class MemoryFile {
 public:
  MemoryFile() = default;
  // Returns `bytes` zeros; pages take memory once they are written.
  static MemoryFile create(size_t bytes);
  // Opens the file of process `pid` with descriptor `descriptor`, through /proc. std::runtime_error says why if there
  // is none, it belongs to another user, or it is not such a file of at least `bytes`.
  static MemoryFile open(int pid, int descriptor, size_t bytes);

  MemoryFile(MemoryFile&& other) noexcept;
  MemoryFile& operator=(MemoryFile&& other) noexcept;
  ~MemoryFile();

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  int descriptor() const { return descriptor_; }  // for open(); -1 in a process that has opened the file itself

  // Returns the pages of a range to the system; they read as zeros afterwards. Whole pages only.
  void discard(size_t offset, size_t bytes);

 private:
  MemoryFile(std::byte* data, size_t size, int descriptor);

  std::byte* data_ = nullptr;
  size_t size_ = 0;
  int descriptor_ = -1;
};

}  // namespace shoal::shm
