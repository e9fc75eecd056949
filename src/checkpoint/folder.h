#pragma once
// Folder of a run's checkpoints: names, locking, publication.
//
//   ROOT/step-100/      a checkpoint: files and index.json
//   ROOT/latest         a line of text, "step-100"
//   ROOT/.lock          locked by the job that is saving
//   .step-200.tmp-1a2b3c4d/   a checkpoint in progress, or the remains of one from a job that died

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace shoal {

std::string step_name(int64_t step);

// Resolves `path` to a checkpoint: a folder with an index.json; a folder of checkpoints (the one that `latest` names,
// or without `latest` the one with the highest step); the file `latest` itself; any other existing path as it is.
// CheckpointError if there is nothing.
std::filesystem::path find_checkpoint(const std::filesystem::path& path);
// Whether find_checkpoint() finds one in the folder of a run, which need not be there. CheckpointError for a folder
// that cannot be read.
bool has_checkpoint(const std::filesystem::path& run);
// For people: " (the last checkpoint is runs/a/step-7)", " (runs/a has no checkpoint yet)", or why it is not known.
std::string last_checkpoint_in_words(const std::filesystem::path& run);

// Lock on saving below a folder, held until destruction; the system releases it if the process dies. Creates the folder
// if necessary. CheckpointError names the holder if another job, or another training of this
// process, has the lock.
class FolderLock {
 public:
  explicit FolderLock(const std::filesystem::path& root);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  int fd_ = -1;
};

// The functions below are for the holder of the lock. Errors are CheckpointErrors that name the file.

// Removes what dead jobs have left behind.
void remove_leftovers(const std::filesystem::path& root);
// CheckpointError if something that is no checkpoint has the step's name: publish() would remove it.
void require_replaceable(const std::filesystem::path& root, int64_t step);
// Creates a new folder in which step `step` is prepared.
std::filesystem::path make_unfinished(const std::filesystem::path& root, int64_t step);
// Renames a finished folder to its final name, atomically and durably; replaces an older checkpoint of the same step.
void publish(const std::filesystem::path& root, const std::filesystem::path& unfinished, int64_t step);
// Points `latest` at the step.
void set_latest(const std::filesystem::path& root, int64_t step);
// Hides the oldest checkpoints up to `step`, except the newest `keep` (at least 1); returns the folders to be removed,
// which takes time. Checkpoints later than `step` belong to a run that was rolled back, and stay.
std::vector<std::filesystem::path> prune(const std::filesystem::path& root, int64_t step, int64_t keep);

}  // namespace shoal
