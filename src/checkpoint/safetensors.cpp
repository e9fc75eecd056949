#include "checkpoint/safetensors.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "shoal/base/error.h"

namespace shoal {
namespace {

// The format's names, in the order in which its own writer places dtypes (wide ones first).
struct Dtype {
  at::ScalarType type;
  const char* name;
};
constexpr Dtype dtypes[] = {{at::kLong, "I64"},  {at::kDouble, "F64"}, {at::kComplexFloat, "C64"},
                            {at::kFloat, "F32"}, {at::kInt, "I32"},    {at::kBFloat16, "BF16"},
                            {at::kHalf, "F16"},  {at::kShort, "I16"},  {at::kChar, "I8"},
                            {at::kByte, "U8"},   {at::kBool, "BOOL"}};

size_t place_of(const std::string& name, at::ScalarType type) {
  const auto* found =
      std::find_if(std::begin(dtypes), std::end(dtypes), [type](const Dtype& dtype) { return dtype.type == type; });
  if (found == std::end(dtypes)) {
    throw UsageError(fmt::format("safetensors has no dtype {} (tensor {})", c10::toString(type), name));
  }
  return static_cast<size_t>(found - std::begin(dtypes));
}

// A file that takes its name when complete() is called, and vanishes otherwise.
class AtomicFile {
 public:
  explicit AtomicFile(std::string path)
      : path_(std::move(path)), temporary_(fmt::format("{}.tmp-{}", path_, getpid())) {
    fd_ = open(temporary_.c_str(), O_CREAT | O_WRONLY | O_TRUNC | O_CLOEXEC, 0644);
    if (fd_ < 0) fail("create");
  }
  ~AtomicFile() {
    if (fd_ >= 0) close(fd_);
    if (!complete_) unlink(temporary_.c_str());
  }
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, size_t size) {
    const auto* bytes = static_cast<const char*>(data);
    while (size > 0) {
      const auto written = ::write(fd_, bytes, size);
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) fail("write");
      bytes += written;
      size -= static_cast<size_t>(written);
    }
  }

  void complete() {
    if (fsync(fd_) != 0) fail("sync");
    if (rename(temporary_.c_str(), path_.c_str()) != 0) fail("rename");
    complete_ = true;
    auto folder = std::filesystem::path(path_).parent_path();
    const int fd = open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return;
    fsync(fd);  // makes the new name durable; some file systems cannot
    close(fd);
  }

 private:
  [[noreturn]] void fail(const char* action) const {
    throw UsageError(fmt::format("cannot {} {}: {}", action, temporary_, std::strerror(errno)));
  }

  std::string path_;
  std::string temporary_;
  int fd_ = -1;
  bool complete_ = false;
};

}  // namespace

void save_safetensors(const std::string& path, const NamedTensors& tensors,
                      const std::map<std::string, std::string>& metadata) {
  struct Entry {
    size_t dtype;
    const std::string* name;
    const at::Tensor* tensor;
  };
  std::vector<Entry> entries;
  std::set<std::string> names = {"__metadata__"};
  for (const auto& [name, tensor] : tensors) {
    if (!names.insert(name).second) throw UsageError(fmt::format("safetensors: two tensors named {}", name));
    entries.push_back({place_of(name, tensor.scalar_type()), &name, &tensor});
  }
  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return std::tie(a.dtype, *a.name) < std::tie(b.dtype, *b.name); });

  nlohmann::ordered_json header;
  if (!metadata.empty()) header["__metadata__"] = metadata;
  size_t offset = 0;
  for (const auto& entry : entries) {
    const auto end = offset + entry.tensor->nbytes();
    header[*entry.name] = {
        {"dtype", dtypes[entry.dtype].name}, {"shape", entry.tensor->sizes().vec()}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.empty() ? "{}" : header.dump();
  constexpr size_t alignment = 8;
  text.resize((text.size() + alignment - 1) / alignment * alignment, ' ');

  AtomicFile file(path);
  const uint64_t size = text.size();  // little endian, as all machines that libtorch supports
  file.write(&size, sizeof size);
  file.write(text.data(), text.size());
  for (const auto& entry : entries) {
    const auto plain = entry.tensor->detach().to(at::kCPU).contiguous();
    file.write(plain.data_ptr(), plain.nbytes());
  }
  file.complete();
}

}  // namespace shoal
