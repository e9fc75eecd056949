#pragma once
// Device of `shoal train --device`.

#include <c10/core/Device.h>

#include <memory>
#include <string>

#include "cli/train/feed.h"

namespace shoal::cli {

// UsageError for a text that names no device; asks for no device yet.
void check_device(const std::string& text);

// Device of a rank, which becomes the current one. "cuda" without a number: that of the rank among its host's ranks, in
// turn where there are fewer GPUs. UsageError if this process sees no such device.
at::Device use_device(const std::string& text, int local_rank);

// The same batches on this device.
std::unique_ptr<Feed> on_device(std::unique_ptr<Feed> feed, const at::Device& device);

}  // namespace shoal::cli
