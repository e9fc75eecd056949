#include "comm/shm/operation.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "comm/agreement/fingerprint.h"
#include "comm/reduce/reduce_kernels.h"
#include "shoal/error.h"

namespace shoal::shm {
namespace {

int64_t total_bytes(const std::vector<Piece>& pieces) {
  int64_t total = 0;
  for (const auto& piece : pieces) total += piece.bytes;
  return total;
}

}  // namespace

Operation::Operation(HostGroup& group, Call call, uint64_t number, const std::vector<int>& world_ranks)
    : group_(group), call_(std::move(call)), number_(number), world_ranks_(world_ranks) {
  plan_ = plan_operation(call_, group_.rank, group_.size, false);
  if (plan_.work == OperationPlan::Work::reduce_slices &&
      total_bytes(plan_.exposed) <= static_cast<int64_t>(inline_bytes)) {
    plan_ = plan_operation(call_, group_.rank, group_.size, true);
  }
}

bool Operation::announce() {
  auto& entry = group_.control.entry(number_);
  const auto earlier_uses = number_ / ring_entries;
  if (!reached(entry.finished, earlier_uses, group_.size)) return false;
  auto& header = group_.control.header(number_, group_.rank);
  header.print = fingerprint_of(call_, number_);
  header.factor = call_.factor;
  describe_windows(header);
  auto* expected = group_.control.expected(header);
  for (int rank = 0; rank < group_.size; ++rank) {
    expected[rank] = plan_.expected.empty() ? UINT64_MAX : static_cast<uint64_t>(plan_.expected[rank]);
  }
  header.announced.store(number_ + 1, std::memory_order_relaxed);  // the store to `posted` publishes the header
  state_ = State::announced;
  group_.count(entry.posted);
  return true;
}

void Operation::describe_windows(Header& header) {
  auto* windows = group_.control.windows(header);
  header.parts = static_cast<uint32_t>(plan_.exposed.size());
  const bool in_header = total_bytes(plan_.exposed) <= static_cast<int64_t>(inline_bytes);
  uint64_t used = 0;
  for (size_t part = 0; part < plan_.exposed.size(); ++part) {
    const auto& piece = plan_.exposed[part];
    auto& window = windows[part];
    window = {};
    window.bytes = static_cast<uint64_t>(piece.bytes);
    if (piece.bytes == 0) {
      window.kind = Window::nothing;
    } else if (in_header) {
      window.kind = Window::in_header;
      window.offset = used;
      std::memcpy(header.data + used, piece.data, piece.bytes);
      used += window.bytes;
    } else if (const auto place = group_.memory->locate(piece.data, piece.bytes)) {
      window.kind = Window::shared;
      window.arena = place->arena;
      window.offset = place->offset;
      own_shared_ = true;
    } else {
      window.kind = Window::staged;
      if (group_.stage == nullptr) group_.stage = group_.memory->allocate(2 * HostGroup::stage_half_bytes);
      const auto stage = *group_.memory->locate(group_.stage, 1);
      header.stage_arena = stage.arena;
      header.stage_offset = stage.offset;
    }
  }
}

std::vector<int> Operation::missing() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < group_.size && state_ <= State::announced; ++rank) {
    if (group_.control.header(number_, rank).announced.load(std::memory_order_relaxed) != number_ + 1 ||
        (rank == group_.rank && state_ < State::announced))
      ranks.push_back(rank);
  }
  return ranks;
}

// Checks parts whose sizes the fingerprint does not cover.
void Operation::check_unequal_parts() const {
  const auto& control = group_.control;
  for (int source = 0; source < group_.size; ++source) {
    auto& from = control.header(number_, source);
    for (int target = 0; target < group_.size; ++target) {
      const auto expected = control.expected(control.header(number_, target))[source];
      const auto part = from.parts > 1 ? target : 0;
      if (from.parts == 0 || expected == UINT64_MAX || control.windows(from)[part].bytes == expected) continue;
      throw DisagreeError(fmt::format("{0} #{1}: rank {2} sends {4} bytes to rank {3}, which expects {5}",
                                      describe(from.print), number_, world_ranks_[source], world_ranks_[target],
                                      control.windows(from)[part].bytes, expected));
    }
  }
}

void Operation::agree() {
  std::vector<const Fingerprint*> prints;
  for (int rank = 0; rank < group_.size; ++rank) prints.push_back(&group_.control.header(number_, rank).print);
  if (auto difference = find_difference(prints, world_ranks_)) throw DisagreeError(*difference);
  check_unequal_parts();
  uint64_t largest = 0;
  uint32_t parts = 1;
  for (int rank = 0; rank < group_.size; ++rank) {
    auto& header = group_.control.header(number_, rank);
    parts = std::max(parts, header.parts);
    for (uint32_t part = 0; part < header.parts; ++part) {
      const auto& window = group_.control.windows(header)[part];
      staged_ = staged_ || window.kind == Window::staged;
      any_shared_ = any_shared_ || window.kind == Window::shared;
      // A rank whose part is done may end while this one still reads its stage: it can be opened only as long as it
      // lives.
      if (window.kind == Window::staged) group_.at(rank, {header.stage_arena, header.stage_offset});
      largest = std::max(largest, window.bytes);
    }
  }
  const auto bytes = static_cast<int64_t>(largest);
  round_bytes_ = bytes;
  if (staged_) {
    round_bytes_ = HostGroup::stage_half_bytes / parts / static_cast<int64_t>(cache_line) * cache_line;
    rounds_ = std::max<int64_t>(1, (bytes + round_bytes_ - 1) / round_bytes_);
  }
  state_ = State::agreed;
}

void Operation::advance(bool first) {
  auto& entry = group_.control.entry(number_);
  const auto uses = number_ / ring_entries + 1;
  if (state_ == State::announced && reached(entry.posted, uses, group_.size)) agree();
  while (first && state_ >= State::agreed && state_ < State::executed && step()) {
  }
  // Shared tensors go back to the caller only once no rank reads or writes them any more.
  if (state_ == State::executed && (!own_shared_ || reached(entry.finished, uses, group_.size))) {
    state_ = State::finished;
  }
}

bool Operation::step() {
  auto& block = group_.control.block();
  const auto begin = round_ * round_bytes_;
  const auto end = begin + round_bytes_;
  const auto execute = [&] {
    state_ = State::executed;
    group_.count(group_.control.entry(number_).finished);
  };
  if (!staged_) {
    if (!work(begin, end)) return false;
    execute();
    return true;
  }
  // Two halves alternate: a half is free once all ranks have finished the round before the last.
  const auto round = group_.staged_rounds;
  switch (state_) {
    case State::agreed:
      if (round >= 2 && !reached(block.stage_finished, round - 1, group_.size)) return false;
      fill_stage();
      group_.count(block.stage_filled);
      state_ = State::filled;
      return true;
    case State::filled:
      if (!reached(block.stage_filled, round + 1, group_.size)) return false;
      if (!work(begin, end)) return false;
      group_.count(block.stage_finished);
      state_ = State::worked;
      return true;
    default:
      if (plan_.work == OperationPlan::Work::reduce_slices) {
        if (!reached(block.stage_finished, round + 1, group_.size)) return false;
        copy_out(begin, end);
      }
      ++group_.staged_rounds;
      state_ = State::agreed;
      if (++round_ == rounds_) execute();
      return true;
  }
}

std::byte* Operation::locate(int rank, int part, int64_t begin) const {
  auto& header = group_.control.header(number_, rank);
  const auto& window = group_.control.windows(header)[header.parts > 1 ? part : 0];
  switch (window.kind) {
    case Window::in_header:
      return header.data + window.offset + begin;
    case Window::shared:
      return group_.at(rank, {window.arena, window.offset}) + begin;
    default: {
      const auto half = static_cast<int64_t>(group_.staged_rounds % 2) * HostGroup::stage_half_bytes;
      return group_.at(rank, {header.stage_arena, header.stage_offset}) + half + part * round_bytes_;
    }
  }
}

void Operation::fill_stage() {
  auto& header = group_.control.header(number_, group_.rank);
  const auto begin = round_ * round_bytes_;
  for (size_t part = 0; part < plan_.exposed.size(); ++part) {
    const auto& piece = plan_.exposed[part];
    if (group_.control.windows(header)[part].kind != Window::staged || piece.bytes <= begin) continue;
    std::memcpy(locate(group_.rank, static_cast<int>(part), begin), piece.data + begin,
                std::min(round_bytes_, piece.bytes - begin));
  }
}

void Operation::reduce_range(std::vector<std::byte*> destinations, int part, int64_t begin, int64_t from, int64_t to) {
  const auto& tensor = call_.inputs[0];
  Reduction reduction{.dtype = tensor.scalar_type(),
                      .op = call_.reduce,
                      .sources = {},
                      .factors = {},
                      .destinations = std::move(destinations),
                      .numel = (to - from) / static_cast<int64_t>(tensor.element_size())};
  for (int rank = 0; rank < group_.size; ++rank) {
    reduction.sources.push_back(locate(rank, part, begin) + (from - begin));
    if (call_.reduce == ReduceOp::premul_sum) {
      reduction.factors.push_back(group_.control.header(number_, rank).factor);
    }
  }
  reduce(reduction);
}

bool Operation::work(int64_t begin, int64_t end) {
  if (plan_.work == OperationPlan::Work::nothing) return true;
  std::optional<UseInPlace> use;
  if (any_shared_) use.emplace(group_.control, group_.rank);
  if (use && !use->goes_on()) return false;
  move_bytes(begin, end);
  return true;
}

void Operation::move_bytes(int64_t begin, int64_t end) {
  const auto* name = plan_.work == OperationPlan::Work::copy ? "copy" : "reduce";
  const TimedScope scope(group_.timeline.get(), name, call_.label.step);
  switch (plan_.work) {
    case OperationPlan::Work::nothing:
      return;
    case OperationPlan::Work::copy:
      for (int rank = 0; rank < group_.size; ++rank) {
        const auto& destination = plan_.destinations[rank];
        const auto count = std::min(end, destination.bytes) - begin;
        if (destination.data == nullptr || count <= 0) continue;
        // This rank's own part is copied directly; in place it is already there.
        const std::byte* source = nullptr;
        if (rank == group_.rank) {
          source = plan_.exposed[plan_.exposed.size() > 1 ? plan_.part : 0].data + begin;
        } else {
          source = locate(rank, plan_.part, begin);
        }
        if (source != destination.data + begin) std::memcpy(destination.data + begin, source, count);
      }
      return;
    case OperationPlan::Work::reduce: {
      const auto& destination = plan_.destinations[0];
      end = std::min(end, destination.bytes);
      if (begin < end) reduce_range({destination.data + begin}, plan_.part, begin, begin, end);
      return;
    }
    case OperationPlan::Work::reduce_slices: {
      end = std::min(end, plan_.exposed[0].bytes);
      const auto lines = (end - begin + static_cast<int64_t>(cache_line) - 1) / static_cast<int64_t>(cache_line);
      const auto border = [&](int64_t slice) {
        return std::min(end, begin + lines * slice / group_.size * static_cast<int64_t>(cache_line));
      };
      const auto from = border(group_.rank);
      const auto to = border(group_.rank + 1);
      if (from >= to) return;
      std::vector<std::byte*> destinations;
      for (const int target : plan_.targets) destinations.push_back(locate(target, 0, begin) + (from - begin));
      reduce_range(std::move(destinations), 0, begin, from, to);
      return;
    }
  }
}

void Operation::copy_out(int64_t begin, int64_t end) {
  const auto& piece = plan_.exposed[0];
  auto& header = group_.control.header(number_, group_.rank);
  const bool target = std::count(plan_.targets.begin(), plan_.targets.end(), group_.rank) > 0;
  if (!target || group_.control.windows(header)[0].kind != Window::staged) return;
  std::memcpy(piece.data + begin, locate(group_.rank, 0, begin), std::min(end, piece.bytes) - begin);
}

}  // namespace shoal::shm
