#include "comm/shm/memory_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace shoal::shm {
namespace {

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error(fmt::format("{}: {}", what, std::strerror(errno)));
}

std::byte* map(int descriptor, size_t bytes) {
  // Not reserved, because arenas are larger than the part that is used.
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
  return data == MAP_FAILED ? nullptr : static_cast<std::byte*>(data);
}

}  // namespace

MemoryFile::MemoryFile(std::byte* data, size_t size, int descriptor)
    : data_(data), size_(size), descriptor_(descriptor) {}

MemoryFile MemoryFile::create(size_t bytes) {
  // Beyond this limit the system would kill the process with SIGXFSZ.
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && bytes > limit.rlim_cur) {
    throw std::runtime_error(fmt::format("{} bytes, and a file may have {} here (ulimit -f)", bytes, limit.rlim_cur));
  }
  const int descriptor = memfd_create("shoal", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (descriptor < 0) fail("memfd_create");
  // Readable by the owner only, and sealed, so that nobody can truncate it under a reader.
  std::byte* data = nullptr;
  if (fchmod(descriptor, 0600) == 0 && ftruncate(descriptor, static_cast<off_t>(bytes)) == 0 &&
      fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0) {
    data = map(descriptor, bytes);
  }
  if (data == nullptr) {
    const int error = errno;
    close(descriptor);
    errno = error;
    fail(fmt::format("shared memory of {} bytes", bytes));
  }
  return {data, bytes, descriptor};
}

MemoryFile MemoryFile::open(int pid, int descriptor, size_t bytes) {
  const auto path = fmt::format("/proc/{}/fd/{}", pid, descriptor);
  const int own = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (own < 0) fail("open " + path);
  struct stat status {};
  // Only memory files have seals, so a descriptor of the same number that now refers to something else is refused.
  const bool valid = fstat(own, &status) == 0 && status.st_uid == geteuid() && fcntl(own, F_GET_SEALS) >= 0 &&
                     static_cast<size_t>(status.st_size) >= bytes;
  std::byte* data = valid ? map(own, bytes) : nullptr;
  const int error = errno;
  close(own);
  if (!valid) throw std::runtime_error(path + " is not a memory file of this user");
  if (data == nullptr) {
    errno = error;
    fail("map " + path);
  }
  return {data, bytes, -1};
}

MemoryFile::MemoryFile(MemoryFile&& other) noexcept {
  *this = std::move(other);
}

MemoryFile& MemoryFile::operator=(MemoryFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

MemoryFile::~MemoryFile() {
  if (data_ != nullptr) munmap(data_, size_);
  if (descriptor_ >= 0) close(descriptor_);
}

void MemoryFile::discard(size_t offset, size_t bytes) {
  if (madvise(data_ + offset, bytes, MADV_REMOVE) != 0) std::memset(data_ + offset, 0, bytes);
}

}  // namespace shoal::shm
