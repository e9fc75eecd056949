#include "base/input_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace shoal {
namespace {

int64_t stored_of(const struct stat& about) {
  constexpr int64_t block = 512;  // unit of st_blocks, whatever the disk's block size
  return std::min<int64_t>(about.st_size, block * static_cast<int64_t>(about.st_blocks));
}

}  // namespace

InputFile::InputFile(std::filesystem::path path, Refuse refuse) : path_(std::move(path)), refuse_(refuse) {
  // O_NONBLOCK, because opening a named pipe would wait for a writer.
  fd_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (fd_ < 0) fail("open");
  struct stat about {};
  if (fstat(fd_, &about) == 0 && S_ISREG(about.st_mode)) {
    size_ = about.st_size;
    stored_ = stored_of(about);
    return;
  }
  close(fd_);
  refuse_(fmt::format("{} is not a regular file", path_.string()));
}

InputFile::~InputFile() {
  close(fd_);
}

void InputFile::fail(const char* action) const {
  refuse_(fmt::format("cannot {} {}: {}", action, path_.string(), std::strerror(errno)));
  std::abort();  // refuse_ throws
}

int64_t InputFile::read_some(void* to, int64_t size, int64_t offset) const {
  while (true) {
    const auto count = pread(fd_, to, static_cast<size_t>(size), static_cast<off_t>(offset));
    if (count >= 0) return count;
    if (errno != EINTR) fail("read");
  }
}

void InputFile::read(void* to, int64_t size, int64_t offset) const {
  auto* bytes = static_cast<char*>(to);
  while (size > 0) {
    const auto count = read_some(bytes, size, offset);
    if (count == 0) refuse_(fmt::format("{} ends at byte {}; it was longer", path_.string(), offset));
    bytes += count;
    offset += count;
    size -= count;
  }
}

void InputFile::expect(int64_t size, int64_t offset) const {
  posix_fadvise(fd_, static_cast<off_t>(offset), static_cast<off_t>(size), POSIX_FADV_WILLNEED);
}

std::string read_text(const std::filesystem::path& path, int64_t limit, Refuse refuse) {
  const InputFile file(path, refuse);
  if (file.size() > limit) {
    refuse(fmt::format("{}: {} bytes; at most {} are expected", path.string(), file.size(), limit));
  }
  std::string text;
  text.reserve(static_cast<size_t>(file.stored()));
  std::vector<char> piece(static_cast<size_t>(std::min(file.size(), int64_t{1} << 20)));
  for (int64_t offset = 0; offset < file.size();) {
    const auto count = static_cast<size_t>(std::min<int64_t>(static_cast<int64_t>(piece.size()), file.size() - offset));
    file.read(piece.data(), static_cast<int64_t>(count), offset);
    if (std::memchr(piece.data(), 0, count) != nullptr) {
      refuse(fmt::format("{} is not text: it has a byte of value 0, as the holes of a sparse file", path.string()));
    }
    text.append(piece.data(), count);
    offset += static_cast<int64_t>(count);
  }
  return text;
}

}  // namespace shoal
