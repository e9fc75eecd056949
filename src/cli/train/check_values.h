#pragma once
// The values that a command line gives to its options, before anything uses them.

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace shoal::cli {

// For every command of the program, once it has been parsed and before its own work: UsageError that names the option
// where a number is not one of its type (CLI11 wraps -1 and cuts what is too large), and where the next option stands
// in a value's place.
void check_values(CLI::App& program);

// The first option of the line, up to "--", that its command does not have; empty: none. CLI11 names what is left over,
// an option's value or the program to start, and not always the option.
std::string unknown_option(const CLI::App& program, const std::vector<std::string>& line);

}  // namespace shoal::cli
