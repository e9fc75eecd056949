#pragma once
// Options of `shoal train` that the registry of strategies knows.

#include <CLI/CLI.hpp>
#include <functional>
#include <string>

#include "cli/train/train_options.h"

namespace shoal::cli {

// One option of the command line for each that some strategy has: bucket_cap_mb is --bucket-cap-mb.
void add_strategy_options(CLI::App& command, StrategyOptions& values);
// A line for each strategy.
std::string list_of_strategies();

// What `work` throws of an option, in the words of the command line.
void in_words_of_the_command_line(const std::function<void()>& work);

// UsageError for --logging-data with a strategy that has none, with those that do.
void check_logging_data(const TrainOptions& options);

}  // namespace shoal::cli
