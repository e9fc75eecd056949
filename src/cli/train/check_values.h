#pragma once
// Checks of the values on a command line, before anything uses them.

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace shoal::cli {

// Run for every command after parsing. UsageError, which names the option, for a number outside its type (CLI11 wraps
// -1, and truncates large values), for a value that is empty or the next option, and for a flag's that is no truth
// value.
void check_values(CLI::App& program);

// UsageError for NAME= without a value. Before parsing: CLI11 takes it for the option alone.
void refuse_values_left_out(const std::vector<std::string>& line);

// What is unknown on the line, up to "--", as a sentence: an option that its command does not have, or a command, with
// the name that is meant, if one is close; empty: nothing. Needed because CLI11 reports what is left over, which may be
// an option's value or the program to start.
std::string unknown_word(const CLI::App& program, const std::vector<std::string>& line);

}  // namespace shoal::cli
