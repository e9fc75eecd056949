#pragma once
// Fashion-MNIST: 28 x 28 grey images of ten kinds of clothes, 60 000 for training and 10 000 for testing.

#include <filesystem>
#include <memory>
#include <optional>
#include <vector>

#include "data/image_dataset.h"

namespace shoal::data {

// Reads images and labels of one split, each file plain or with .gz, from `folder`, or from where Debian's package
// dataset-fashion-mnist installs them. Batches: `dtype` [n, 784] with mean 0 and deviation 1, and int64 labels [n].
// UsageError names the file and the fault, and says how to get the data if the folder is missing.
std::shared_ptr<ImageDataset> fashion_mnist(Split split, const std::optional<std::filesystem::path>& folder = {},
                                            at::ScalarType dtype = at::kFloat);

// The files that fashion_mnist() reads; throws its errors for missing ones, and reads none.
std::vector<std::filesystem::path> fashion_mnist_files(Split split,
                                                       const std::optional<std::filesystem::path>& folder = {});

}  // namespace shoal::data
