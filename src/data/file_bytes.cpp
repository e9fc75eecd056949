#include "data/file_bytes.h"

#include <fmt/format.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>

#include "shoal/error.h"

namespace shoal::data {
namespace {

constexpr unsigned chunk = 1 << 20;

gzFile unpack(const InputFile& file) {
  if (file.path().extension() != ".gz") return nullptr;
  const int descriptor = dup(file.descriptor());
  const auto packed = descriptor < 0 ? nullptr : gzdopen(descriptor, "rb");
  if (packed == nullptr) throw UsageError(fmt::format("{}: out of descriptors or memory", file.path().string()));
  gzbuffer(packed, chunk);
  return packed;
}

}  // namespace

FileBytes::FileBytes(const std::filesystem::path& file)
    : file_(file, refuse_as<UsageError>), packed_(unpack(file_), gzclose) {}

void FileBytes::fail(const std::string& problem) const {
  throw UsageError(fmt::format("{}: {}", file_.path().string(), problem));
}

int64_t FileBytes::most() const {
  // Images and labels pack by factors of 2 to 10; gzip can reach 1000, and a sparse file any factor.
  constexpr int64_t factor = 100;
  constexpr int64_t always = int64_t{64} << 20;
  const auto most = factor * file_.stored() + always;
  return packed_ ? most : std::min(most, file_.size());
}

int64_t FileBytes::read(void* to, int64_t size) {
  auto* bytes = static_cast<uint8_t*>(to);
  int64_t done = 0;
  while (done < size) {
    const auto wanted = std::min<int64_t>(size - done, chunk);
    const auto count = packed_ ? read_packed(bytes + done, wanted) : file_.read_some(bytes + done, wanted, offset_);
    if (count == 0) break;
    offset_ += count;
    done += count;
  }
  return done;
}

int64_t FileBytes::read_packed(uint8_t* to, int64_t size) {
  auto* packed = packed_.get();
  const int count = gzread(packed, to, static_cast<unsigned>(size));
  // zlib passes a file that is not gzip through unchanged.
  if (gzdirect(packed) == 1) fail("not a gzip file although it is named .gz");
  int code = Z_OK;
  const char* message = gzerror(packed, &code);
  if (code == Z_BUF_ERROR) fail("truncated: the gzip data ends too early");
  if (count < 0 || code != Z_OK) fail(fmt::format("corrupt gzip data ({})", message));
  return count;
}

}  // namespace shoal::data
