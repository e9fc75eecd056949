#pragma once
// Group of ranks: collectives, point-to-point messages, and utilities built on them.

#include <torch/types.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shoal/call_log.h"
#include "shoal/detail/call.h"
#include "shoal/detail/host_shared_buffer.h"

namespace shoal {

class BackendFlight;
class PendingWork;

// Handle on an asynchronous operation, like c10d::Work. Move-only. Owns the tensors of the operation until it has
// finished, so the caller may drop its own references immediately. A default-constructed Work is already finished. The
// destructor waits for the operation; an error is then thrown by the next call on the group (CommError). During stack
// unwinding the destructor does not wait: the group keeps the tensors alive and the operation continues. Not
// thread-safe.
class [[nodiscard]] Work {
 public:
  Work();
  explicit Work(std::unique_ptr<PendingWork> pending);
  Work(Work&&) noexcept;
  Work& operator=(Work&&) noexcept;
  ~Work();

  // Blocks until the operation has finished on this rank. Throws CommError if a peer is dead, stopped or exceeds the
  // timeout; the message names that rank, the operation, its sequence number, step and bucket. The group is unusable
  // then, on all ranks, and nobody reads or writes the tensors for the operation any more (but over MPI). Calling
  // wait() again returns immediately.
  void wait();

  // As wait(), for `limit` at most; true if the operation has finished.
  bool wait_for(std::chrono::milliseconds limit);

  // True if wait() would return or throw at once: the operation has finished or failed, its timeout (from the first
  // call of done()) is over, or a rank that it needs has been gone for 5 s.
  bool done();

  // Rank of the group that has sent the message. For a finished receive from any_source.
  int source() const;

 private:
  friend class BackendFlight;
  // One slice of a wait that ends with the operation; true if that has finished.
  bool wait_on(std::chrono::milliseconds slice);
  bool take_if(bool finished);

  std::unique_ptr<PendingWork> pending_;
  int source_ = any_source;
};

struct GroupState;

// Statistics of a group on this rank, over all handles on it.
struct GroupStatistics {
  int64_t calls = 0;    // operations
  int64_t bytes = 0;    // sum of Call::bytes
  double waited_s = 0;  // total time that threads have spent in Work::wait

  GroupStatistics operator+(const GroupStatistics& other) const {
    return {calls + other.calls, bytes + other.bytes, waited_s + other.waited_s};
  }
  GroupStatistics operator-(const GroupStatistics& earlier) const {
    return {calls - earlier.calls, bytes - earlier.bytes, waited_s - earlier.waited_s};
  }
};

// Set of ranks that communicate, like c10d::ProcessGroup. Cheap to copy; copies refer to the same group. All ranks must
// call the same collectives in the same order. They are asynchronous, but for a group's first over NCCL: wait for the
// returned Work before you read or write the tensors, which must be contiguous (UsageError). An input that shares
// memory with an output is copied first, unless it is this rank's own part at its own place; all_to_all refuses it. A
// conjugate or negative bit (torch::conj) is resolved in inputs; tensors that are written must have none (UsageError).
// A group of one rank runs the same code with an identity transport. Thread-safety: the caller must serialise calls on
// one group.
class Group {
 public:
  explicit Group(std::shared_ptr<GroupState> state);

  int rank() const;  // rank of this process in the group, 0 .. size() - 1
  int size() const;
  const std::string& name() const;
  std::string transport() const;  // "host", "tcp", "host+tcp", "gloo", "mpi", "identity", ...
  int world_rank(int rank) const;

  // In-place reduction of `tensor` over all ranks.
  Work all_reduce(at::Tensor tensor, ReduceOp op = ReduceOp::sum, Label label = {}) const;
  // Reduction of a number, or of a list of numbers in one operation, over all ranks: for metrics and decisions. In
  // float64, so integers are exact up to 2^53. Returns the result, the same on all ranks; blocks. Lists have the same
  // length on all ranks (DisagreeError; over MPI only with check_agreement). The mean over ranks is ReduceOp::avg; for
  // a mean over samples, see MeanMetric (shoal/metrics.h).
  double all_reduce(double value, ReduceOp op = ReduceOp::sum, Label label = {}) const;
  std::vector<double> all_reduce(std::vector<double> values, ReduceOp op = ReduceOp::sum, Label label = {}) const;
  // In-place reduction of `tensor` to `root`. On other ranks the content of `tensor` is undefined afterwards.
  Work reduce(at::Tensor tensor, int root, ReduceOp op = ReduceOp::sum, Label label = {}) const;
  // Reduces input [size() * n] over all ranks; rank r gets elements [r * n, (r + 1) * n) of the result in output [n].
  Work reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op = ReduceOp::sum, Label label = {}) const;
  // Gathers the inputs [n] of all ranks into output [size() * n], in rank order.
  Work all_gather(at::Tensor output, at::Tensor input, Label label = {}) const;
  // Copies the tensor of `root` to all ranks.
  Work broadcast(at::Tensor tensor, int root, Label label = {}) const;
  // Gathers the inputs of all ranks on `root`. outputs: on `root`, size() tensors of the shape of `input`; empty
  // elsewhere.
  Work gather(std::vector<at::Tensor> outputs, at::Tensor input, int root, Label label = {}) const;
  // Sends inputs[r] of `root` to the output of rank r. inputs: on `root`, size() tensors of the shape of `output`;
  // empty elsewhere.
  Work scatter(at::Tensor output, std::vector<at::Tensor> inputs, int root, Label label = {}) const;
  // Exchanges parts: part r of input [size() * n] goes to rank r, and part r of output [size() * n] comes from rank r.
  // They must not share memory (UsageError).
  Work all_to_all(at::Tensor output, at::Tensor input, Label label = {}) const;
  // Point-to-point messages. Messages between two ranks with the same tag arrive in order. tag >= 0. source: a rank, or
  // any_source (on one host, or over tcp or Gloo alone). The end of the group waits for up to 10 s until messages that
  // were sent have been read.
  Work send(at::Tensor tensor, int destination, int tag = 0, Label label = {}) const;
  Work recv(at::Tensor tensor, int source, int tag = 0, Label label = {}) const;
  // The returned Work finishes once all ranks have called barrier().
  Work barrier(Label label = {}) const;

  // Allocates a contiguous one-dimensional tensor of `numel` zeros for use in collectives, aligned to 128 bytes. With
  // the host transport it is in shared memory, and collectives on it or on views of it need no copy; physical memory is
  // used only for pages that are written. With other transports it is ordinary memory. Lives as long as the tensor. Not
  // collective.
  at::Tensor allocate(int64_t numel, const at::TensorOptions& options) const;

  // Allocates `numel` elements that exist once per host; rank r owns the elements owners[r]. The ranges must be
  // disjoint; elements without an owner stay zero. See HostSharedBuffer. Collective.
  HostSharedBuffer allocate_host_shared(int64_t numel, const at::TensorOptions& options, std::vector<Range> owners,
                                        const HostSharedBufferOptions& buffer = {}) const;

  // Creates a group of some of this group's ranks, numbered in the given order. Collective over those ranks only.
  // Throws UsageError if this rank is not among them, or if a rank is repeated or outside 0 .. size() - 1; CommError if
  // they have not connected within the limit, by default WorldOptions::rendezvous_timeout_seconds. Ranks may then try
  // again: one that comes late fails at once in the attempts that others have given up, and meets them in the present
  // one.
  Group subgroup(const std::vector<int>& ranks, std::optional<std::chrono::milliseconds> limit = {}) const;
  // Creates the group of the ranks on this rank's host, in rank order. Collective over this group.
  Group by_host() const;

  GroupStatistics statistics() const;

  // Returns a handle on the same group that also records its calls in `log`. Subgroups created from it record in `log`
  // too.
  Group recorded(std::shared_ptr<CallLog> log) const;

 private:
  friend const std::shared_ptr<GroupState>& state_of(const Group& group);

  std::shared_ptr<GroupState> state_;
};

// Checks that a list of strings is equal on all ranks (for a model: "fc.weight float32 [10, 128]"). Otherwise throws
// DisagreeError on every rank; the message names the first item that differs from rank 0, and both ranks. `subject`
// describes the list in the message: "parameters of the model". Costs one all-gather of 8 bytes if all lists are equal.
// Collective.
void agree(const Group& group, const std::string& subject, const std::vector<std::string>& items);

// Broadcasts tensors of any layout from `root`, in chunks of one dtype and device of at most `chunk_bytes`; a larger
// tensor is a chunk of its own. Blocks. Extra memory: one chunk. Collective.
void broadcast_coalesced(const Group& group, const std::vector<at::Tensor>& tensors, int root, const Label& label,
                         int64_t chunk_bytes = 250LL << 20);

}  // namespace shoal
