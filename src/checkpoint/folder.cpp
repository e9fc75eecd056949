#include "checkpoint/folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <optional>
#include <random>
#include <vector>

#include "base/input_file.h"
#include "checkpoint/format/atomic_file.h"
#include "checkpoint/format/index.h"
#include "shoal/error.h"

namespace shoal {
namespace {

namespace fs = std::filesystem;

constexpr const char* latest_name = "latest";
constexpr const char* lock_name = ".lock";
constexpr std::string_view step_prefix = "step-";
constexpr std::string_view unfinished_prefix = ".step-";
constexpr std::string_view unfinished_mark = ".tmp-";

// Inverse of step_name().
std::optional<int64_t> step_of(const std::string& name) {
  if (!name.starts_with(step_prefix)) return std::nullopt;
  int64_t step = -1;
  std::from_chars(name.data() + step_prefix.size(), name.data() + name.size(), step);
  return step >= 0 && name == step_name(step) ? std::optional(step) : std::nullopt;
}

// What is there, if anything. That the file system cannot say so is an error: a run must not begin anew for it.
fs::file_status status_of(const fs::path& path) {
  std::error_code error;
  const auto status = fs::status(path, error);
  if (status.type() == fs::file_type::none) {
    throw CheckpointError(fmt::format("cannot look at {}: {}", path.string(), error.message()));
  }
  return status;
}

bool is_there(const fs::path& path) {
  return fs::exists(status_of(path));
}

// None if there is no such folder.
std::vector<fs::path> entries_of(const fs::path& folder) {
  std::vector<fs::path> entries;
  std::error_code error;
  fs::directory_iterator entry(folder, error);
  for (; !error && entry != end(entry); entry.increment(error)) entries.push_back(entry->path());
  if (error && error != std::errc::no_such_file_or_directory) {
    throw CheckpointError(fmt::format("cannot read folder {}: {}", folder.string(), error.message()));
  }
  return entries;
}

std::vector<int64_t> published_steps(const fs::path& root) {
  std::vector<int64_t> steps;
  for (const auto& entry : entries_of(root)) {
    const auto step = step_of(entry.filename());
    if (step && is_there(entry / index_name)) steps.push_back(*step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

std::string random_digits() {
  std::random_device source;
  return fmt::format("{:08x}", source());
}

fs::path hidden_path(const fs::path& root, int64_t step) {
  return root / fmt::format("{}{}{}{}", unfinished_prefix, step, unfinished_mark, random_digits());
}

// A complete checkpoint of this name in a hidden folder, where a job ended while it replaced it.
std::optional<fs::path> hidden_checkpoint(const fs::path& root, const std::string& name) {
  const auto prefix = fmt::format(".{}{}", name, unfinished_mark);
  for (const auto& entry : entries_of(root)) {
    if (entry.filename().string().starts_with(prefix) && is_there(entry / index_name)) return entry;
  }
  return std::nullopt;
}

fs::path latest_of(const fs::path& root) {
  constexpr int64_t longest = 100;
  auto name = read_text(root / latest_name, longest, refuse_as<CheckpointError>);
  if (name.ends_with('\n')) name.pop_back();
  if (!step_of(name)) throw CheckpointError(fmt::format("{}/latest does not name a checkpoint", root.string()));
  if (is_there(root / name)) return root / name;
  if (const auto hidden = hidden_checkpoint(root, name)) return *hidden;
  throw CheckpointError(fmt::format("{}/latest names {}, which does not exist", root.string(), name));
}

void remove_tree(const fs::path& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) throw CheckpointError(fmt::format("cannot remove {}: {}", path.string(), error.message()));
}

// "process 123 on node7"
std::string self() {
  std::array<char, 256> host{};
  gethostname(host.data(), host.size() - 1);
  return fmt::format("process {} on {}", getpid(), host.data());
}

// Gives the checkpoint that `latest` names its name again.
void restore_latest(const fs::path& root) {
  if (!is_there(root / latest_name)) return;
  try {
    const auto path = latest_of(root);
    const auto name = path.filename().string();
    if (!name.starts_with(unfinished_prefix)) return;
    fs::rename(path, root / name.substr(1, name.find(unfinished_mark) - 1));
  } catch (const CheckpointError&) {  // it names nothing, and the next save replaces it
  }
}

// Only for the message of those who do not get the lock.
void write_holder(int lock, const std::string& text) {
  if (ftruncate(lock, 0) == 0) [[maybe_unused]]
    const auto written = pwrite(lock, text.data(), text.size(), 0);
}

}  // namespace

std::string step_name(int64_t step) {
  return fmt::format("{}{}", step_prefix, step);
}

fs::path find_checkpoint(const fs::path& path) {
  const auto status = status_of(path);
  if (!fs::exists(status)) throw CheckpointError(fmt::format("{}: no such file or folder", path.string()));
  if (path.filename() == latest_name && fs::is_regular_file(status)) {
    return latest_of(path.has_parent_path() ? path.parent_path() : ".");
  }
  if (!fs::is_directory(status) || is_there(path / index_name)) return path;
  if (is_there(path / latest_name)) return latest_of(path);
  const auto steps = published_steps(path);
  return steps.empty() ? path : path / step_name(steps.back());
}

bool has_checkpoint(const fs::path& run) {
  const auto steps = published_steps(run);  // first, as it also tells that this is no folder
  return is_there(run / index_name) || is_there(run / latest_name) || !steps.empty();
}

std::string last_checkpoint_in_words(const fs::path& run) {
  try {
    if (!has_checkpoint(run)) return fmt::format(" ({} has no checkpoint yet)", run.string());
    return fmt::format(" (the last checkpoint is {})", find_checkpoint(run).string());
  } catch (const CheckpointError& error) {
    return fmt::format(" ({})", error.what());
  }
}

FolderLock::FolderLock(const fs::path& root) {
  std::error_code error;
  fs::create_directories(root, error);
  if (error) throw CheckpointError(fmt::format("cannot make folder {}: {}", root.string(), error.message()));
  const auto path = root / lock_name;
  fd_ = open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0644);
  if (fd_ < 0) throw_system_error("open", path);
  if (flock(fd_, LOCK_EX | LOCK_NB) != 0) {
    const int reason = errno;
    close(fd_);
    errno = reason;
    if (reason != EWOULDBLOCK) throw_system_error("lock", path);
    constexpr int64_t longest = 500;
    const auto holder = read_text(path, longest, refuse_as<CheckpointError>);
    if (holder == self()) {
      throw CheckpointError(
          fmt::format("another training of this process is saving to {}: give each its own folder, or wait() for the "
                      "other one's save",
                      root.string()));
    }
    throw CheckpointError(fmt::format("another job is saving to {}{}; give each job its own folder", root.string(),
                                      holder.empty() ? "" : ": " + holder));
  }
  write_holder(fd_, self());
}

// A process that was forked meanwhile has the open file, too.
FolderLock::~FolderLock() {
  write_holder(fd_, "");
  flock(fd_, LOCK_UN);
  close(fd_);
}

void remove_leftovers(const fs::path& root) {
  restore_latest(root);
  const auto latest_leftover = std::string(latest_name) + std::string(unfinished_mark);
  std::vector<fs::path> leftovers;
  for (const auto& entry : entries_of(root)) {
    const auto name = entry.filename().string();
    const bool unfinished = name.starts_with(unfinished_prefix) && name.find(unfinished_mark) != std::string::npos;
    if (unfinished || name.starts_with(latest_leftover)) leftovers.push_back(entry);
  }
  for (const auto& path : leftovers) remove_tree(path);
}

void require_replaceable(const fs::path& root, int64_t step) {
  const auto path = root / step_name(step);
  if (!is_there(path) || is_there(path / index_name)) return;
  std::error_code error;
  if (fs::is_directory(path, error) && fs::is_empty(path, error)) return;
  throw CheckpointError(
      fmt::format("{} is there already and is no checkpoint of shoal (it has no {}): move it away, or save to another "
                  "folder",
                  path.string(), index_name));
}

fs::path make_unfinished(const fs::path& root, int64_t step) {
  auto path = hidden_path(root, step);
  std::error_code error;
  if (!fs::create_directory(path, error)) {
    throw CheckpointError(fmt::format("cannot make folder {}: {}", path.string(), error.message()));
  }
  return path;
}

namespace {

// Whether the file system, such as NFS, cannot exchange names.
bool cannot_exchange(int reason) {
  return reason == EINVAL || reason == ENOSYS || reason == EOPNOTSUPP;
}

// By two renames. If the job ends between them, hidden_checkpoint() finds one of the two.
void replace(const fs::path& final, const fs::path& unfinished, const fs::path& old) {
  if (rename(final.c_str(), old.c_str()) != 0) throw_system_error("replace", final);
  if (rename(unfinished.c_str(), final.c_str()) == 0) return;
  const int reason = errno;
  std::error_code ignored;
  fs::rename(old, final, ignored);
  errno = reason;
  throw_system_error("replace", final);
}

}  // namespace

void publish(const fs::path& root, const fs::path& unfinished, int64_t step) {
  const auto final = root / step_name(step);
  sync_folder(unfinished);
  if (!is_there(final)) {
    if (rename(unfinished.c_str(), final.c_str()) != 0) throw_system_error("publish", final);
    return sync_folder(root);
  }
  // An atomic exchange, so that a checkpoint of this step exists at any moment.
  auto old = unfinished;
  if (renameat2(AT_FDCWD, unfinished.c_str(), AT_FDCWD, final.c_str(), RENAME_EXCHANGE) != 0) {
    if (!cannot_exchange(errno)) throw_system_error("replace", final);
    old = hidden_path(root, step);
    replace(final, unfinished, old);
  }
  sync_folder(root);
  remove_tree(old);
}

void set_latest(const fs::path& root, int64_t step) {
  write_atomically(root / latest_name, step_name(step) + '\n');
}

std::vector<fs::path> prune(const fs::path& root, int64_t step, int64_t keep) {
  auto steps = published_steps(root);
  steps.erase(std::upper_bound(steps.begin(), steps.end(), step), steps.end());
  std::vector<fs::path> doomed_ones;
  for (size_t i = 0; i + keep < steps.size(); ++i) {
    const auto path = root / step_name(steps[i]);
    const auto doomed = hidden_path(root, steps[i]);
    if (rename(path.c_str(), doomed.c_str()) != 0) throw_system_error("remove", path);
    doomed_ones.push_back(doomed);
  }
  return doomed_ones;
}

}  // namespace shoal
