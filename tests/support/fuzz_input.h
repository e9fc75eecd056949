#pragma once
// File with the input of a libFuzzer target.

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <string>
#include <string_view>

#include "tests/support/temp_folder.h"

namespace shoal::test {

inline std::string_view fuzz_text(const uint8_t* data, size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

// Path of a file with these bytes; the same path in every call with this name.
inline std::string fuzz_file(const std::string& name, std::string_view bytes) {
  static const TempFolder folder;
  const auto path = folder.file(name);
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
  return path;
}

}  // namespace shoal::test
