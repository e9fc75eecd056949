// libFuzzer target: any bytes are either a checkpoint's index or refused with a CheckpointError (BEY05). With a
// weight_map they are a Hugging Face index, else one of ours, which gets a correct checksum, because no mutation would
// find one. A valid file of values lies beside it.

#include <fmt/format.h>
#include <torch/types.h>

#include <algorithm>

#include "checkpoint/format/crc32.h"
#include "checkpoint/format/foreign_index.h"
#include "checkpoint/format/index.h"
#include "checkpoint/format/safetensors.h"
#include "tests/checkpoint/read_all.h"
#include "tests/support/fuzz_input.h"

namespace shoal {
namespace {

std::string with_checksum(std::string text) {
  const auto old = text.rfind(",\"crc32\":\"");
  text.resize(std::min({text.size(), old, text.find_last_of('}')}));
  return text + fmt::format(",\"crc32\":\"{:08x}\"}}\n", crc32(text.data(), text.size()));
}

}  // namespace
}  // namespace shoal

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace shoal;
  static const bool made = [] {
    save_safetensors(
        test::fuzz_file("f.safetensors", ""),
        {{"a", at::ones({2, 3})}, {"b[0:2]", at::ones({2}, at::kBFloat16)}, {"b[2:4]", at::ones({2}, at::kBFloat16)}},
        {});
    return true;
  }();
  (void)made;
  const std::string bytes(test::fuzz_text(data, size));
  const bool foreign = bytes.find("weight_map") != std::string::npos;
  test::read_all(foreign ? test::fuzz_file(sharded_name, bytes) : test::fuzz_file(index_name, with_checksum(bytes)));
  return 0;
}
