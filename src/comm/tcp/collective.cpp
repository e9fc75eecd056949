#include "comm/tcp/collective.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "comm/agreement/fingerprint.h"
#include "comm/reduce/reduce_kernels.h"
#include "shoal/error.h"

namespace shoal::tcp {
namespace {

uint64_t total(const std::deque<Segment>& segments) {
  uint64_t bytes = 0;
  for (const auto& segment : segments) bytes += static_cast<uint64_t>(segment.bytes);
  return bytes;
}

}  // namespace

Entry read_entry(const EntryBytes& bytes, size_t ranks) {
  Entry entry;
  if (bytes.size() < sizeof entry) throw std::runtime_error("a peer has sent an entry that is too short");
  std::memcpy(&entry, bytes.data(), sizeof entry);
  const bool fits = (entry.listed == 0 || entry.listed == 2 * ranks) && entry.data <= bytes_with_entry &&
                    bytes.size() == sizeof entry + entry.listed * sizeof(uint64_t) + entry.data &&
                    is_call(entry.print) && entry.print.text[text_bytes - 1] == 0;
  if (!fits) throw std::runtime_error("a peer has sent an entry that is not valid");
  return entry;
}

Collective::Collective(Call call, uint64_t number, int rank, const std::vector<int>& world_ranks, std::byte* staging)
    : call_(std::move(call)),
      number_(number),
      rank_(rank),
      world_ranks_(world_ranks),
      schedule_(make_schedule(call_, rank, static_cast<int>(world_ranks.size()), staging)),
      factors_(world_ranks.size(), 1) {
  const bool lists = call_.inputs.size() > 1 || call_.outputs.size() > 1;
  if (!lists || call_.op == Op::gather || call_.op == Op::scatter) return;
  for (const auto& segments : schedule_.sends) listed_.push_back(total(segments));
  for (const auto& segments : schedule_.receives) listed_.push_back(total(segments));
}

EntryBytes Collective::entry(int to) const {
  Entry entry{};
  entry.print = fingerprint_of(call_, number_);
  entry.factor = call_.factor;
  entry.listed = listed_.size();
  const auto& segments = schedule_.sends[to];
  if (schedule_.whole && !segments.empty()) entry.data = static_cast<uint64_t>(segments[0].bytes);
  EntryBytes bytes(reinterpret_cast<const char*>(&entry), sizeof entry);
  bytes.append(reinterpret_cast<const char*>(listed_.data()), listed_.size() * sizeof(uint64_t));
  if (entry.data > 0) bytes.append(reinterpret_cast<const char*>(segments[0].data), entry.data);
  return bytes;
}

void Collective::begin(const std::vector<EntryBytes>& entries) {
  check(entries);
  begun_ = true;
  for (const auto& [from, to] : schedule_.copies) std::memcpy(to, from.data, from.bytes);
  for (size_t rank = 0; rank < entries.size(); ++rank) {
    factors_[rank] = read_entry(entries[rank], entries.size()).factor;
  }
  // What this rank has sent with its entries is no longer to be sent.
  if (schedule_.whole) std::fill(schedule_.sends.begin(), schedule_.sends.end(), std::deque<Segment>());
  for (size_t rank = 0; rank < entries.size(); ++rank) {
    if (static_cast<int>(rank) != rank_) take_data(entries[rank], static_cast<int>(rank));
  }
  complete_rounds();
  look_whether_finished();
}

// All ranks have all entries, and find the same.
void Collective::check(const std::vector<EntryBytes>& entries) const {
  const auto ranks = entries.size();
  std::vector<Entry> read;
  for (const auto& entry : entries) read.push_back(read_entry(entry, ranks));
  std::vector<const Fingerprint*> prints;
  for (const auto& entry : read) prints.push_back(&entry.print);
  if (const auto difference = find_difference(prints, world_ranks_)) throw DisagreeError(*difference);
  const auto listed = [&](size_t rank, size_t index) {
    uint64_t number = 0;
    std::memcpy(&number, entries[rank].data() + sizeof(Entry) + index * sizeof number, sizeof number);
    return number;
  };
  for (size_t from = 0; from < ranks; ++from) {
    for (size_t to = 0; to < ranks; ++to) {
      if (from == to || read[from].listed == 0 || read[to].listed == 0) continue;
      if (listed(from, to) == listed(to, ranks + from)) continue;
      throw DisagreeError(fmt::format("{} #{}: rank {} sends {} bytes to rank {}, which expects {}",
                                      describe(read[from].print), number_, world_ranks_[from], listed(from, to),
                                      world_ranks_[to], listed(to, ranks + from)));
    }
  }
}

void Collective::take_data(const EntryBytes& entry, int rank) {
  const auto bytes = read_entry(entry, world_ranks_.size()).data;
  if (bytes == 0) return;
  std::memcpy(*place_for(rank, bytes), entry.data() + entry.size() - bytes, bytes);
  received(rank);
}

std::optional<Segment> Collective::next_to(int rank) {
  auto& segments = schedule_.sends[rank];
  if (!begun_ || segments.empty() || segments.front().after > rounds_done_) return std::nullopt;
  const auto next = segments.front();
  segments.pop_front();
  ++on_its_way_;
  return next;
}

void Collective::sent() {
  --on_its_way_;
  look_whether_finished();
}

std::optional<std::byte*> Collective::place_for(int rank, uint64_t bytes) {
  const auto& segments = schedule_.receives[rank];
  if (segments.empty() || bytes != static_cast<uint64_t>(segments.front().bytes)) {
    throw std::runtime_error(fmt::format("rank {} has sent {} bytes of an operation, which are not expected: {}",
                                         world_ranks_[rank], bytes, call_.describe()));
  }
  if (segments.front().after > rounds_done_) return std::nullopt;
  return segments.front().data;
}

void Collective::received(int rank) {
  const auto feeds = schedule_.receives[rank].front().feeds;
  schedule_.receives[rank].pop_front();
  if (feeds >= 0) --schedule_.rounds[feeds].missing;
  complete_rounds();
  look_whether_finished();
}

void Collective::complete_rounds() {
  const auto& rounds = schedule_.rounds;
  for (; rounds_done_ < static_cast<int64_t>(rounds.size()) && rounds[rounds_done_].missing == 0; ++rounds_done_) {
    const auto& round = rounds[rounds_done_];
    if (round.sources.empty()) continue;
    const auto& tensor = call_.inputs[0];
    reduce({.dtype = tensor.scalar_type(),
            .op = call_.reduce,
            .sources = round.sources,
            .factors = call_.reduce == ReduceOp::premul_sum ? factors_ : std::vector<double>(),
            .destinations = {round.destination},
            .numel = round.bytes / static_cast<int64_t>(tensor.element_size()),
            .one_thread = true});
  }
}

void Collective::look_whether_finished() {
  const auto none = [](const std::deque<Segment>& segments) { return segments.empty(); };
  finished_ = begun_ && on_its_way_ == 0 && rounds_done_ == static_cast<int64_t>(schedule_.rounds.size()) &&
              std::all_of(schedule_.sends.begin(), schedule_.sends.end(), none) &&
              std::all_of(schedule_.receives.begin(), schedule_.receives.end(), none);
}

}  // namespace shoal::tcp
