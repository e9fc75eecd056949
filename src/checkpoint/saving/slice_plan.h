#pragma once
// Assignment of slices to the ranks that write them, computed from the slices of all ranks.

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint/format/index.h"
#include "checkpoint/format/named_slice.h"

namespace shoal {

// Describes a rank's slices without their values, for the rank that plans. UsageError names an invalid slice: values
// that do not fit the range, a range beyond the tensor, a dtype that the format does not have.
std::string offer_text(const std::vector<NamedSlice>& slices);

struct SlicePlan {
  std::vector<std::vector<size_t>> writes;  // by rank: indices of the slices that it writes, ascending
  // Includes the file of each slice, by file_name(), but no checksums or file sizes.
  std::map<std::string, StoredTensor> tensors;
};

// Slices that several ranks have are assigned to the rank with the least to write. UsageError names tensor and ranks if
// ranks disagree about a tensor, slices overlap, or elements are missing.
SlicePlan plan_slices(const std::vector<std::string>& offers);

// "model.safetensors" for a world of one rank, else "rank-00003-of-00004.model.safetensors".
std::string file_name(const std::string& part, int rank, int ranks);

}  // namespace shoal
