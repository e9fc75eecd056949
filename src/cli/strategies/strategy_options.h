#pragma once
// Options of `shoal train` that only some strategies have.

#include <CLI/CLI.hpp>
#include <string>

#include "cli/train/train_options.h"

namespace shoal::cli {

// Whether the strategy averages with neighbours.
bool has_topology(const std::string& strategy);

// UsageError for one on the line that the strategy does not have, with the strategies that do.
void refuse_foreign_options(const CLI::App& command, const TrainOptions& options);

}  // namespace shoal::cli
