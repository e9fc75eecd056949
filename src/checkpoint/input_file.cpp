#include "checkpoint/input_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "checkpoint/atomic_file.h"
#include "shoal/checkpoint/checkpoint_error.h"

namespace shoal {

InputFile::InputFile(std::filesystem::path path) : path_(std::move(path)) {
  // Opening a named pipe would wait for a writer.
  fd_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd_ < 0) throw_system_error("open", path_);
  struct stat about {};
  const bool known = fstat(fd_, &about) == 0;
  if (known && S_ISREG(about.st_mode)) {
    size_ = about.st_size;
    return;
  }
  close(fd_);
  throw CheckpointError(fmt::format("{} is not a file", path_.string()));
}

InputFile::~InputFile() {
  close(fd_);
}

void InputFile::read(void* to, int64_t size, int64_t offset) const {
  auto* bytes = static_cast<char*>(to);
  while (size > 0) {
    const auto count = pread(fd_, bytes, static_cast<size_t>(size), static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw_system_error("read", path_);
    if (count == 0) throw CheckpointError(fmt::format("{} ends at byte {}; it was longer", path_.string(), offset));
    bytes += count;
    offset += count;
    size -= count;
  }
}

void InputFile::expect(int64_t size, int64_t offset) const {
  posix_fadvise(fd_, static_cast<off_t>(offset), static_cast<off_t>(size), POSIX_FADV_WILLNEED);
}

std::string read_text(const std::filesystem::path& path, int64_t limit) {
  const InputFile file(path);
  if (file.size() > limit) {
    throw CheckpointError(fmt::format("{}: {} bytes; at most {} are expected", path.string(), file.size(), limit));
  }
  std::string text(static_cast<size_t>(file.size()), '\0');
  file.read(text.data(), file.size(), 0);
  return text;
}

}  // namespace shoal
