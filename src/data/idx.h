#pragma once
// IDX format of MNIST: a magic number, sizes as big-endian 32-bit integers, the bytes.

#include <ATen/core/Tensor.h>

#include <filesystem>

namespace shoal::data {

// Reads an IDX file of unsigned bytes with `dimensions` dimensions, plain or gzip (by name); uint8. UsageError, which
// names the file and the fault: missing, not a regular file, unreadable, bad gzip, wrong magic number, truncated, too
// long. Allocates no more than the header announces, and refuses a header that announces more than 64 MiB and a hundred
// times the file's size on disk.
at::Tensor read_idx(const std::filesystem::path& file, int64_t dimensions);

}  // namespace shoal::data
