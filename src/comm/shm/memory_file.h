#pragma once
// Memory that processes of one user on one host share.

#include <cstddef>
#include <string>

namespace shoal {

// A mapped file without a name in any file system: it is gone with the last process that maps it, whatever way that
// process ends, and does not count against /dev/shm. Move-only.
class MemoryFile {
 public:
  MemoryFile() = default;
  // `bytes` zeroes; pages take memory once they are written.
  static MemoryFile create(size_t bytes);
  // The file behind descriptor `descriptor` of process `pid`, through /proc. Throws std::runtime_error that says why
  // when there is none, it belongs to another user, or it is not such a file of at least `bytes`.
  static MemoryFile open(int pid, int descriptor, size_t bytes);

  MemoryFile(MemoryFile&& other) noexcept;
  MemoryFile& operator=(MemoryFile&& other) noexcept;
  ~MemoryFile();

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  int descriptor() const { return descriptor_; }  // what open() needs; -1 in a process that has opened it

  // Gives the pages of a range back to the system; it reads as zeroes afterwards. Whole pages only.
  void discard(size_t offset, size_t bytes);

 private:
  MemoryFile(std::byte* data, size_t size, int descriptor);

  std::byte* data_ = nullptr;
  size_t size_ = 0;
  int descriptor_ = -1;
};

}  // namespace shoal
