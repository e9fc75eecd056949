#pragma once
// The values that a command line gives to its options, before anything uses them.

#include <CLI/CLI.hpp>

namespace shoal::cli {

// For every command of the program, once it has been parsed and before its own work: UsageError that names the option
// where a number is not one of its type (CLI11 wraps -1 and cuts what is too large), and where the next option stands
// in a value's place.
void check_values(CLI::App& program);

}  // namespace shoal::cli
