#include "data/fashion_mnist.h"

#include <fmt/format.h>

#include <string>
#include <system_error>

#include "data/idx.h"
#include "shoal/error.h"

namespace shoal::data {
namespace {

namespace fs = std::filesystem;

constexpr auto debian_folder = "/usr/share/datasets/fashion-mnist";
constexpr Normalisation normalisation{.mean = 0.2860, .deviation = 0.3530};
constexpr int64_t side = 28;
constexpr int64_t classes = 10;

fs::path find_folder(const std::optional<fs::path>& given) {
  const fs::path folder = given.value_or(debian_folder);
  std::error_code error;
  if (fs::is_directory(folder, error)) return folder;
  throw UsageError(
      fmt::format("Fashion-MNIST: there is no folder {}; install it with `apt-get install dataset-fashion-mnist`, or "
                  "give a folder that holds its four IDX files",
                  folder.string()));
}

// The file, with or without .gz.
fs::path find_file(const fs::path& folder, const std::string& name) {
  std::error_code error;
  for (const auto& candidate : {folder / name, folder / (name + ".gz")}) {
    if (fs::exists(candidate, error)) return candidate;
  }
  throw UsageError(fmt::format("Fashion-MNIST: {} has neither {} nor {}.gz", folder.string(), name, name));
}

struct Files {
  fs::path images;
  fs::path labels;
};

Files find_files(Split split, const std::optional<fs::path>& folder) {
  const fs::path root = find_folder(folder);
  const std::string prefix = split == Split::train ? "train" : "t10k";
  return {find_file(root, prefix + "-images-idx3-ubyte"), find_file(root, prefix + "-labels-idx1-ubyte")};
}

}  // namespace

std::vector<fs::path> fashion_mnist_files(Split split, const std::optional<fs::path>& folder) {
  const auto [images, labels] = find_files(split, folder);
  return {images, labels};
}

std::shared_ptr<ImageDataset> fashion_mnist(Split split, const std::optional<fs::path>& folder, at::ScalarType dtype) {
  const auto [images_file, labels_file] = find_files(split, folder);
  const auto images = read_idx(images_file, 3);
  const auto labels = read_idx(labels_file, 1);
  if (images.size(1) != side || images.size(2) != side) {
    throw UsageError(fmt::format("{}: images of {} x {} pixels instead of {} x {}", images_file.string(),
                                 images.size(1), images.size(2), side, side));
  }
  if (images.size(0) != labels.size(0)) {
    throw UsageError(fmt::format("{} has {} images but {} has {} labels", images_file.string(), images.size(0),
                                 labels_file.string(), labels.size(0)));
  }
  if (labels.numel() == 0) throw UsageError(fmt::format("{}: no samples", labels_file.string()));
  if (const auto largest = labels.max().item<int64_t>(); largest >= classes) {
    throw UsageError(fmt::format("{}: label {}, the classes are 0 to {}", labels_file.string(), largest, classes - 1));
  }
  return std::make_shared<ImageDataset>(images.flatten(1), labels.to(at::kLong), normalisation, dtype);
}

}  // namespace shoal::data
