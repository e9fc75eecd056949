#pragma once
// A save on one rank.

#include <atomic>
#include <exception>
#include <filesystem>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/folder.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/saving/save_orders.h"
#include "checkpoint/saving/saver.h"

namespace shoal {

class SaveJob {
 public:
  // orders: assignments of the previous save, or null; replaced by this save's. Collective; throws on every rank.
  SaveJob(const Group& group, std::filesystem::path root, int64_t keep_last, const CheckpointContents& contents,
          std::shared_ptr<const SaveOrders>& orders);

  // Copies what this rank writes into `buffer`, which grows up to `limit` bytes, the same on all ranks. If some rank's
  // part does not fit, writes instead; then it is collective, and throws errors of the folder on every rank. Other
  // errors are thrown by finish().
  void detach(at::Tensor& buffer, int64_t limit);
  // Writes, waits for the other ranks, and publishes. Collective; throws on every rank. The result is ready once this
  // rank has removed old checkpoints; nobody else can save before that.
  std::future<void> finish();

 private:
  // Slice that this rank writes.
  struct Write {
    std::string file;
    std::string key;
    std::vector<int64_t> shape;  // as stored in the file
    at::Tensor values;           // undefined once written
    std::vector<uint32_t> checksums{};
  };

  void make_writes(const CheckpointContents& contents);
  void open_folder();
  void open_files();
  void copy(at::Tensor& buffer, int64_t limit);
  void write(Write& write);
  void write_files();
  void write_together();
  void publish();
  CheckpointIndex make_index(const std::vector<std::string>& reports) const;
  std::string report() const;

  Group group_;
  std::filesystem::path root_;
  int64_t keep_last_;
  int64_t step_;
  std::string strategy_;
  std::string rank_state_;  // JSON text
  std::string global_state_;
  std::shared_ptr<const SaveOrders> orders_;
  std::unique_ptr<FolderLock> lock_;  // on rank 0
  std::filesystem::path unfinished_;
  std::vector<Write> writes_;
  std::map<std::string, std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, int64_t> sizes_;  // of finished files
  std::exception_ptr failure_;            // of the copy
  std::atomic<bool> cancelled_ = false;
};

}  // namespace shoal
