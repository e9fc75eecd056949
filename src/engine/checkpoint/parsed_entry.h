#pragma once
// Entries of a checkpoint's state.

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "checkpoint/loading/slice_reader.h"
#include "shoal/error.h"

namespace shoal {

// Checks the state's entries, which are no more trustworthy than the file.
template <class Act>
auto parsed_entry(const SliceReader& reader, const char* entry, const Act& act) {
  try {
    return act();
  } catch (const nlohmann::json::exception&) {
    throw CheckpointError(
        fmt::format("{}: the entry \"{}\" of its state was not written by shoal", reader.name(), entry));
  } catch (const UsageError& error) {
    throw CheckpointError(
        fmt::format("{}: the entry \"{}\" of its state does not fit: {}", reader.name(), entry, error.what()));
  }
}

}  // namespace shoal
