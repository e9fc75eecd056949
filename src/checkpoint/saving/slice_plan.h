#pragma once
// Assignment of slices to the ranks that write them, computed from the slices of all ranks.

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint/format/index.h"
#include "checkpoint/format/named_slice.h"

namespace shoal {

// One rank's slices without their values, as text for the rank that plans. UsageError names the slice that is wrong in
// itself: values that do not fit the range, a range beyond the tensor, a dtype that the format does not have.
std::string offer_text(const std::vector<NamedSlice>& slices);

struct SlicePlan {
  std::vector<std::vector<size_t>> writes;  // by rank: numbers of its slices that it writes, ascending
  // With slices in the files in which they will lie, by file_name(); without checksums and file sizes.
  std::map<std::string, StoredTensor> tensors;
};

// What several ranks have alike is written by the one with the least to write. UsageError that names tensor and ranks
// where ranks disagree about it, slices overlap, or some elements are in none.
SlicePlan plan_slices(const std::vector<std::string>& offers);

// "model.safetensors" for a world of one rank, else "rank-00003-of-00004.model.safetensors".
std::string file_name(const std::string& part, int rank, int ranks);

}  // namespace shoal
