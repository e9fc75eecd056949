#include "data/text_dataset.h"

#include <ATen/ops/from_file.h>
#include <fmt/format.h>

#include "base/input_file.h"
#include "shoal/error.h"

namespace shoal::data {
namespace {

at::Tensor windows_of(const at::Tensor& bytes, int64_t context) {
  if (context < 1) throw UsageError(fmt::format("text: a context of {} tokens", context));
  if (bytes.numel() < context + 1) {
    throw UsageError(fmt::format("text: {} bytes are too short for one window of {} (the context and one more)",
                                 bytes.numel(), context + 1));
  }
  return bytes.unfold(0, context + 1, context);
}

}  // namespace

TextDataset::TextDataset(const at::Tensor& bytes, int64_t context)
    : context_(context), windows_(windows_of(bytes, context)) {}

std::optional<size_t> TextDataset::size() const {
  return static_cast<size_t>(windows_.size(0));
}

Batch TextDataset::get_batch(c10::ArrayRef<size_t> indices) {
  const auto tokens = windows_.index_select(0, index_tensor(indices, *size())).to(at::kLong);
  return {tokens.narrow(1, 0, context_).contiguous(), tokens.narrow(1, 1, context_).contiguous()};
}

std::shared_ptr<TextDataset> text_file(const std::filesystem::path& file, int64_t context, Split split,
                                       double held_out) {
  if (!(held_out >= 0 && held_out < 1))
    throw UsageError(fmt::format("text: the held-out share {} is not valid", held_out));
  const auto size = InputFile(file, refuse_as<UsageError>).size();
  const auto test_size = static_cast<int64_t>(static_cast<double>(size) * held_out);
  const int64_t begin = split == Split::train ? 0 : size - test_size;
  const int64_t length = split == Split::train ? size - test_size : test_size;
  if (length < context + 1) {
    throw UsageError(fmt::format("{}: {} bytes, of which {} are for {}; a window needs {} (the context and one more)",
                                 file.string(), size, length, split == Split::train ? "training" : "testing",
                                 context + 1));
  }
  const auto bytes = at::from_file(file.string(), /*shared=*/false, size, at::kByte);
  return std::make_shared<TextDataset>(bytes.narrow(0, begin, length), context);
}

}  // namespace shoal::data
