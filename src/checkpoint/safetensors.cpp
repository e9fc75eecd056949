#include "checkpoint/safetensors.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
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

  void write(const void* data, size_t size, size_t offset) {
    const auto* bytes = static_cast<const char*>(data);
    while (size > 0) {
      const auto written = ::pwrite(fd_, bytes, size, static_cast<off_t>(offset));
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) fail("write");
      bytes += written;
      offset += static_cast<size_t>(written);
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

struct SafetensorsFile::State {
  explicit State(const std::string& path) : file(path) {}

  struct Place {
    size_t dtype = 0;
    SafetensorsFile::Entry entry;
    size_t offset = 0;  // in the file
    bool written = false;
  };
  AtomicFile file;
  std::map<std::string, Place> places{};
};

SafetensorsFile::SafetensorsFile(const std::string& path, const std::vector<Entry>& entries,
                                 const std::map<std::string, std::string>& metadata) {
  std::vector<State::Place> places;
  std::set<std::string> names = {"__metadata__"};
  for (const auto& entry : entries) {
    if (!names.insert(entry.name).second) {
      throw UsageError(fmt::format("safetensors: two tensors named {}", entry.name));
    }
    places.push_back({place_of(entry.name, entry.dtype), entry});
  }
  std::sort(places.begin(), places.end(), [](const auto& a, const auto& b) {
    return std::tie(a.dtype, a.entry.name) < std::tie(b.dtype, b.entry.name);
  });

  nlohmann::ordered_json header;
  if (!metadata.empty()) header["__metadata__"] = metadata;
  size_t offset = 0;
  for (auto& place : places) {
    const auto& entry = place.entry;
    const auto bytes = static_cast<size_t>(c10::multiply_integers(entry.sizes)) * c10::elementSize(entry.dtype);
    place.offset = offset;
    offset += bytes;
    header[entry.name] = {
        {"dtype", dtypes[place.dtype].name}, {"shape", entry.sizes}, {"data_offsets", {place.offset, offset}}};
  }
  std::string text = header.empty() ? "{}" : header.dump();
  constexpr size_t alignment = 8;
  text.resize((text.size() + alignment - 1) / alignment * alignment, ' ');

  state_ = std::make_unique<State>(path);
  const uint64_t size = text.size();  // little endian, as all machines that libtorch supports
  state_->file.write(&size, sizeof size, 0);
  state_->file.write(text.data(), text.size(), sizeof size);
  for (auto& place : places) {
    place.offset += sizeof size + text.size();
    state_->places.emplace(place.entry.name, std::move(place));
  }
}

SafetensorsFile::~SafetensorsFile() = default;

void SafetensorsFile::write(const std::string& name, const at::Tensor& tensor) {
  const auto found = state_->places.find(name);
  if (found == state_->places.end() || found->second.entry.dtype != tensor.scalar_type() ||
      tensor.sizes() != at::IntArrayRef(found->second.entry.sizes)) {
    throw UsageError(fmt::format("safetensors: {} {} [{}] is not what the file was made for", name,
                                 c10::toString(tensor.scalar_type()), fmt::join(tensor.sizes(), ", ")));
  }
  const auto plain = tensor.detach().to(at::kCPU).contiguous();
  state_->file.write(plain.data_ptr(), plain.nbytes(), found->second.offset);
  found->second.written = true;
}

void SafetensorsFile::complete() {
  for (const auto& [name, place] : state_->places) {
    if (!place.written) throw UsageError(fmt::format("safetensors: {} was not written", name));
  }
  state_->file.complete();
}

void save_safetensors(const std::string& path, const NamedTensors& tensors,
                      const std::map<std::string, std::string>& metadata) {
  std::vector<SafetensorsFile::Entry> entries;
  for (const auto& [name, tensor] : tensors) entries.push_back({name, tensor.scalar_type(), tensor.sizes().vec()});
  SafetensorsFile file(path, entries, metadata);
  for (const auto& [name, tensor] : tensors) file.write(name, tensor);
  file.complete();
}

}  // namespace shoal
