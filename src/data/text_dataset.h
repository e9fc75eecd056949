#pragma once
// The bytes of a file as sequences of tokens.

#include <filesystem>
#include <memory>

#include "data/dataset.h"

namespace shoal::data {

class TextDataset : public Dataset {
 public:
  // `bytes` uint8 [n], cut into windows that share one byte: sample i has inputs i * context .. (i + 1) * context - 1
  // and targets one further on. Bytes that do not fill a last window are left out. Batches: int64 [samples, context].
  // Throws UsageError where not even one window fits.
  TextDataset(const at::Tensor& bytes, int64_t context);

  std::optional<size_t> size() const override;
  Batch get_batch(c10::ArrayRef<size_t> indices) override;

 private:
  const int64_t context_;
  const at::Tensor windows_;  // [samples, context + 1], a view of the bytes
};

// Any file's bytes; the last `held_out` of them (0 <= held_out < 1) is the test split. The file is mapped, so the ranks
// of a host share one copy of it, and must not be cut short meanwhile. Throws UsageError, naming the file, where it is
// missing or too short for one window in the split.
std::shared_ptr<TextDataset> text_file(const std::filesystem::path& file, int64_t context, Split split,
                                       double held_out = 0.1);

}  // namespace shoal::data
