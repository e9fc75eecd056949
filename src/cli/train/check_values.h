#pragma once
// Checks of the values on a command line, before anything uses them.

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace shoal::cli {

// Run for every command after parsing. UsageError, which names the option, for a number outside its type (CLI11 wraps
// -1, and truncates large values), and for a value that is the next option.
void check_values(CLI::App& program);

// First option on the line, up to "--", that its command does not have; empty: none. Needed because CLI11 reports what
// is left over, which may be an option's value or the program to start.
std::string unknown_option(const CLI::App& program, const std::vector<std::string>& line);

}  // namespace shoal::cli
