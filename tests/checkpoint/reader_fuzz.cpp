// A target for libFuzzer: whatever the bytes, they are read or refused with a CheckpointError (BEY05).
//
// Bytes that begin with { are an index, of ours or, with a weight_map, of Hugging Face's, beside a good file of values;
// ours gets a right checksum, which no mutation would find. All others are a safetensors file.

#include <fmt/format.h>
#include <torch/types.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

#include "checkpoint/crc32.h"
#include "checkpoint/foreign_index.h"
#include "checkpoint/index.h"
#include "checkpoint/reader.h"
#include "checkpoint/safetensors.h"
#include "shoal/checkpoint/checkpoint_error.h"
#include "tests/support/temp_folder.h"

namespace shoal {
namespace {

void write_file(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

std::string with_checksum(std::string text) {
  const auto old = text.rfind(",\"crc32\":\"");
  text.resize(std::min({text.size(), old, text.find_last_of('}')}));
  return text + fmt::format(",\"crc32\":\"{:08x}\"}}\n", crc32(text.data(), text.size()));
}

void read_all(const std::filesystem::path& path) {
  try {
    const CheckpointReader reader(path, /*verify=*/false);  // no mutation would find the values' checksums either
    for (const auto& [name, tensor] : reader.index().tensors) {
      if (tensor.dtype != at::ScalarType::Undefined) reader.read(name);
    }
  } catch (const CheckpointError&) {
  }
}

}  // namespace
}  // namespace shoal

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace shoal;
  static const test::TempFolder folder;
  static const bool made = [] {
    save_safetensors(
        folder.file("f.safetensors"),
        {{"a", at::ones({2, 3})}, {"b[0:2]", at::ones({2}, at::kBFloat16)}, {"b[2:4]", at::ones({2}, at::kBFloat16)}},
        {});
    return true;
  }();
  (void)made;
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  if (!bytes.starts_with('{')) {
    write_file(folder.file("x.safetensors"), bytes);
    read_all(folder.path() / "x.safetensors");
  } else if (bytes.find("weight_map") != std::string::npos) {
    write_file(folder.file(sharded_name), bytes);
    read_all(folder.path() / sharded_name);
  } else {
    write_file(folder.file(index_name), with_checksum(bytes));
    read_all(folder.path() / index_name);
  }
  return 0;
}
