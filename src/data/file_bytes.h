#pragma once
// Whole files in memory.

#include <cstdint>
#include <filesystem>
#include <vector>

namespace shoal::data {

// The contents of a file; unpacked where its name ends in .gz. Throws UsageError, naming the file, where it is missing,
// unreadable, or named .gz without being a complete and intact gzip file.
std::vector<uint8_t> read_file(const std::filesystem::path& file);

}  // namespace shoal::data
