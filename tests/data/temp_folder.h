#pragma once
// Files that a test makes, and the messages that it expects of bad ones.

#include <stdlib.h>
#include <zlib.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "shoal/base/error.h"

namespace shoal::data {

using Bytes = std::vector<uint8_t>;

// A folder that is gone with the object.
class TempFolder {
 public:
  TempFolder() {
    auto name = (std::filesystem::temp_directory_path() / "shoal-data-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("cannot make " + name);
    path_ = name;
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  ~TempFolder() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }

  const std::filesystem::path& path() const { return path_; }

  std::filesystem::path write(const std::string& name, const Bytes& bytes) const {
    std::ofstream stream(path_ / name, std::ios::binary);
    stream.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    return path_ / name;
  }

  std::filesystem::path write_gzip(const std::string& name, const Bytes& bytes) const {
    const gzFile file = gzopen((path_ / name).c_str(), "wb");
    gzwrite(file, bytes.data(), static_cast<unsigned>(bytes.size()));
    gzclose(file);
    return path_ / name;
  }

 private:
  std::filesystem::path path_;
};

// An IDX file whose bytes count up from 0, modulo `modulus`.
inline Bytes idx(const std::vector<uint32_t>& sizes, uint32_t modulus = 256) {
  Bytes bytes{0, 0, 8, static_cast<uint8_t>(sizes.size())};
  uint64_t count = 1;
  for (const uint32_t size : sizes) {
    for (int shift = 24; shift >= 0; shift -= 8) bytes.push_back(static_cast<uint8_t>(size >> shift));
    count *= size;
  }
  for (uint64_t i = 0; i < count; ++i) bytes.push_back(static_cast<uint8_t>(i % modulus));
  return bytes;
}

// The message of the UsageError that `function` throws.
template <class Function>
std::string usage_error_of(Function function) {
  try {
    function();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "(no UsageError)";
}

}  // namespace shoal::data
