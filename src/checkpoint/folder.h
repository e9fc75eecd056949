#pragma once
// The folder that holds a run's checkpoints: names, who may write, publication.
//
//   ROOT/step-100/      a checkpoint: files and index.json
//   ROOT/latest         a line of text, "step-100"
//   ROOT/.lock          locked by the job that is saving
//   ROOT/.step-200.tmp-1a2b3c4d/   a checkpoint in the making, or what a job that died has left of one

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace shoal {

std::string step_name(int64_t step);

// The checkpoint that `path` means: a folder with an index.json, or a folder of checkpoints (the one that `latest`
// names; without `latest` the one with the highest step), or the file `latest` itself, or anything else as it is.
// CheckpointError where there is nothing.
std::filesystem::path find_checkpoint(const std::filesystem::path& path);

// The right to save below a folder, held until destruction; the system takes it from a process that dies. The folder is
// made if need be. CheckpointError that names the holder while another job has it.
class FolderLock {
 public:
  explicit FolderLock(const std::filesystem::path& root);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  int fd_ = -1;
};

// What follows is for the holder of the lock. Errors are CheckpointErrors that name the file.

// Removes what jobs that died have left behind.
void remove_leftovers(const std::filesystem::path& root);
// A fresh folder in which step `step` is made.
std::filesystem::path make_unfinished(const std::filesystem::path& root, int64_t step);
// Gives a finished folder its name, in one step and durably; an older checkpoint of the same step goes.
void publish(const std::filesystem::path& root, const std::filesystem::path& unfinished, int64_t step);
// Lets `latest` name it.
void set_latest(const std::filesystem::path& root, int64_t step);
// Takes the oldest checkpoints up to `step` except `keep` (at least 1) of them out of readers' sight; returns what is
// to be removed, which takes time. Later ones than `step` belong to a run that was taken back, and stay.
std::vector<std::filesystem::path> prune(const std::filesystem::path& root, int64_t step, int64_t keep);

}  // namespace shoal
