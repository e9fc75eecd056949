#include "checkpoint/format/safetensors_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "base/printable.h"
#include "checkpoint/format/index.h"
#include "checkpoint/pt/pt_file.h"
#include "checkpoint/pt/zip_directory.h"
#include "shoal/error.h"

namespace shoal {
namespace {

// Its tensors by the names that slices have.
SafetensorsHeader header_of_pt(const InputFile& file) {
  SafetensorsHeader header;
  for (const auto& [name, found] : read_pt(file)) {
    const StoredTensor tensor{
        .name = name, .part = "model", .dtype = found.dtype, .shape = found.shape, .order = found.order};
    const Range all{0, tensor.numel()};
    const SafetensorsEntry entry{.dtype = find_safetensors_dtype(found.dtype),
                                 .shape = slice_shape(tensor, all),
                                 .offset = found.offset,
                                 .bytes = found.bytes,
                                 .record = found.record};
    if (!header.tensors.emplace(slice_key(tensor, all), entry).second) {
      throw CheckpointError(fmt::format("{}: two tensors are called {:.200}", file.path().string(), printable(name)));
    }
  }
  return header;
}

SafetensorsHeader read_header(const InputFile& file) {
  if (is_zip(file)) return header_of_pt(file);
  const auto subject = file.path().string();
  unsigned char length_bytes[8] = {};
  const auto begin = static_cast<int64_t>(sizeof length_bytes);
  file.read(length_bytes, std::min(begin, file.size()), 0);
  constexpr unsigned char old_torch[] = {0x80, 0x02, 0x8a, 0x0a, 0x6c, 0xfc, 0x9c, 0x46};
  if (std::equal(std::begin(old_torch), std::end(old_torch), length_bytes)) {
    throw CheckpointError(subject +
                          ": a .pt file in the format before PyTorch 1.6: torch.load and torch.save it in Python");
  }
  const auto length = parse_safetensors_length(length_bytes, file.size(), subject);
  std::string text(static_cast<size_t>(length), '\0');
  file.read(text.data(), length, begin);
  // The text itself is in memory, too.
  const auto limit = std::max<int64_t>(0, file.stored() - length) + json_allowance;
  return parse_safetensors_header(text, file.size(), limit, subject);
}

}  // namespace

SafetensorsReader::SafetensorsReader(const std::filesystem::path& path)
    : file_(path, refuse_as<CheckpointError>), header_(read_header(file_)) {}

const SafetensorsEntry& SafetensorsReader::entry(const std::string& name) const {
  const auto found = header_.tensors.find(name);
  if (found == header_.tensors.end()) {
    throw CheckpointError(fmt::format("{}: no tensor {:.200}", file_.path().string(), name));
  }
  return found->second;
}

}  // namespace shoal
