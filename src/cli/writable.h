#pragma once
// Checks, before long work, of the output paths given on the command line.

#include <string>

namespace shoal::cli {

// UsageError, which names the option, if the file cannot be written. Does not create or change it. Accepts "" and "-".
void require_writable_file(const char* option, const std::string& path);
// The same for a folder, which is created if necessary.
void require_writable_folder(const char* option, const std::string& path);

}  // namespace shoal::cli
