#pragma once
// Reading the safetensors format from files that nobody vouches for.

#include <filesystem>

#include "base/input_file.h"
#include "checkpoint/format/safetensors_format.h"

namespace shoal {

// An open file whose header has been found in order: every tensor lies within it. CheckpointError that names the file
// and what is wrong otherwise. Any number of threads.
class SafetensorsReader {
 public:
  explicit SafetensorsReader(const std::filesystem::path& path);

  const SafetensorsHeader& header() const { return header_; }
  const InputFile& file() const { return file_; }
  // CheckpointError where there is none.
  const SafetensorsEntry& entry(const std::string& name) const;

 private:
  InputFile file_;
  SafetensorsHeader header_;
};

}  // namespace shoal
