#pragma once
// One collective on the host transport, from being announced to being finished. It never waits: advance() goes as far
// as the peers allow.
//
//   announced   the header is in the ring, the data are in the header, in a shared tensor, or still to be staged
//   agreed      all ranks have announced; the fingerprints are equal
//   executed    this rank has done its work on the peers' data (in rounds, where some rank's data are staged)
//   finished    the peers do not need this rank's data any more

#include <atomic>
#include <vector>

#include "comm/shm/host_group.h"
#include "comm/shm/plan.h"
#include "shoal/detail/call.h"

namespace shoal {

class Operation {
 public:
  Operation(HostGroup& group, Call call, uint64_t number, const std::vector<int>& world_ranks);

  // Announces the operation if the ring has room. Operations of a group are announced and executed in order.
  bool announce();
  // Goes on as far as possible; executes only if `first`, i.e. all earlier operations have been executed.
  void advance(bool first);

  bool executed() const { return state_ >= State::executed; }
  bool finished() const { return state_ == State::finished; }
  // Ranks (of the group) that have not announced it yet.
  std::vector<int> missing() const;
  const Call& call() const { return call_; }

 private:
  enum class State { waiting, announced, agreed, filled, worked, executed, finished };

  void describe_windows(Header& header);
  void agree();
  void check_unequal_parts() const;
  bool step();  // one transition within execution; false: must wait
  void fill_stage();
  void work(int64_t begin, int64_t end);
  void copy_out(int64_t begin, int64_t end);
  std::byte* locate(int rank, int part, int64_t begin) const;
  // destinations <- reduction over all ranks of bytes [from, to) of their part `part`, in the round that begins at
  // `begin`.
  void reduce_range(std::vector<std::byte*> destinations, int part, int64_t begin, int64_t from, int64_t to);

  HostGroup& group_;
  Call call_;
  uint64_t number_;
  const std::vector<int>& world_ranks_;
  Plan plan_;
  // Changes under the transport's lock. A waiting thread looks without it whether another one has finished the
  // operation, and then at the tensors.
  std::atomic<State> state_ = State::waiting;
  bool staged_ = false;      // some rank's data are staged, so everybody goes in rounds
  bool own_shared_ = false;  // peers read or write this rank's tensors in place
  int64_t rounds_ = 1;
  int64_t round_ = 0;
  int64_t round_bytes_ = 0;  // of one part in one round
};

}  // namespace shoal
