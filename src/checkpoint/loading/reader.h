#pragma once
// Reader of checkpoints: any rank can read any part, whatever strategy and number of ranks wrote them.

#include <filesystem>
#include <memory>

#include "checkpoint/loading/slice_reader.h"
#include "shoal/group.h"

namespace shoal {

// An open checkpoint, a safetensors file, or a Hugging Face folder with model.safetensors or its sharded form. Trusts
// no byte: a departure from the format or a wrong checksum is a CheckpointError that names file and reason.
//
// Memory: the index, and pieces of 1 MiB while reading. Reads the requested bytes and, for checksums, up to 1 MiB
// around them. index(): for files of other programs, step 0, no state, one rank. Not collective.
class CheckpointReader : public SliceReader {
 public:
  // path: as for find_checkpoint(). verify: compare checksums when bytes are first read. whole_records: also of .pt
  // files, of which a tensor is then read twice, and all of it where a part is asked for.
  explicit CheckpointReader(const std::filesystem::path& path, bool verify = true, bool whole_records = true);

  // The folder or file that was found.
  const std::filesystem::path& path() const;

  struct Verified {
    int64_t bytes = 0;      // of all tensors
    int64_t unchecked = 0;  // bytes of tensors without checksums
    int64_t unread = 0;     // tensors of a dtype that libtorch does not have
  };
  // Reads and checks everything, whatever `verify` was.
  Verified verify() const;
  // Compares the checksums of one of `parts` shares of a .pt file.
  void check_records(int part, int parts);

 private:
  class Files;
  explicit CheckpointReader(std::shared_ptr<Files> files);

  std::shared_ptr<Files> files_;
};

// Opens the same checkpoint on every rank, although `latest` may change at any time: rank 0 resolves the path. Several
// ranks, which read a part each, divide the checksums of a .pt file, and compare all of them here.
// Collective; throws on every rank.
CheckpointReader open_checkpoint(const Group& group, const std::filesystem::path& path, bool verify = true);

}  // namespace shoal
