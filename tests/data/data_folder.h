#pragma once
// Data files that tests write, and the errors that they expect for bad ones.

#include <zlib.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "shoal/error.h"
#include "tests/support/refusal.h"
#include "tests/support/temp_folder.h"

namespace shoal::data {

using test::refusal;
using Bytes = std::vector<uint8_t>;

class DataFolder : public test::TempFolder {
 public:
  std::filesystem::path write(const std::string& name, const Bytes& bytes) const {
    std::ofstream stream(path() / name, std::ios::binary);
    stream.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    return path() / name;
  }

  std::filesystem::path write_gzip(const std::string& name, const Bytes& bytes) const {
    const gzFile file = gzopen((path() / name).c_str(), "wb");
    gzwrite(file, bytes.data(), static_cast<unsigned>(bytes.size()));
    gzclose(file);
    return path() / name;
  }
};

// IDX file whose bytes count up from 0, modulo `modulus`.
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

}  // namespace shoal::data
