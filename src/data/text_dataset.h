#pragma once
// Bytes of a file as sequences of tokens.

#include <filesystem>
#include <memory>

#include "data/dataset.h"

namespace shoal::data {

class TextDataset : public Dataset {
 public:
  // Cuts `bytes` (uint8 [n]) into windows that overlap by one byte: sample i has inputs i * context .. (i + 1) *
  // context - 1, and targets shifted by one. Omits bytes that do not fill a window. Batches: int64 [samples, context].
  // UsageError if there is not even one window.
  TextDataset(const at::Tensor& bytes, int64_t context);

  std::optional<size_t> size() const override;
  Batch get_batch(c10::ArrayRef<size_t> indices) override;

 private:
  const int64_t context_;
  const at::Tensor windows_;  // [samples, context + 1], a view of the bytes
};

// The bytes of any file; the last `held_out` of them (0 <= held_out < 1) are the test split. The file is mapped, so
// that the ranks of a host share one copy; it must not be truncated meanwhile. UsageError, which names the file, if it
// is missing or too short for one window in the split.
std::shared_ptr<TextDataset> text_file(const std::filesystem::path& file, int64_t context, Split split,
                                       double held_out = 0.1);

}  // namespace shoal::data
