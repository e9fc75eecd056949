#pragma once
// Places on the command line to which something is written at the end of long work: looked at before it.

#include <string>

namespace shoal::cli {

// UsageError that names the option where the file cannot be written. Neither makes nor changes it. Empty and "-" are
// fine.
void require_writable_file(const char* option, const std::string& path);
// The same for a folder, which is made if need be.
void require_writable_folder(const char* option, const std::string& path);

}  // namespace shoal::cli
