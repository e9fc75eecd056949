#include "comm/transport/backend.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "comm/group/group_state.h"
#include "shoal/error.h"

namespace shoal {
namespace {

using Tensors = std::vector<at::Tensor>;

ReduceOp from_c10d(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return ReduceOp::sum;
    case c10d::ReduceOp::AVG:
      return ReduceOp::avg;
    case c10d::ReduceOp::PRODUCT:
      return ReduceOp::product;
    case c10d::ReduceOp::MIN:
      return ReduceOp::min;
    case c10d::ReduceOp::MAX:
      return ReduceOp::max;
    case c10d::ReduceOp::BAND:
      return ReduceOp::band;
    case c10d::ReduceOp::BOR:
      return ReduceOp::bor;
    case c10d::ReduceOp::BXOR:
      return ReduceOp::bxor;
    case c10d::ReduceOp::PREMUL_SUM:
      return ReduceOp::premul_sum;
    default:
      throw UsageError("this c10d reduce operation is not supported by shoal");
  }
}

double factor_of(const c10d::ReduceOp& op) {
  const auto* supplement = dynamic_cast<const c10d::PreMulSumSupplement*>(op.supplement_.get());
  if (supplement == nullptr) return 1;
  return supplement->tensor_factor.defined() ? supplement->tensor_factor.item<double>() : supplement->double_factor;
}

// Work of one or several operations that finish together.
class GroupWork : public c10d::Work {
 public:
  GroupWork(std::vector<shoal::Work> works, Tensors results, std::shared_ptr<class Waiter> waiter)
      : works_(std::move(works)), results_(std::move(results)), waiter_(std::move(waiter)) {}

  bool isCompleted() override {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return false;  // another thread is waiting for it
    if (error_ || finished_) return true;
    for (auto& work : works_) {
      if (!work.done()) return false;
    }
    return true;
  }

  bool isSuccess() const override {
    const std::lock_guard lock(mutex_);
    return !error_;
  }

  std::exception_ptr exception() const override {
    const std::lock_guard lock(mutex_);
    return error_;
  }

  Tensors result() override { return results_; }

  bool wait(std::chrono::milliseconds) override {
    const std::lock_guard lock(mutex_);
    if (error_) std::rethrow_exception(error_);
    if (finished_) return true;
    try {
      for (auto& work : works_) work.wait();
    } catch (...) {
      error_ = std::current_exception();
      throw;
    }
    finished_ = true;
    return true;
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  mutable std::mutex mutex_;  // the waiter's thread and the caller's use this object
  std::vector<shoal::Work> works_;
  Tensors results_;
  std::shared_ptr<Waiter> waiter_;  // a work may outlive its backend
  bool finished_ = false;
  std::exception_ptr error_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Thread that waits for works whose futures were requested. It starts with the first such work.
class Waiter {
 public:
  ~Waiter() {
    {
      const std::lock_guard lock(queue_->mutex);
      queue_->stop = true;
    }
    queue_->changed.notify_one();
    if (!thread_.joinable()) return;
    // The thread itself may hold the last reference to a work, and so to this object.
    if (thread_.get_id() == std::this_thread::get_id()) {
      thread_.detach();
    } else {
      thread_.join();
    }
  }

  void add(c10::intrusive_ptr<GroupWork> work, c10::intrusive_ptr<c10::ivalue::Future> future) {
    const std::lock_guard lock(queue_->mutex);
    queue_->entries.emplace_back(std::move(work), std::move(future));
    if (!thread_.joinable()) thread_ = std::thread([queue = queue_] { run(*queue); });
    queue_->changed.notify_one();
  }

 private:
  struct Queue {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::pair<c10::intrusive_ptr<GroupWork>, c10::intrusive_ptr<c10::ivalue::Future>>> entries;
    bool stop = false;
  };

  static void run(Queue& queue) {
    std::unique_lock lock(queue.mutex);
    while (true) {
      queue.changed.wait(lock, [&] { return queue.stop || !queue.entries.empty(); });
      if (queue.entries.empty()) return;
      auto [work, future] = std::move(queue.entries.front());
      queue.entries.pop_front();
      lock.unlock();
      try {
        work->wait(std::chrono::milliseconds(0));
        future->markCompleted(c10::IValue(work->result()));
      } catch (...) {
        future->setError(std::current_exception());
      }
      work.reset();
      future.reset();
      lock.lock();
    }
  }

  std::shared_ptr<Queue> queue_ = std::make_shared<Queue>();
  std::thread thread_;
};

c10::intrusive_ptr<c10::ivalue::Future> GroupWork::getFuture() {
  const std::lock_guard lock(mutex_);
  if (!future_) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    waiter_->add(c10::intrusive_ptr<GroupWork>::reclaim_copy(this), future_);
  }
  return future_;
}

class GroupBackend : public c10d::Backend {
 public:
  explicit GroupBackend(const Group& group) : Backend(group.rank(), group.size()), group_(group) {}

  using Pending = c10::intrusive_ptr<c10d::Work>;

  const Group& group() const { return group_; }
  const std::string getBackendName() const override { return "shoal"; }
  bool supportsCoalescing() const override { return false; }

  Pending allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return start({reducing(Op::all_reduce, options.reduceOp, tensors, {})}, tensors);
  }
  Pending allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    std::vector<Call> calls;
    for (const auto& tensor : tensors) calls.push_back(reducing(Op::all_reduce, options.reduceOp, {tensor}, {}));
    return start(std::move(calls), tensors);
  }
  Pending reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto call = reducing(Op::reduce, options.reduceOp, tensors, {});
    call.peer = static_cast<int>(options.rootRank);
    return start({call}, tensors);
  }
  Pending broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return start({rooted(Op::broadcast, options.rootRank, tensors, {})}, tensors);
  }

  Pending allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    return start({plain(Op::all_gather, inputs, outputs.at(0))}, outputs[0]);
  }
  Pending _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    return start({plain(Op::all_gather, {input}, {output})}, {output});
  }
  Pending allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    std::vector<Call> calls;
    Tensors results;
    for (size_t i = 0; i < inputs.size(); ++i) {
      // c10d has one list per rank; Group has one list per tensor.
      Tensors list;
      for (const auto& of_rank : outputs) list.push_back(of_rank.at(i));
      calls.push_back(plain(Op::all_gather, {inputs[i]}, list));
      results.insert(results.end(), list.begin(), list.end());
    }
    return start(std::move(calls), std::move(results));
  }
  Pending allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    std::vector<Call> calls;
    for (size_t i = 0; i < inputs.size(); ++i) calls.push_back(plain(Op::all_gather, {inputs[i]}, {outputs.at(i)}));
    return start(std::move(calls), outputs);
  }

  Pending reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    return start({reducing(Op::reduce_scatter, options.reduceOp, inputs.at(0), outputs)}, outputs);
  }
  Pending _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    return start({reducing(Op::reduce_scatter, options.reduceOp, {input}, {output})}, {output});
  }
  Pending reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    std::vector<Call> calls;
    for (size_t i = 0; i < inputs.size(); ++i) {
      calls.push_back(reducing(Op::reduce_scatter, options.reduceOp, {inputs[i]}, {outputs.at(i)}));
    }
    return start(std::move(calls), outputs);
  }

  Pending gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto results = outputs.empty() ? Tensors{} : outputs[0];
    return start({rooted(Op::gather, options.rootRank, inputs, results)}, results);
  }
  Pending scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    return start({rooted(Op::scatter, options.rootRank, inputs.empty() ? Tensors{} : inputs[0], outputs)}, outputs);
  }
  Pending alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override {
    return start({plain(Op::all_to_all, inputs, outputs)}, outputs);
  }
  Pending alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions&) override {
    const auto cut = [](const at::Tensor& tensor, const std::vector<int64_t>& splits) {
      return splits.empty() ? Tensors{tensor} : tensor.split_with_sizes(splits, 0);
    };
    // Equal parts on one side say nothing about the other side; lists on both sides are always right.
    if (output_splits.empty() && input_splits.empty()) {
      return start({plain(Op::all_to_all, {input}, {output})}, {output});
    }
    const auto whole = [this](const at::Tensor& tensor) {
      return std::vector<int64_t>(getSize(), tensor.size(0) / getSize());
    };
    return start({plain(Op::all_to_all, cut(input, input_splits.empty() ? whole(input) : input_splits),
                        cut(output, output_splits.empty() ? whole(output) : output_splits))},
                 {output});
  }

  Pending send(Tensors& tensors, int destination, int tag) override {
    auto call = rooted(Op::send, destination, tensors, {});
    call.tag = tag;
    return start({call}, {});
  }
  Pending recv(Tensors& tensors, int source, int tag) override {
    auto call = rooted(Op::recv, source, tensors, {});
    call.tag = tag;
    return start({call}, tensors);
  }
  Pending barrier(const c10d::BarrierOptions&) override { return start({plain(Op::barrier, {}, {})}, {}); }

  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return issued_; }

 private:
  static Call plain(Op op, Tensors inputs, Tensors outputs) {
    return {.op = op, .inputs = std::move(inputs), .outputs = std::move(outputs), .label = {}};
  }
  static Call rooted(Op op, int64_t root, Tensors inputs, Tensors outputs) {
    auto call = plain(op, std::move(inputs), std::move(outputs));
    call.peer = static_cast<int>(root);
    return call;
  }
  static Call reducing(Op op, const c10d::ReduceOp& reduce, Tensors inputs, Tensors outputs) {
    auto call = plain(op, std::move(inputs), std::move(outputs));
    call.reduce = from_c10d(reduce);
    call.factor = factor_of(reduce);
    return call;
  }

  Pending start(std::vector<Call> calls, Tensors results) {
    std::vector<shoal::Work> works;
    for (auto& call : calls) works.push_back(issue(group_, std::move(call)));
    ++issued_;
    return c10::make_intrusive<GroupWork>(std::move(works), std::move(results), waiter_);
  }

  Group group_;
  uint64_t issued_ = 0;
  std::shared_ptr<Waiter> waiter_ = std::make_shared<Waiter>();
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_backend(const Group& group) {
  return c10::make_intrusive<GroupBackend>(group);
}

std::optional<Group> group_of_backend(const c10d::Backend& backend) {
  const auto* own = dynamic_cast<const GroupBackend*>(&backend);
  return own == nullptr ? std::nullopt : std::optional(own->group());
}

}  // namespace shoal
