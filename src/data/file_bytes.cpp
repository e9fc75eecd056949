#include "data/file_bytes.h"

#include <fmt/format.h>
#include <zlib.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <memory>
#include <system_error>

#include "shoal/base/error.h"

namespace shoal::data {
namespace {

[[noreturn]] void fail(const std::filesystem::path& file, const std::string& problem) {
  throw UsageError(fmt::format("{}: {}", file.string(), problem));
}

std::vector<uint8_t> read_gzip(const std::filesystem::path& file) {
  const std::unique_ptr<gzFile_s, int (*)(gzFile)> gz(gzopen(file.c_str(), "rb"), gzclose);
  if (!gz) fail(file, std::strerror(errno));
  constexpr unsigned chunk = 1 << 20;
  gzbuffer(gz.get(), chunk);
  std::vector<uint8_t> bytes;
  while (true) {
    const size_t before = bytes.size();
    bytes.resize(before + chunk);
    const int count = gzread(gz.get(), bytes.data() + before, chunk);
    // zlib passes what is no gzip file through as it is.
    if (gzdirect(gz.get()) == 1) fail(file, "not a gzip file although it is named .gz");
    int code = Z_OK;
    const char* message = gzerror(gz.get(), &code);
    if (code == Z_BUF_ERROR) fail(file, "truncated: the gzip data ends too early");
    if (count < 0 || code != Z_OK) fail(file, fmt::format("corrupt gzip data ({})", message));
    bytes.resize(before + count);
    if (count == 0) return bytes;
  }
}

std::vector<uint8_t> read_plain(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  std::vector<uint8_t> bytes(std::filesystem::file_size(file));
  stream.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  if (!stream) fail(file, std::strerror(errno));
  return bytes;
}

}  // namespace

std::vector<uint8_t> read_file(const std::filesystem::path& file) {
  std::error_code error;
  if (!std::filesystem::exists(file, error)) fail(file, "no such file");
  if (!std::filesystem::is_regular_file(file, error)) fail(file, "not a regular file");
  return file.extension() == ".gz" ? read_gzip(file) : read_plain(file);
}

}  // namespace shoal::data
