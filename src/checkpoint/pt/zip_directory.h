#pragma once
// Directory of a zip file, from files that nobody vouches for.

#include <cstdint>
#include <map>
#include <string>

#include "base/input_file.h"

namespace shoal {

struct ZipRecord {
  int64_t header = 0;  // where its local header lies
  int64_t bytes = 0;
  bool plain = true;      // neither compressed nor encrypted
  uint32_t checksum = 0;  // CRC-32 of the bytes; 0: the writer left it out
};

// Records by name. CheckpointError that names the file and what is wrong: a directory that is not there, beyond the
// file, or longer than 64 MiB; a name twice.
std::map<std::string, ZipRecord> zip_directory(const InputFile& file);

// Where the record's bytes begin; CheckpointError unless all of them lie within the file, and where they are compressed
// or encrypted, which torch.save does not do.
int64_t zip_data(const InputFile& file, const std::string& name, const ZipRecord& record);

// Whether the file begins like a zip file.
bool is_zip(const InputFile& file);

}  // namespace shoal
