#pragma once
// Data sets in memory, read in batches.

#include <torch/data/datasets/base.h>
#include <torch/data/example.h>

#include <cstddef>
#include <optional>

namespace shoal::data {

// Inputs (`data`) and targets (`target`) of a batch; the first dimension of both is the sample.
using Batch = torch::data::Example<>;

// Part of a data set.
enum class Split { train, test };

// Base class of data sets. For libtorch's data loader, wrap a shared pointer:
//   torch::data::make_data_loader(torch::data::datasets::SharedBatchDataset<Dataset>(pointer), sampler, options)
// get_batch() may be called from several threads at once.
class Dataset : public torch::data::datasets::BatchDataset<Dataset, Batch> {
 public:
  // Number of samples; always known.
  std::optional<size_t> size() const override = 0;
  // Gathers all samples at once. UsageError for an index that is not below size().
  Batch get_batch(c10::ArrayRef<size_t> indices) override = 0;
};

// `indices` as a tensor for index_select. UsageError for an index that is not below `size`.
at::Tensor index_tensor(c10::ArrayRef<size_t> indices, size_t size);

}  // namespace shoal::data
