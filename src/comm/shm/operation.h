#pragma once
// Collective on the host transport, from announcement to completion. Never waits: advance() progresses as far as the
// peers allow.
//
//   announced   the header is in the ring; the data are in the header, in a shared tensor, or still to be staged
//   agreed      all ranks have announced the operation; their fingerprints are equal
//   executed    this rank has processed the peers' data (in rounds, if some rank's data are staged)
//   finished    the peers no longer need this rank's data

#include <atomic>
#include <vector>

#include "comm/shm/host_group.h"
#include "comm/shm/operation_plan.h"
#include "shoal/detail/call.h"

namespace shoal::shm {

class Operation {
 public:
  Operation(HostGroup& group, Call call, uint64_t number, const std::vector<int>& world_ranks);

  // Announces the operation if the ring has room. Operations of a group are announced and executed in order.
  bool announce();
  // Progresses as far as possible. first: all earlier operations have been executed, so this one may be.
  void advance(bool first);

  bool executed() const { return state_ >= State::executed; }
  bool finished() const { return state_ == State::finished; }
  // Ranks of the group that have not announced the operation yet.
  std::vector<int> missing() const;
  const Call& call() const { return call_; }

 private:
  enum class State { waiting, announced, agreed, filled, worked, executed, finished };

  void describe_windows(Header& header);
  void agree();
  void check_unequal_parts() const;
  bool step();  // makes one transition within execution; false: it must wait
  void fill_stage();
  bool work(int64_t begin, int64_t end);  // false: the group has failed meanwhile
  void move_bytes(int64_t begin, int64_t end);
  void copy_out(int64_t begin, int64_t end);
  std::byte* locate(int rank, int part, int64_t begin) const;
  // destinations <- reduction over all ranks of bytes [from, to) of their part `part`, in the round that begins at
  // `begin`.
  void reduce_range(std::vector<std::byte*> destinations, int part, int64_t begin, int64_t from, int64_t to);

  HostGroup& group_;
  Call call_;
  uint64_t number_;
  const std::vector<int>& world_ranks_;
  OperationPlan plan_;
  // Written under the transport's lock. A waiting thread reads it without the lock, to see whether another thread has
  // finished the operation, before it reads the tensors.
  std::atomic<State> state_ = State::waiting;
  bool staged_ = false;      // some rank's data are staged, so all ranks work in rounds
  bool own_shared_ = false;  // peers read or write this rank's tensors in place
  bool any_shared_ = false;  // likewise, of some rank
  int64_t rounds_ = 1;
  int64_t round_ = 0;
  int64_t round_bytes_ = 0;  // bytes of one part in one round
};

}  // namespace shoal::shm
