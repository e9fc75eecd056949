#pragma once
// Device of `shoal train --device`.

#include <c10/core/Device.h>

#include <memory>
#include <string>

#include "cli/train/feed.h"

namespace shoal::cli {

// UsageError unless it is "cpu" or "cuda"; asks for no device yet.
void check_device(const std::string& text);

// Device of a rank, which becomes the current one: each rank of a host has the next GPU, in turn where there are fewer.
// UsageError if this process sees none.
at::Device use_device(const std::string& text, int local_rank);

// The same batches on this device.
std::unique_ptr<Feed> on_device(std::unique_ptr<Feed> feed, const at::Device& device);

}  // namespace shoal::cli
