#include "checkpoint/loading/slice_reader.h"

#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>

#include "checkpoint/loading/reorder.h"
#include "checkpoint/saving/pieces.h"
#include "shoal/error.h"

namespace shoal {

SliceReader::SliceReader(std::shared_ptr<SliceSource> source) : source_(std::move(source)) {}

const StoredTensor& SliceReader::tensor(const std::string& name) const {
  const auto found = index().tensors.find(name);
  if (found == index().tensors.end()) throw UsageError(fmt::format("{} has no tensor {}", this->name(), name));
  if (found->second.dtype == at::ScalarType::Undefined) {
    throw UsageError(fmt::format("{}: tensor {} has a dtype that libtorch does not support", this->name(), name));
  }
  return found->second;
}

bool SliceReader::has(const std::string& name, const std::string& part) const {
  const auto found = index().tensors.find(name);
  return found != index().tensors.end() && found->second.part == part;
}

void SliceReader::read_in_order(const StoredTensor& tensor, const Range& range, const Order& order, char* to) const {
  if (same_order(order, tensor.order)) return source_->read(tensor, range, to);
  read_reordered(tensor.shape, tensor.order, order, range, static_cast<int64_t>(c10::elementSize(tensor.dtype)), to,
                 [&](const Range& stored, char* piece) { source_->read(tensor, stored, piece); });
}

void SliceReader::read(const std::string& name, const Range& range, const at::Tensor& destination,
                       const ReadOptions& options) const {
  const auto& tensor = this->tensor(name);
  if (range.begin < 0 || range.end < range.begin || range.end > tensor.numel() || destination.numel() != range.size() ||
      !is_order(options.order, tensor.shape.size())) {
    throw UsageError(fmt::format("reading {}:{} of tensor {} with {} elements into {}: that does not fit", range.begin,
                                 range.end, name, tensor.numel(), destination.numel()));
  }
  const bool same_dtype = destination.scalar_type() == tensor.dtype;
  if (!same_dtype && !options.convert) {
    throw UsageError(fmt::format("{}: tensor {} is {}, but {} was requested; allow conversion", this->name(), name,
                                 c10::toString(tensor.dtype), c10::toString(destination.scalar_type())));
  }
  const torch::NoGradGuard no_grad;
  const auto widest =
      std::max<int64_t>(destination.element_size(), static_cast<int64_t>(c10::elementSize(tensor.dtype)));
  const auto most = piece_bytes / widest;
  for_each_part(destination.detach(), [&](const at::Tensor& part, int64_t first) {
    const auto begin = range.begin + first;
    const bool contiguous = part.is_contiguous();
    const bool lazy = part.is_conj() || part.is_neg();  // its memory has other values
    if (contiguous && part.is_cpu() && same_dtype && !lazy) {
      return read_in_order(tensor, {begin, begin + part.numel()}, options.order, static_cast<char*>(part.data_ptr()));
    }
    const auto size = contiguous ? most : part.numel();  // non-contiguous parts are small
    for (int64_t done = 0; done < part.numel(); done += size) {
      const auto here = std::min(size, part.numel() - done);
      const auto piece = at::empty({here}, tensor.dtype);
      read_in_order(tensor, {begin + done, begin + done + here}, options.order, static_cast<char*>(piece.data_ptr()));
      if (contiguous) {
        part.view({-1}).narrow(0, done, here).copy_(piece);
      } else {
        at::Tensor(part).copy_(piece.view(part.sizes()));
      }
    }
  });
}

at::Tensor SliceReader::read(const std::string& name) const {
  const auto& tensor = this->tensor(name);
  at::Tensor whole;
  try {
    whole = at::empty(tensor.shape, tensor.dtype);
  } catch (const c10::Error&) {
    throw CheckpointError(fmt::format("{}: no memory for the {} elements of tensor {:.200} ({})", this->name(),
                                      tensor.numel(), name, c10::toString(tensor.dtype)));
  }
  read(name, {0, tensor.numel()}, whole);
  return whole;
}

}  // namespace shoal
