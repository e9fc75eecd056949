#pragma once
// Options of `shoal train` from the registry of strategies.

#include <CLI/CLI.hpp>
#include <functional>
#include <string>

#include "cli/train/train_options.h"

namespace shoal::cli {

// Adds an option to the command line for each option of a strategy: bucket_cap_mb becomes --bucket-cap-mb.
void add_strategy_options(CLI::App& command, StrategyOptions& values);
// Returns a line for each strategy.
std::string list_of_strategies();

// Runs `work`; errors about options are thrown in the terms of the command line.
void in_words_of_the_command_line(const std::function<void()>& work);

// UsageError for --logging-data with a strategy that has none; it lists the strategies that do.
void check_logging_data(const TrainOptions& options);

}  // namespace shoal::cli
