#include "comm/telemetry/flight_recorder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>

#include "base/rank_list.h"
#include "shoal/error.h"

namespace shoal {
namespace {

template <class Clock>
int64_t nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

int64_t now() {
  return nanoseconds<std::chrono::steady_clock>();
}

template <size_t room>
void copy_text(char (&target)[room], const std::string& text) {
  const auto length = std::min(text.size(), room - 1);
  std::memcpy(target, text.data(), length);
  target[length] = 0;
}

std::byte* map_new_file(const std::string& path) {
  // Readers may still map an older file, so it is replaced rather than truncated.
  const auto temporary = fmt::format("{}.tmp-{}", path, getpid());
  const int fd = open(temporary.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  void* data = MAP_FAILED;
  // Reserves disk space now, to avoid SIGBUS in the middle of training.
  int error = fd < 0 ? errno : posix_fallocate(fd, 0, static_cast<off_t>(flight_bytes));
  if (error == 0) {
    data = mmap(nullptr, flight_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED || rename(temporary.c_str(), path.c_str()) != 0) error = errno;
  }
  if (fd >= 0) close(fd);
  if (error == 0) return static_cast<std::byte*>(data);
  unlink(temporary.c_str());
  throw UsageError(fmt::format("flight recorder: cannot make {}: {}", path, std::strerror(error)));
}

}  // namespace

FlightRecorder::FlightRecorder(const std::string& folder, int rank, int size)
    : path_(fmt::format("{}/rank-{}.flight", folder, rank)) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);  // if this fails, opening the file reports it
  data_ = map_new_file(path_);
  header_ = new (data_) FlightHeader{};
  records_ = reinterpret_cast<FlightRecord*>(data_ + sizeof(FlightHeader));
  const auto process = this_process();
  header_->record_bytes = sizeof(FlightRecord);
  header_->capacity = flight_capacity;
  header_->rank = rank;
  header_->size = size;
  header_->pid = process.pid;
  header_->process_start = process.start_time;
  copy_text(header_->host, host_identity());
  header_->epoch_ns = nanoseconds<std::chrono::system_clock>() - now();
  std::memcpy(header_->magic, flight_magic, sizeof flight_magic);
}

FlightRecorder::~FlightRecorder() {
  header_->left = now();
  munmap(data_, flight_bytes);
}

void FlightRecorder::join(const std::vector<ProcessId>& processes) {
  uint64_t hash = 1;
  for (const auto& process : processes) {
    for (const auto part : {static_cast<uint64_t>(process.pid), process.start_time}) {
      hash = (hash ^ part) * 0x100000001b3U;
      hash ^= hash >> 29U;
    }
  }
  header_->job = hash | 1U;
}

int FlightRecorder::add_group(const std::string& name, const std::vector<int>& world_ranks,
                              std::weak_ptr<const void> user) {
  const std::lock_guard lock(mutex_);
  const int number = groups_++;
  Line line{fmt::format("{}\t{}\t{}\n", number, name, rank_list(world_ranks)), std::move(user)};
  const auto used = [&] { return header_->tables[header_->table].bytes.load(); };
  if (used() + line.text.size() > flight_group_bytes) make_room();
  if (used() + line.text.size() > flight_group_bytes) {
    ++header_->groups_left_out;
    return number;
  }
  auto& table = header_->tables[header_->table];
  std::memcpy(table.text + used(), line.text.data(), line.text.size());
  table.bytes += static_cast<uint32_t>(line.text.size());
  lines_.push_back(std::move(line));
  return number;
}

// Drops the oldest lines of groups that have gone, until half of a table is free.
void FlightRecorder::make_room() {
  size_t size = header_->tables[header_->table].bytes;
  const auto dropped = std::erase_if(lines_, [&](const Line& line) {
    const bool drop = size > flight_group_bytes / 2 && line.user.expired();
    if (drop) size -= line.text.size();
    return drop;
  });
  if (dropped == 0) return;
  header_->groups_left_out += static_cast<uint32_t>(dropped);
  auto& other = header_->tables[1 - header_->table];
  size_t place = 0;
  for (const auto& line : lines_) {
    std::memcpy(other.text + place, line.text.data(), line.text.size());
    place += line.text.size();
  }
  other.bytes = static_cast<uint32_t>(size);
  header_->table = 1 - header_->table;
}

uint64_t FlightRecorder::add(FlightRecord::Kind kind, int group, int peer, const Fingerprint& print) {
  const auto begun = header_->begun.fetch_add(1);
  auto& record = records_[begun % flight_capacity];
  record.ticket = 0;
  record.kind = kind;
  record.group = group;
  record.peer = peer;
  record.print = print;
  record.issued = 0;
  record.finished = 0;
  record.entered = now();
  record.ticket = begun + 1;
  return begun + 1;
}

uint64_t FlightRecorder::enter(FlightRecord::Kind kind, int group, const Call& call, uint64_t number) {
  return add(kind, group, call.peer, fingerprint_of(call, number));
}

// nullptr if newer records have overwritten it.
FlightRecord* FlightRecorder::find(uint64_t ticket) {
  auto& record = records_[(ticket - 1) % flight_capacity];
  return record.ticket == ticket ? &record : nullptr;
}

void FlightRecorder::issued(uint64_t ticket) {
  if (auto* record = find(ticket)) record->issued = now();
}

void FlightRecorder::finished(uint64_t ticket) {
  if (auto* record = find(ticket)) record->finished = now();
}

void FlightRecorder::note(int group, const std::string& text) {
  Fingerprint print{};
  copy_text(print.text, text);
  add(FlightRecord::note, group, -1, print);
}

void FlightRecorder::failed(const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (header_->failed != 0) return;
  copy_text(header_->failure, why);
  header_->failed = now();
}

}  // namespace shoal
