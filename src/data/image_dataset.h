#pragma once
// Labelled grey images, kept as bytes (a quarter of the size of floats) until a batch is read.

#include "data/dataset.h"

namespace shoal::data {

// Mean and deviation of pixels scaled to 0 .. 1.
struct Normalisation {
  double mean;
  double deviation;
};

class ImageDataset : public Dataset {
 public:
  // `pixels` uint8 [n, features], `labels` int64 [n]; batches hold (pixel / 255 - mean) / deviation in `dtype`.
  ImageDataset(at::Tensor pixels, at::Tensor labels, Normalisation normalisation, at::ScalarType dtype);

  std::optional<size_t> size() const override;
  Batch get_batch(c10::ArrayRef<size_t> indices) override;

 private:
  const at::Tensor pixels_;
  const at::Tensor labels_;
  const Normalisation normalisation_;
  const at::ScalarType dtype_;
};

}  // namespace shoal::data
