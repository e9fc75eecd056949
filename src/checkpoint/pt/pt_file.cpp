#include "checkpoint/pt/pt_file.h"

#include <caffe2/serialize/inline_container.h>
#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <numeric>
#include <optional>
#include <string_view>

#include "base/printable.h"
#include "checkpoint/format/atomic_file.h"
#include "checkpoint/format/crc32.h"
#include "checkpoint/format/safetensors_format.h"
#include "checkpoint/pt/pickle.h"
#include "checkpoint/pt/unpickle.h"
#include "checkpoint/pt/zip_directory.h"
#include "shoal/error.h"

namespace shoal {
namespace {

constexpr const char* pickle_name = "/data.pkl";
constexpr int64_t longest_pickle = int64_t{64} << 20;

// Dimensions, the slowest first, if the elements lie close together; throws nothing.
std::optional<std::vector<int64_t>> dense_order(const PickledTensor& tensor) {
  std::vector<int64_t> order(tensor.sizes.size());
  std::iota(order.begin(), order.end(), 0);
  const auto counts = [&](int64_t dimension) { return tensor.sizes[dimension] > 1; };
  // Those of one element lie anywhere; they stay in front.
  const auto behind = std::stable_partition(order.begin(), order.end(), [&](int64_t d) { return !counts(d); });
  std::stable_sort(behind, order.end(), [&](int64_t a, int64_t b) { return tensor.strides[a] > tensor.strides[b]; });
  int64_t step = 1;
  for (auto d = order.rbegin(); d != order.rend() && counts(*d); ++d) {
    if (tensor.strides[*d] != step) return std::nullopt;
    step *= tensor.sizes[*d];
  }
  const bool row_major = std::is_sorted(behind, order.end());
  return row_major ? std::vector<int64_t>() : order;
}

class PtReader {
 public:
  explicit PtReader(const InputFile& file)
      : file_(file), subject_(file.path().string()), records_(zip_directory(file)) {}

  std::map<std::string, PtTensor> tensors() {
    const auto pickle = std::find_if(records_.begin(), records_.end(),
                                     [](const auto& record) { return record.first.ends_with(pickle_name); });
    if (pickle == records_.end()) refuse("a zip file without the pickle that torch.save writes");
    root_ = pickle->first.substr(0, pickle->first.size() - std::string_view(pickle_name).size());
    if (records_.contains(root_ + "/byteorder") && text_of(root_ + "/byteorder", 16) != "little") {
      refuse("was written on a big-endian machine");
    }
    std::map<std::string, PtTensor> tensors;
    for (const auto& found : unpickle_tensors(text_of(pickle->first, longest_pickle), subject_)) {
      tensors.emplace(found.name, place(found));
    }
    return tensors;
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    throw CheckpointError(fmt::format("{}: {}", subject_, what));
  }
  [[noreturn]] void refuse(const PickledTensor& tensor, const char* what) const {
    refuse(fmt::format("tensor {:.200} {}", printable(tensor.name), what));
  }

  std::string text_of(const std::string& name, int64_t limit) const {
    const auto& record = records_.at(name);
    if (record.bytes > limit) refuse(fmt::format("{} of {} bytes; at most {} are read", name, record.bytes, limit));
    std::string text(static_cast<size_t>(record.bytes), '\0');
    file_.read(text.data(), record.bytes, zip_data(file_, name, record));
    if (record.checksum != 0 && crc32(text.data(), text.size()) != record.checksum) {
      refuse(fmt::format("is damaged: {} does not have its checksum", name));
    }
    return text;
  }

  PtTensor place(const PickledTensor& tensor) const {
    PtTensor placed{.dtype = tensor.dtype, .shape = tensor.sizes};
    if (tensor.sizes.size() > most_dimensions) refuse(tensor, "has too many dimensions");
    const auto numel = checked_numel(tensor.sizes);
    if (numel < 0) refuse(tensor, "is larger than any file");
    if (numel == 0) return placed;
    const auto key = fmt::format("{}/data/{}", root_, tensor.storage);
    const auto record = records_.find(key);
    if (record == records_.end()) refuse(tensor, "has no storage in the file");
    const auto element = static_cast<int64_t>(c10::elementSize(tensor.dtype));
    const auto order = dense_order(tensor);
    if (!order) refuse(tensor, "has gaps or overlaps between its elements; save a contiguous() copy");
    const auto room = record->second.bytes / element;
    if (numel > room || tensor.offset > room - numel) refuse(tensor, "lies beyond its storage");
    placed.order = *order;
    const auto begin = zip_data(file_, key, record->second);
    const auto checksum = record->second.checksum;
    if (checksum != 0) placed.record = {.offset = begin, .bytes = record->second.bytes, .checksum = checksum};
    placed.offset = begin + tensor.offset * element;
    placed.bytes = numel * element;
    return placed;
  }

  const InputFile& file_;
  std::string subject_;
  std::map<std::string, ZipRecord> records_;
  std::string root_;
};

// A writer that PyTorch's may call: it must not hear of errors, since it would try to end the file in its destructor.
class PtSink {
 public:
  explicit PtSink(const std::filesystem::path& path) : file_(path) {}

  size_t write(const void* data, size_t size) noexcept {
    try {
      if (!error_) file_.write(data, size, end_);
    } catch (...) {
      error_ = std::current_exception();
    }
    end_ += size;
    return size;
  }
  void check() const {
    if (error_) std::rethrow_exception(error_);
  }
  void complete() {
    check();
    file_.complete();
    sync_folder(file_.path().has_parent_path() ? file_.path().parent_path() : ".");
  }

 private:
  AtomicFile file_;
  size_t end_ = 0;
  std::exception_ptr error_;
};

std::vector<int64_t> row_major_strides(at::IntArrayRef sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t d = sizes.size(); d > 1; --d) strides[d - 2] = strides[d - 1] * std::max<int64_t>(1, sizes[d - 1]);
  return strides;
}

}  // namespace

std::map<std::string, PtTensor> read_pt(const InputFile& file) {
  return PtReader(file).tensors();
}

void save_pt(const std::filesystem::path& path, const std::vector<std::pair<std::string, at::Tensor>>& tensors) {
  std::vector<PickledTensor> pickled;
  std::map<const c10::TensorImpl*, std::string> storages;
  for (const auto& [name, tensor] : tensors) {
    const auto key = storages.try_emplace(tensor.unsafeGetTensorImpl(), std::to_string(storages.size())).first->second;
    pickled.push_back({.name = name,
                       .storage = key,
                       .dtype = tensor.scalar_type(),
                       .sizes = tensor.sizes().vec(),
                       .strides = row_major_strides(tensor.sizes())});
  }
  const auto pickle = pickle_tensors(pickled);
  PtSink sink(target_of(path));
  {
    caffe2::serialize::PyTorchStreamWriter writer(
        [&](const void* data, size_t size) { return sink.write(data, size); });
    writer.writeRecord("data.pkl", pickle.data(), pickle.size());
    const std::string byteorder = "little";
    writer.writeRecord("byteorder", byteorder.data(), byteorder.size());
    for (const auto& [name, tensor] : tensors) {
      const auto stored = storages.find(tensor.unsafeGetTensorImpl());
      if (stored == storages.end()) continue;  // under an earlier name
      const auto values = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous();
      writer.writeRecord("data/" + stored->second, values.const_data_ptr(), values.nbytes());
      storages.erase(stored);
      sink.check();
    }
    writer.writeEndOfFile();
  }
  sink.complete();
}

}  // namespace shoal
