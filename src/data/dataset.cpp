#include "data/dataset.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include "shoal/error.h"

namespace shoal::data {

at::Tensor index_tensor(c10::ArrayRef<size_t> indices, size_t size) {
  auto result = at::empty({static_cast<int64_t>(indices.size())}, at::kLong);
  int64_t* out = result.mutable_data_ptr<int64_t>();
  for (const size_t index : indices) {
    if (index >= size)
      throw UsageError(fmt::format("sample {} does not exist: the data set has {} samples", index, size));
    *out++ = static_cast<int64_t>(index);
  }
  return result;
}

}  // namespace shoal::data
