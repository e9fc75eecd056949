#include "checkpoint/saving/save_job.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "base/start_thread.h"
#include "checkpoint/format/atomic_file.h"
#include "checkpoint/format/crc32.h"
#include "checkpoint/format/index.h"
#include "checkpoint/format/safetensors_format.h"
#include "checkpoint/format/safetensors_reader.h"
#include "checkpoint/on_all_ranks.h"
#include "checkpoint/saving/pieces.h"
#include "checkpoint/saving/snapshot.h"
#include "comm/group/group_state.h"
#include "comm/group/text.h"
#include "comm/rendezvous/world_state.h"
#include "shoal/error.h"
#include "shoal/group.h"

namespace shoal {
namespace {

using Json = nlohmann::json;

constexpr const char* subject = "checkpoint";

// Adds to an error which checkpoint it prevented.
template <class Act>
void saving(const std::filesystem::path& path, const char* outcome, const Act& act) {
  try {
    act();
  } catch (const CheckpointError& error) {
    throw CheckpointError(fmt::format("checkpoint {} {}: {}", path.string(), outcome, error.what()));
  }
}

constexpr const char* not_saved = "was not saved";

}  // namespace

SaveJob::SaveJob(const Group& group, std::filesystem::path root, int64_t keep_last, const CheckpointContents& contents,
                 std::shared_ptr<const SaveOrders>& orders)
    : group_(group), root_(std::move(root)), keep_last_(keep_last), step_(contents.step), strategy_(contents.strategy) {
  agree(group_, subject, {fmt::format("step {}", step_), fmt::format("strategy {}", strategy_)});
  saving(root_ / step_name(step_), not_saved, [&] { orders = orders_for(group_, contents, orders); });
  orders_ = orders;
  rank_state_ = contents.rank_state.dump();
  global_state_ = contents.global_state.dump();
  make_writes(contents);
}

void SaveJob::open_folder() {
  std::string name;
  on_all_ranks(group_, subject, [&] {
    if (group_.rank() != 0) return;
    lock_ = std::make_unique<FolderLock>(root_);
    remove_leftovers(root_);
    require_replaceable(root_, step_);
    unfinished_ = make_unfinished(root_, step_);
    name = unfinished_.filename().string();
  });
  unfinished_ = root_ / broadcast_text(group_, name, 0, {-1, -1, subject});
}

void SaveJob::make_writes(const CheckpointContents& contents) {
  for (const auto number : orders_->writes) {
    const auto& slice = contents.slices[number];
    const StoredTensor tensor{.name = slice.name,
                              .part = slice.part,
                              .dtype = slice.values.scalar_type(),
                              .shape = slice.shape,
                              .order = slice.order};
    writes_.push_back({.file = file_name(slice.part, group_.rank(), group_.size()),
                       .key = slice_key(tensor, slice.range),
                       .shape = slice_shape(tensor, slice.range),
                       .values = slice.values.detach()});
  }
  // In the order of the files, so that they are written from front to back.
  std::sort(writes_.begin(), writes_.end(), [](const Write& a, const Write& b) {
    const auto place = [](const Write& write) { return find_safetensors_dtype(write.values.scalar_type()); };
    return std::tuple(a.file, place(a), a.key) < std::tuple(b.file, place(b), b.key);
  });
}

void SaveJob::open_files() {
  std::error_code error;
  if (!writes_.empty() && std::filesystem::status(unfinished_, error).type() == std::filesystem::file_type::not_found) {
    throw CheckpointError(fmt::format(
        "{}, which rank 0 has made: No such file or directory; all ranks need the same folder, on several hosts in a "
        "shared file system, and for a relative path in the same working directory",
        unfinished_.string()));
  }
  std::map<std::string, std::vector<SafetensorsFile::Entry>> entries;
  for (const auto& write : writes_) {
    entries[write.file].push_back({write.key, write.values.scalar_type(), write.shape});
  }
  for (const auto& [file, list] : entries) {
    files_[file] = std::make_unique<SafetensorsFile>(unfinished_ / file, list,
                                                     std::map<std::string, std::string>{{"format", "pt"}});
  }
}

void SaveJob::write(Write& write) {
  auto& file = *files_.at(write.file);
  BlockChecksums checksums(piece_bytes);
  for_each_piece(write.values, [&](const void* data, int64_t first, int64_t size) {
    if (cancelled_) return;
    checksums.add(data, static_cast<size_t>(size));
    file.write_elements(write.key, first, data, size);
  });
  write.checksums = checksums.take();
  write.values.reset();
}

void SaveJob::detach(at::Tensor& buffer, int64_t limit) {
  const bool all_fits = std::ranges::max(orders_->copied_bytes) <= limit;
  if (!all_fits) saving(root_ / step_name(step_), not_saved, [&] { open_folder(); });
  try {
    copy(buffer, limit);
  } catch (const std::exception&) {
    failure_ = std::current_exception();
    files_.clear();
    writes_.clear();  // the caller may change these values from now on
  }
}

void SaveJob::copy(at::Tensor& buffer, int64_t limit) {
  std::vector<Write*> copied;
  int64_t size = 0;
  for (auto& one : writes_) {
    const auto bytes = snapshot_bytes(one.values);
    if (bytes > limit - size) {
      if (files_.empty()) open_files();
      write(one);
      continue;
    }
    size += bytes;
    copied.push_back(&one);
  }
  if (!buffer.defined() || buffer.numel() < size) {
    buffer.reset();  // freed before the new one is allocated, so that they never exist together
    buffer = at::empty({size}, at::kByte);
  }
  int64_t begin = 0;
  for (auto* one : copied) {
    const auto bytes = snapshot_bytes(one->values);
    one->values = snapshot(buffer.narrow(0, begin, static_cast<int64_t>(one->values.nbytes())), one->values);
    begin += bytes;
  }
}

void SaveJob::write_files() {
  try {
    if (failure_) std::rethrow_exception(failure_);
    if (files_.empty()) open_files();
    for (auto& one : writes_) {
      if (one.values.defined() && !cancelled_) write(one);
    }
    for (auto& [name, file] : files_) {
      if (cancelled_) break;
      file->complete();
      sizes_[name] = file->size();
      static_cast<void>(SafetensorsReader(unfinished_ / name));  // as load() does
    }
  } catch (...) {
    files_.clear();
    throw;
  }
  files_.clear();
}

// Ranks synchronise every few seconds: disks may differ in speed by more than a collective's timeout, and a failed rank
// is noticed early.
void SaveJob::write_together() {
  const auto limit =
      std::chrono::milliseconds(1000 * static_cast<int64_t>(state_of(group_)->world->options.timeout_seconds));
  const auto patience = std::min<std::chrono::milliseconds>(std::chrono::seconds(5), limit / 3);
  enum Progress : uint8_t { busy, done, failed };
  auto written = start_async("writes a checkpoint", [this] { write_files(); });
  std::exception_ptr failure;
  try {
    auto all = at::empty({group_.size()}, at::kByte);
    const auto any = [&](uint8_t progress) { return (all == progress).any().item<bool>(); };
    uint8_t own = busy;
    do {
      if (own == busy && written.wait_for(patience) == std::future_status::ready) {
        own = done;
        try {
          written.get();
        } catch (...) {
          own = failed;
          failure = std::current_exception();
        }
      }
      group_.all_gather(all, at::full({1}, own, at::kByte), {-1, -1, subject}).wait();
    } while (any(busy) && !any(failed));
  } catch (...) {
    cancelled_ = true;
    throw;
  }
  cancelled_ = true;  // tells ranks that are still writing that another has failed
  if (written.valid()) written.wait();
  on_all_ranks(group_, subject, [&] {
    if (failure) std::rethrow_exception(failure);
  });
}

std::string SaveJob::report() const {
  Json checksums = Json::object();
  for (const auto& one : writes_) checksums[one.file][one.key] = one.checksums;
  return Json{{"state", Json::parse(rank_state_)}, {"files", sizes_}, {"checksums", checksums}}.dump();
}

CheckpointIndex SaveJob::make_index(const std::vector<std::string>& reports) const {
  CheckpointIndex index{.library = SHOAL_VERSION,
                        .step = step_,
                        .strategy = strategy_,
                        .world_size = group_.size(),
                        .tensors = orders_->plan.tensors,
                        .global_state = Json::parse(global_state_)};
  Json checksums;
  for (const auto& text : reports) {
    auto one = Json::parse(text);
    index.files.merge(one["files"].get<std::map<std::string, int64_t>>());
    index.rank_states.push_back(std::move(one["state"]));
    checksums.update(one["checksums"]);
  }
  for (auto& [name, tensor] : index.tensors) {
    for (auto& slice : tensor.slices) {
      slice.checksums = checksums.at(slice.file).at(slice_key(tensor, slice.range)).get<std::vector<uint32_t>>();
    }
  }
  return index;
}

void SaveJob::publish() {
  const auto reports = gather_text(group_, report(), 0, {-1, -1, subject});
  on_all_ranks(group_, subject, [&] {
    if (group_.rank() != 0) return;
    const auto text = index_text(make_index(reports));
    require_loadable(text, "its index");
    write_atomically(unfinished_ / index_name, text);
    shoal::publish(root_, unfinished_, step_);
  });
}

std::future<void> SaveJob::finish() {
  const auto path = root_ / step_name(step_);
  try {
    saving(path, not_saved, [&] {
      if (unfinished_.empty()) open_folder();
      write_together();
      publish();
    });
  } catch (const Error&) {
    std::error_code ignored;  // the next save tries again
    if (group_.rank() == 0 && !unfinished_.empty()) std::filesystem::remove_all(unfinished_, ignored);
    lock_.reset();
    throw;
  }
  std::vector<std::filesystem::path> old;
  saving(path, "was saved, but", [&] {
    on_all_ranks(group_, subject, [&] {
      if (group_.rank() != 0) return;
      set_latest(root_, step_);
      if (keep_last_ > 0) old = prune(root_, step_, keep_last_);
    });
  });
  if (old.empty()) {
    lock_.reset();
    return {};
  }
  // The next save retries what cannot be removed, and reports why.
  return start_async("removes old checkpoints", [old, lock = std::shared_ptr<FolderLock>(std::move(lock_))] {
    std::error_code ignored;
    for (const auto& folder : old) std::filesystem::remove_all(folder, ignored);
  });
}

}  // namespace shoal
