#pragma once
// Exit code of a command, and its line on standard error for an error.

#include <functional>
#include <string>

namespace shoal::cli {

constexpr int failed = 1;
constexpr int interrupted_code = 130;

// "rank 1: error: TEXT", the rank only where a launcher started several.
void complain(const std::string& text);
// Writes to standard output at once. False: it cannot be written, for the reason in errno; exit_code_of() reports that.
bool write_to_stdout(const std::string& text);
// Whether all that was written to standard output could be.
bool is_printed();
// Runs the work and returns its exit code; reports what it throws, and output that cannot be written.
int exit_code_of(const std::function<int()>& work);

}  // namespace shoal::cli
