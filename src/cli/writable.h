#pragma once
// Checks, before long work, of the output paths given on the command line.

#include <filesystem>
#include <string>
#include <vector>

namespace shoal::cli {

// UsageError, which names the option, if the file cannot be written. Does not create or change it. Accepts "" and "-".
void require_writable_file(const char* option, const std::string& path);
// UsageError if the path is "-", for outputs that are files only.
void require_not_standard_output(const char* option, const std::string& path);
// The same as require_writable_file() for a folder, which is created if necessary, and in which a file is made and
// removed: access rights do not tell of all file systems.
void require_writable_folder(const char* option, const std::string& path);
// UsageError if the output is one of the files that the command reads, or lies in one of the folders. Accepts "" and
// "-".
void require_not_read(const char* option, const std::string& output, const std::vector<std::filesystem::path>& read);
// UsageError if the output has the name of a rank's file, rank-N and the extension, in this folder. Accepts "" and "-".
void require_no_rank_file(const char* option, const std::string& output, const std::filesystem::path& folder,
                          const std::string& extension);
// UsageError, which names both options, if two outputs are one file. Accepts "" and "-".
void require_two_files(const char* option, const std::string& path, const char* other_option, const std::string& other);

}  // namespace shoal::cli
