#pragma once
// The IDX format of MNIST and its relatives: a magic number, the sizes as big-endian 32-bit integers, the bytes.

#include <ATen/core/Tensor.h>

#include <filesystem>

namespace shoal::data {

// An IDX file of unsigned bytes with `dimensions` dimensions, plain or gzip (by its name); uint8. Throws UsageError,
// naming the file and the fault: missing, no regular file, unreadable, bad gzip, wrong magic number,
// truncated, too long. Takes no more memory than the header announces, and refuses one that announces more than 64 MiB
// and a hundred times what the file takes on its disk.
at::Tensor read_idx(const std::filesystem::path& file, int64_t dimensions);

}  // namespace shoal::data
