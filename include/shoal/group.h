#pragma once
// Groups of ranks: collectives, messages, and what ranks do with them together.

#include <memory>
#include <string>
#include <torch/types.h>
#include <vector>

#include "shoal/detail/call.h"
#include "shoal/detail/call_log.h"
#include "shoal/detail/host_shared_buffer.h"

namespace shoal {

// A handle on an operation in flight.

class PendingWork;

// Move-only. Owns the operation's tensors until it is finished, so the caller may drop its own handles at once.
// A default-constructed Work is finished. Dropping an unfinished Work waits for it, so that memory which the caller owns
// may go; an error of the operation is then said by the next call on the group (CommError). While an exception is on its
// way nothing is waited for: the group keeps the tensors and the operation goes on. Not thread-safe; one thread waits.
class [[nodiscard]] Work {
 public:
  Work();
  explicit Work(std::unique_ptr<PendingWork> pending);
  Work(Work&&) noexcept;
  Work& operator=(Work&&) noexcept;
  ~Work();

  // Blocks until the operation is finished on this rank. Throws CommError that names the rank at fault, the operation,
  // its number in the group, its step and bucket, when a peer is dead, stopped or later than the world's deadline.
  // Waiting again on a finished Work returns at once.
  void wait();

  // True when wait() would not block.
  bool done();

 private:
  std::unique_ptr<PendingWork> pending_;
};

// A set of ranks that communicate, and the collectives on it.

struct GroupState;

// What a group has done since it was made, on this rank, through all its handles.
struct GroupStatistics {
  int64_t calls = 0;    // operations
  int64_t bytes = 0;    // sum of Call::bytes
  double waited_s = 0;  // seconds that threads have spent inside Work::wait
};

// A cheap handle; copies mean the same group. Every collective must be called by all ranks of the group in the same
// order. All of them are asynchronous: they return a Work that must be waited for before the tensors are read or
// written. Tensors must be contiguous (UsageError otherwise). A group of one rank runs the same code with an identity
// transport. Thread-safety: calls on one group from several threads must be serialised by the caller.
class Group {
 public:
  explicit Group(std::shared_ptr<GroupState> state);

  int rank() const;  // this process's place in the group, 0 .. size() - 1
  int size() const;
  const std::string& name() const;
  std::string transport() const;  // "host", "gloo", "mpi", "identity", ...
  int world_rank(int rank) const;

  // tensor <- reduction over ranks, on every rank, in place.
  Work all_reduce(at::Tensor tensor, ReduceOp op = ReduceOp::sum, Label label = {}) const;
  // tensor <- reduction over ranks on `root`; undefined elsewhere.
  Work reduce(at::Tensor tensor, int root, ReduceOp op = ReduceOp::sum, Label label = {}) const;
  // output [n] <- this rank's n-element part of the reduction of input [size() * n].
  Work reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op = ReduceOp::sum, Label label = {}) const;
  // output [size() * n] <- the inputs [n] of all ranks, in rank order.
  Work all_gather(at::Tensor output, at::Tensor input, Label label = {}) const;
  // tensor <- the root's tensor.
  Work broadcast(at::Tensor tensor, int root, Label label = {}) const;
  // outputs (on the root: size() tensors like input; elsewhere empty) <- the inputs of all ranks.
  Work gather(std::vector<at::Tensor> outputs, at::Tensor input, int root, Label label = {}) const;
  // output <- inputs[rank()] of the root (on the root: size() tensors like output; elsewhere empty).
  Work scatter(at::Tensor output, std::vector<at::Tensor> inputs, int root, Label label = {}) const;
  // Part r of input [size() * n] goes to rank r; part r of output [size() * n] comes from rank r.
  Work all_to_all(at::Tensor output, at::Tensor input, Label label = {}) const;
  // Point to point; messages between two ranks with equal tags arrive in order. tag >= 0.
  Work send(at::Tensor tensor, int destination, int tag = 0, Label label = {}) const;
  Work recv(at::Tensor tensor, int source, int tag = 0, Label label = {}) const;
  // Finished when all ranks have called it.
  Work barrier(Label label = {}) const;

  // Memory for buffers that collectives run on: a contiguous, zeroed, one-dimensional tensor of `numel` elements,
  // aligned to 128 bytes. With the host transport it lies in memory that the host's ranks share, and operations on it,
  // or on parts of it, work on it in place instead of copying; pages take memory once they are written. Elsewhere it is
  // plain memory. Not collective. Lives as long as the tensor.
  at::Tensor allocate(int64_t numel, const at::TensorOptions& options) const;

  // One copy per host of `numel` elements that all ranks need in full, rank r's part at owners[r] (disjoint; elements
  // without an owner stay zero). See OnceBuffer. Collective.
  OnceBuffer allocate_once(int64_t numel, const at::TensorOptions& options, std::vector<Range> owners,
                           const OnceBufferOptions& once = {}) const;

  // A group of some of this group's ranks, numbered in the order given. Collective over those ranks only. Throws
  // UsageError when this rank is not among them, or a rank is repeated or outside 0 .. size() - 1.
  Group subgroup(const std::vector<int>& ranks) const;
  // The ranks of this group that run on this rank's host, in rank order. Collective over this group.
  Group by_host() const;

  GroupStatistics statistics() const;

  // The same group; calls through the returned handle, and through subgroups made from it, are also recorded in `log`.
  Group recorded(std::shared_ptr<CallLog> log) const;

 private:
  friend const std::shared_ptr<GroupState>& state_of(const Group& group);

  std::shared_ptr<GroupState> state_;
};

// Checks that ranks agree.

// Every rank passes its list of items, each one line of text (for a model: "fc.weight float32 [10, 128]"). Returns
// when all lists are equal; otherwise throws DisagreeError on every rank, which names the first item that differs
// (against rank 0) and both ranks. Collective. Costs one all-gather of 8 bytes when all agree.
// `subject` says what is compared: "parameters of the model".
void agree(const Group& group, const std::string& subject, const std::vector<std::string>& items);

// Many tensors in few operations.

// What travels together: tensors of one dtype and device, at most `chunk_bytes` (a larger tensor alone).
std::vector<std::vector<at::Tensor>> coalesced(std::vector<at::Tensor> tensors, int64_t chunk_bytes = 250LL << 20);

// Every tensor <- the root's. They travel as coalesced() says. Any layout is accepted. Collective; blocks; extra
// memory: one chunk.
void broadcast_coalesced(const Group& group, const std::vector<at::Tensor>& tensors, int root, const Label& label,
                         int64_t chunk_bytes = 250LL << 20);

// The mean over ranks of a sparse COO tensor, weighted: sum of values / sum of weights, where a rank passes nothing
// (an undefined tensor) if it has no gradient. Collective; blocks; moves the non-zero rows only.
struct SparseSum {
  at::Tensor sum;   // coalesced; undefined when no rank has one
  double weight;    // sum over ranks
  int64_t present;  // number of ranks that passed a tensor
};
SparseSum all_reduce_sparse(const Group& group, const at::Tensor& sparse, at::IntArrayRef sizes,
                            const at::TensorOptions& options, double weight, const Label& label);

}  // namespace shoal
