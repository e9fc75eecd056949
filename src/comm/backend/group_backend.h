#pragma once
// The c10d backend of a group.

#include "comm/backend/backend.h"
#include "comm/backend/operands.h"
#include "comm/backend/progress.h"
#include "comm/backend/tensor_pool.h"

namespace shoal {

// Thread-safe as c10d requires: one thread at a time issues operations; any thread waits.
class GroupBackend : public c10d::Backend {
 public:
  GroupBackend(const Group& group, std::chrono::milliseconds timeout);

  using Pending = c10::intrusive_ptr<c10d::Work>;
  using Lists = std::vector<Tensors>;

  const Group& group() const { return group_; }
  const std::string getBackendName() const override { return "shoal"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  bool supportsCoalescing() const override { return false; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return issued_; }
  c10d::ErrorType getError() override;
  // Ends all waits for operations in flight with an error, on this rank and then on the others.
  void abort() override;
  // Of destroy_process_group(): the process may end now, and peers may not have read its last messages.
  void shutdown() override;

  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;  // NOLINT(google-runtime-int): c10d's

  Pending allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Pending allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Pending allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  Pending reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  Pending broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  Pending allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  Pending _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  Pending allgather_coalesced(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  Pending allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  Pending reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& options) override;
  Pending _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  Pending reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  Pending gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  Pending scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) override;
  Pending alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  Pending alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  Pending send(Tensors& tensors, int destination, int tag) override;
  Pending recv(Tensors& tensors, int source, int tag) override;
  Pending recvAnysource(Tensors& tensors, int tag) override;
  Pending barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

 private:
  class Job;

  const Group group_;
  const c10::intrusive_ptr<Options> options_;
  const std::shared_ptr<TensorPool> pool_;
  uint64_t issued_ = 0;
};

}  // namespace shoal
