#include "checkpoint/format/safetensors.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/format/atomic_file.h"
#include "checkpoint/format/safetensors_format.h"
#include "checkpoint/saving/pieces.h"
#include "shoal/error.h"

namespace shoal {

struct SafetensorsFile::State {
  explicit State(const std::string& path) : file(path) {}

  struct Place {
    const SafetensorsDtype* dtype = nullptr;
    SafetensorsFile::Entry entry;
    int64_t offset = 0;  // in the file
    int64_t bytes = 0;
    int64_t written = 0;  // bytes of it
  };
  Place& at(const std::string& name) {
    const auto found = places.find(name);
    if (found == places.end())
      throw UsageError(fmt::format("safetensors: {} was not declared when the file was opened", name));
    return found->second;
  }

  AtomicFile file;
  std::map<std::string, Place> places{};
  int64_t size = 0;
};

SafetensorsFile::SafetensorsFile(const std::string& path, const std::vector<Entry>& entries,
                                 const std::map<std::string, std::string>& metadata) {
  std::vector<State::Place> places;
  std::set<std::string> names;
  for (const auto& entry : entries) {
    if (entry.name == safetensors_metadata) {
      throw UsageError(fmt::format(
          "safetensors: a tensor cannot be named {}, which the format uses itself; give it another name", entry.name));
    }
    if (!names.insert(entry.name).second) {
      throw UsageError(fmt::format("safetensors: two tensors named {}", entry.name));
    }
    const auto* dtype = find_safetensors_dtype(entry.dtype);
    if (dtype == nullptr) {
      throw UsageError(fmt::format("safetensors has no dtype {} (tensor {})", c10::toString(entry.dtype), entry.name));
    }
    places.push_back({dtype, entry});
  }
  std::sort(places.begin(), places.end(), [](const auto& a, const auto& b) {
    return std::tie(a.dtype, a.entry.name) < std::tie(b.dtype, b.entry.name);
  });

  nlohmann::ordered_json header;
  if (!metadata.empty()) header[safetensors_metadata] = metadata;
  int64_t offset = 0;
  for (auto& place : places) {
    place.bytes = c10::multiply_integers(place.entry.sizes) * place.dtype->bits / 8;
    place.offset = offset;
    offset += place.bytes;
    header[place.entry.name] = {
        {"dtype", place.dtype->name}, {"shape", place.entry.sizes}, {"data_offsets", {place.offset, offset}}};
  }
  std::string text = header.empty() ? "{}" : header.dump();
  constexpr size_t alignment = 8;
  text.resize((text.size() + alignment - 1) / alignment * alignment, ' ');
  if (text.size() > max_safetensors_header) {
    throw UsageError(fmt::format("{}: {} tensors need a header of {} bytes; the format allows {}", path, places.size(),
                                 text.size(), max_safetensors_header));
  }

  state_ = std::make_unique<State>(path);
  const uint64_t size = text.size();  // little endian, as on all machines that libtorch supports
  state_->file.write(&size, sizeof size, 0);
  state_->file.write(text.data(), text.size(), sizeof size);
  const auto data_begin = static_cast<int64_t>(sizeof size + text.size());
  state_->size = data_begin + offset;
  for (auto& place : places) {
    place.offset += data_begin;
    state_->places.emplace(place.entry.name, std::move(place));
  }
}

SafetensorsFile::~SafetensorsFile() = default;

void SafetensorsFile::write(const std::string& name, const at::Tensor& tensor) {
  const auto& entry = state_->at(name).entry;
  if (entry.dtype != tensor.scalar_type() || tensor.sizes() != at::IntArrayRef(entry.sizes)) {
    throw UsageError(fmt::format("safetensors: {} {} [{}] does not match the declared tensors", name,
                                 c10::toString(tensor.scalar_type()), fmt::join(tensor.sizes(), ", ")));
  }
  for_each_piece(tensor,
                 [&](const void* data, int64_t first, int64_t size) { write_elements(name, first, data, size); });
}

void SafetensorsFile::write_elements(const std::string& name, int64_t first, const void* data, int64_t size) {
  auto& place = state_->at(name);
  const auto begin = first * place.dtype->bits / 8;
  if (begin < 0 || size > place.bytes - begin) {
    throw UsageError(fmt::format("safetensors: {} bytes from element {} on go beyond {}", size, first, name));
  }
  state_->file.write(data, static_cast<size_t>(size), static_cast<size_t>(place.offset + begin));
  place.written += size;
}

void SafetensorsFile::complete() {
  for (const auto& [name, place] : state_->places) {
    if (place.written < place.bytes) throw UsageError(fmt::format("safetensors: {} was not written", name));
  }
  state_->file.complete();
}

int64_t SafetensorsFile::size() const {
  return state_->size;
}

void save_safetensors(const std::string& path, const NamedTensors& tensors,
                      const std::map<std::string, std::string>& metadata) {
  std::vector<SafetensorsFile::Entry> entries;
  for (const auto& [name, tensor] : tensors) entries.push_back({name, tensor.scalar_type(), tensor.sizes().vec()});
  const auto target = target_of(path);
  SafetensorsFile file(target, entries, metadata);
  for (const auto& [name, tensor] : tensors) file.write(name, tensor);
  file.complete();
  sync_folder(target.parent_path());
}

}  // namespace shoal
