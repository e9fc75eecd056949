#include "comm/tcp/schedule.h"

#include <algorithm>
#include <numeric>

#include "comm/tcp/frame.h"

namespace shoal::tcp {
namespace {

// Bytes of a chunk: less in large groups, in which a rank gets chunks from many at once.
int64_t chunk_bytes(int size) {
  return std::clamp((int64_t{2} << 20) / (size - 1) / 4096 * 4096, int64_t{16} << 10, int64_t{256} << 10);
}

constexpr int64_t slots = 4;  // chunks from each rank that may wait to be reduced
constexpr int64_t lag = 2;    // a reduced chunk is sent after this many later chunks that are not reduced yet

// The order of chunks on one connection: those to be reduced or passed on, and those that have been. Both ends use it.
template <class First, class Second>
void interleave(int64_t firsts, int64_t seconds, const First& first, const Second& second) {
  for (int64_t i = 0; i < std::max(firsts, seconds + lag); ++i) {
    if (i < firsts) first(i);
    if (i >= lag && i - lag < seconds) second(i - lag);
  }
}

class Scheduler {
 public:
  Scheduler(const Call& call, int rank, int size, std::byte* staging)
      : call_(call), rank_(rank), size_(size), chunk_(chunk_bytes(size)), staging_(staging) {
    made_.sends.resize(size);
    made_.receives.resize(size);
  }

  Schedule make() {
    const bool root = rank_ == call_.peer;
    switch (call_.op) {
      case Op::all_reduce:
      case Op::reduce:
        reduce_everywhere();
        break;
      case Op::reduce_scatter:
        reduce(parts_of(call_.inputs, size_), piece_of(call_.outputs[0]), {});
        break;
      case Op::all_gather:
        exchange(std::vector<Piece>(size_, piece_of(call_.inputs[0])), parts_of(call_.outputs, size_));
        break;
      case Op::all_to_all:
        exchange(parts_of(call_.inputs, size_), parts_of(call_.outputs, size_));
        break;
      case Op::gather:
        exchange(to_one(call_.peer, piece_of(call_.inputs[0])), root ? parts_of(call_.outputs, size_) : nothing());
        break;
      case Op::scatter:
        exchange(root ? parts_of(call_.inputs, size_) : nothing(), to_one(call_.peer, piece_of(call_.outputs[0])));
        break;
      case Op::broadcast:
        broadcast();
        break;
      case Op::send:
      case Op::recv:
      case Op::barrier:
        break;
    }
    const auto fits = [](const std::deque<Segment>& segments) {
      return segments.empty() ||
             (segments.size() == 1 && segments[0].after == 0 && segments[0].bytes <= bytes_with_entry);
    };
    made_.whole = std::all_of(made_.sends.begin(), made_.sends.end(), fits);
    return std::move(made_);
  }

 private:
  int64_t chunks_of(const Piece& piece) const { return (piece.bytes + chunk_ - 1) / chunk_; }
  Piece chunk_of(const Piece& piece, int64_t index) const {
    return {piece.data + index * chunk_, std::min(chunk_, piece.bytes - index * chunk_)};
  }

  std::vector<Piece> nothing() const { return std::vector<Piece>(size_); }
  std::vector<Piece> to_one(int which, const Piece& piece) const {
    auto pieces = nothing();
    pieces[which] = piece;
    return pieces;
  }
  bool is_small() const { return call_.inputs[0].nbytes() <= static_cast<size_t>(bytes_with_entry); }

  // Parts of a tensor, with borders at multiples of a cache line.
  std::vector<Piece> ranges() const {
    constexpr int64_t line = 64;
    const auto whole = piece_of(call_.inputs[0]);
    const auto lines = (whole.bytes + line - 1) / line;
    std::vector<Piece> list;
    for (int rank = 0; rank < size_; ++rank) {
      const auto begin = std::min(whole.bytes, lines * rank / size_ * line);
      list.push_back({whole.data + begin, std::min(whole.bytes, lines * (rank + 1) / size_ * line) - begin});
    }
    return list;
  }

  void send(int to, const Piece& piece, int64_t after = 0) {
    if (piece.bytes > 0) made_.sends[to].push_back({piece.data, piece.bytes, after});
  }
  void receive(int from, const Piece& piece, int64_t after = 0, int64_t feeds = -1) {
    if (piece.bytes > 0) made_.receives[from].push_back({piece.data, piece.bytes, after, feeds});
  }

  void exchange(const std::vector<Piece>& to, const std::vector<Piece>& from) {
    for (int other = 0; other < size_; ++other) {
      if (other == rank_) {
        if (from[other].bytes > 0 && to[other].data != from[other].data)
          made_.copies.emplace_back(to[other], from[other].data);
        continue;
      }
      send(other, to[other]);
      receive(other, from[other]);
    }
  }

  void reduce_everywhere() {
    std::vector<int> targets{call_.peer};
    if (call_.op == Op::all_reduce) {
      targets.resize(size_);
      std::iota(targets.begin(), targets.end(), 0);
    }
    if (!is_small()) {
      const auto parts = ranges();
      return reduce(parts, parts[rank_], targets);
    }
    auto to = nothing();
    for (const int target : targets) to[target] = piece_of(call_.inputs[0]);
    reduce(to, to[rank_], {});
  }

  // Reduces the values that all ranks have for `result`, and sends them to `targets`, if any: there they belong to part
  // `rank` of `parts`.
  void reduce(const std::vector<Piece>& parts, const Piece& result, const std::vector<int>& targets) {
    const auto count = chunks_of(result);
    const auto used = std::min(count, slots);
    const auto slot = [&](int of, int64_t index) {
      const auto place = (of < rank_ ? of : of - 1) * used + index % slots;
      return staging_ + place * std::min(chunk_, result.bytes);
    };
    for (int64_t i = 0; i < count; ++i) {
      const auto destination = chunk_of(result, i);
      Round round{size_ - 1, {}, destination.data, destination.bytes};
      for (int of = 0; of < size_; ++of) {
        round.sources.push_back(of == rank_ ? chunk_of(parts[rank_], i).data : slot(of, i));
      }
      made_.rounds.push_back(std::move(round));
    }
    const auto wants = [&](int rank) { return std::count(targets.begin(), targets.end(), rank) > 0; };
    for (int other = 0; other < size_; ++other) {
      if (other == rank_) continue;
      interleave(
          chunks_of(parts[other]), wants(other) ? count : 0, [&](int64_t i) { send(other, chunk_of(parts[other], i)); },
          [&](int64_t i) { send(other, chunk_of(result, i), i + 1); });
      interleave(
          count, wants(rank_) ? chunks_of(parts[other]) : 0,
          [&](int64_t i) {
            receive(other, {slot(other, i), chunk_of(result, i).bytes}, std::max<int64_t>(0, i + 1 - slots), i);
          },
          [&](int64_t i) { receive(other, chunk_of(parts[other], i)); });
    }
  }

  void broadcast() {
    const int root = call_.peer;
    const auto whole = piece_of(call_.inputs[0]);
    if (size_ == 2 || is_small()) {
      exchange(rank_ == root ? std::vector<Piece>(size_, whole) : nothing(),
               rank_ == root ? nothing() : to_one(root, whole));
      made_.copies.clear();
      return;
    }
    const auto parts = ranges();
    if (rank_ == root) {
      for (int other = 0; other < size_; ++other) {
        if (other == root) continue;
        interleave(
            chunks_of(parts[other]), chunks_of(parts[root]), [&](int64_t i) { send(other, chunk_of(parts[other], i)); },
            [&](int64_t i) { send(other, chunk_of(parts[root], i)); });
      }
      return;
    }
    const auto count = chunks_of(parts[rank_]);
    made_.rounds.resize(count, Round{1, {}, nullptr, 0});
    interleave(
        count, chunks_of(parts[root]), [&](int64_t i) { receive(root, chunk_of(parts[rank_], i), 0, i); },
        [&](int64_t i) { receive(root, chunk_of(parts[root], i)); });
    for (int other = 0; other < size_; ++other) {
      if (other == rank_ || other == root) continue;
      for (int64_t i = 0; i < count; ++i) send(other, chunk_of(parts[rank_], i), i + 1);
      for (int64_t i = 0; i < chunks_of(parts[other]); ++i) receive(other, chunk_of(parts[other], i));
    }
  }

  const Call& call_;
  const int rank_;
  const int size_;
  const int64_t chunk_;
  std::byte* const staging_;
  Schedule made_;
};

}  // namespace

int64_t staging_bytes(int size) {
  return (size - 1) * slots * chunk_bytes(size);
}

Schedule make_schedule(const Call& call, int rank, int size, std::byte* staging) {
  return Scheduler(call, rank, size, staging).make();
}

}  // namespace shoal::tcp
