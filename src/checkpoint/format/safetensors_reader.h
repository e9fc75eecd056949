#pragma once
// Reader of safetensors files, and of .pt files as if they had that format; it trusts neither.

#include <filesystem>

#include "base/input_file.h"
#include "checkpoint/format/safetensors_format.h"

namespace shoal {

// Open file with a valid header (of a .pt file, its pickle): every tensor lies within the file. CheckpointError names
// the file and the fault. Any number of threads.
class SafetensorsReader {
 public:
  explicit SafetensorsReader(const std::filesystem::path& path);

  const SafetensorsHeader& header() const { return header_; }
  const InputFile& file() const { return file_; }
  // CheckpointError if there is none.
  const SafetensorsEntry& entry(const std::string& name) const;

 private:
  InputFile file_;
  SafetensorsHeader header_;
};

}  // namespace shoal
