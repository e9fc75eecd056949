#include "comm/transport/c10d_transport.h"

#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <thread>

#include "base/without_sigpipe.h"
#include "comm/reduce/reduce_kernels.h"
#include "comm/transport/empty_call.h"
#include "shoal/error.h"

namespace shoal {
namespace {

c10d::ReduceOp to_c10d(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      return c10d::ReduceOp::SUM;
    case ReduceOp::avg:
      return c10d::ReduceOp::AVG;
    case ReduceOp::min:
      return c10d::ReduceOp::MIN;
    case ReduceOp::max:
      return c10d::ReduceOp::MAX;
    case ReduceOp::product:
      return c10d::ReduceOp::PRODUCT;
    case ReduceOp::band:
      return c10d::ReduceOp::BAND;
    case ReduceOp::bor:
      return c10d::ReduceOp::BOR;
    case ReduceOp::bxor:
      return c10d::ReduceOp::BXOR;
    case ReduceOp::premul_sum:
      throw UsageError("premul_sum is supported by the transports host and tcp only");
  }
  return c10d::ReduceOp::SUM;
}

class C10dWork : public TransportWork {
 public:
  C10dWork(c10::intrusive_ptr<c10d::Work> work, const Call& call)
      : work_(std::move(work)),
        point_to_point_(call.op == Op::send || call.op == Op::recv),
        any_source_(call.op == Op::recv && call.peer == any_source),
        inputs_(call.inputs),
        outputs_(call.outputs) {}

  bool done() override { return !point_to_point_ && work_->isCompleted(); }
  int source() const override { return any_source_ ? work_->sourceRank() : any_source; }

  bool wait_for(Milliseconds slice, Milliseconds remaining) override {
    // Gloo closes all connections when a send or receive times out, so it gets the whole time at once.
    if (point_to_point_) return work_->wait(remaining);
    try {
      work_->wait(std::max(slice, Milliseconds(1)));  // c10d takes 0 for "without limit"
      return true;
    } catch (const c10::Error&) {
      // c10d throws for an operation that is not finished yet; a failed one counts as completed. The operation may have
      // finished since, so only a second query tells.
      return work_->isCompleted() && work_->wait(remaining);
    }
  }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  bool point_to_point_;
  bool any_source_;
  std::vector<at::Tensor> inputs_;
  std::vector<at::Tensor> outputs_;
};

// For NCCL, which ends its communicators if a wait with a limit is too short.
class PolledWork : public TransportWork {
 public:
  PolledWork(c10::intrusive_ptr<c10d::Work> work, const Call& call)
      : work_(std::move(work)), inputs_(call.inputs), outputs_(call.outputs) {}

  bool done() override { return work_->isCompleted(); }

  bool wait_for(Milliseconds slice, Milliseconds) override {
    constexpr int brief_looks = 200;
    const auto until = std::chrono::steady_clock::now() + slice;
    for (int look = 0; !work_->isCompleted(); ++look) {
      if (std::chrono::steady_clock::now() >= until) return false;
      if (look < brief_looks) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    }
    work_->wait();  // it is over: this throws its failure, if any, and releases memory
    return true;
  }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  std::vector<at::Tensor> inputs_;
  std::vector<at::Tensor> outputs_;
};

// A work after which this rank computes.
class FollowedWork : public TransportWork {
 public:
  FollowedWork(std::unique_ptr<TransportWork> work, std::function<void()> finish)
      : work_(std::move(work)), finish_(std::move(finish)) {}

  bool done() override { return work_->done(); }

  bool wait_for(Milliseconds slice, Milliseconds remaining) override {
    if (!work_->wait_for(slice, remaining)) return false;
    if (const auto finish = std::exchange(finish_, nullptr)) finish();
    return true;
  }

 private:
  std::unique_ptr<TransportWork> work_;
  std::function<void()> finish_;
};

// Reduction of received parts: every rank has received all ranks' values of its own part, and reduces them in rank
// order.
class AddReceived : public TransportWork {
 public:
  AddReceived(std::unique_ptr<TransportWork> exchange, at::Tensor received, at::Tensor output, int ranks, ReduceOp op)
      : exchange_(std::move(exchange)),
        received_(std::move(received)),
        output_(std::move(output)),
        ranks_(ranks),
        op_(op) {}

  bool done() override { return exchange_->done(); }

  bool wait_for(Milliseconds slice, Milliseconds remaining) override {
    if (!exchange_->wait_for(slice, remaining)) return false;
    if (received_.defined()) reduce_in_order(output_, std::exchange(received_, {}).chunk(ranks_), op_);
    return true;
  }

 private:
  std::unique_ptr<TransportWork> exchange_;
  at::Tensor received_;
  at::Tensor output_;
  int ranks_;
  ReduceOp op_;
};

class C10dTransport : public Transport {
 public:
  C10dTransport(std::string name, c10::intrusive_ptr<c10d::Backend> backend,
                std::function<void(const Call&)> before_collective, std::function<void()> disconnect)
      : name_(std::move(name)),
        backend_(std::move(backend)),
        before_collective_(std::move(before_collective)),
        disconnect_(std::move(disconnect)) {}

  std::string name() const override { return name_; }
  bool joins_threads() const override { return !given_up_; }

  // Late messages of an operation in flight must not reach tensors that this rank uses again.
  void give_up(const std::string& /*why*/) override {
    if (!disconnect_) return;
    disconnect_();
    given_up_ = true;
  }
  void abandon(const Abandoned&) override {
    if (disconnect_) disconnect_();
  }

  std::unique_ptr<TransportWork> issue(const Call& call) override {
    const bool message = call.op == Op::send || call.op == Op::recv;
    if (is_gloo() && reduces(call.op)) require_supported(call);
    if (is_gloo() && message && call.bytes() == 0) return issue_empty_message(call);
    // Gloo would not compare it with what the others call.
    if (is_gloo() && is_empty(call)) return std::make_unique<C10dWork>(start(as_barrier(call), call), call);
    const bool equal_parts = call.op == Op::reduce_scatter && call.inputs.size() == 1 && call.outputs[0].numel() > 0;
    if (equal_parts && is_gloo()) return scatter_and_add(call);
    if (is_gloo() && reduces(call.op) && call.reduce == ReduceOp::avg) return average(call);
    // libtorch's Gloo cannot reduce int16.
    if (is_gloo() && reduces(call.op) && call.inputs[0].scalar_type() == at::kShort) return reduce_as_int(call);
    if (name_ == "nccl") return std::make_unique<PolledWork>(start(call), call);
    return std::make_unique<C10dWork>(start(call), call);
  }

 private:
  bool is_gloo() const { return name_ == "gloo"; }

  // Before anything is sent: Gloo refuses on its own threads, which ends the group.
  static void require_supported(const Call& call) {
    require_reducible(call);
    static_cast<void>(to_c10d(call.reduce));
  }

  std::unique_ptr<TransportWork> issue_empty_message(const Call& call) {
    Call message = call;
    message.inputs = {at::zeros({1}, at::kByte)};
    return std::make_unique<C10dWork>(start(message), message);
  }

  // libtorch's reduce-scatter over Gloo is an all-reduce of a copy: it moves twice as much, and only wait() tells that
  // it is done.
  std::unique_ptr<TransportWork> scatter_and_add(const Call& call) {
    const auto input = call.inputs[0].view({-1});
    auto received = at::empty_like(input);
    Call exchange = call;
    exchange.op = Op::all_to_all;
    exchange.inputs = {input};
    exchange.outputs = {received};
    return std::make_unique<AddReceived>(std::make_unique<C10dWork>(start(exchange), exchange), received,
                                         call.outputs[0].view({-1}), backend_->getSize(), call.reduce);
  }

  // libtorch's Gloo would divide the sum, which may be beyond the range where the mean is not. A power of 2 loses no
  // digits, and in float32 the smallest 16-bit numbers keep theirs, too.
  std::unique_ptr<TransportWork> average(const Call& call) {
    const auto ranks = static_cast<unsigned>(backend_->getSize());
    const double scale = 1.0 / std::bit_ceil(ranks);
    const bool in_place = call.outputs.empty();
    const auto to = normal(in_place ? call.inputs[0] : call.outputs[0]);
    const bool narrow = to.element_size() == 2;
    Call sum = call;
    sum.reduce = ReduceOp::sum;
    for (auto& input : sum.inputs) input = (narrow ? normal(input).to(at::kFloat) : normal(input)) * scale;
    if (!in_place && narrow) sum.outputs = {to.to(at::kFloat)};
    const auto result = in_place ? sum.inputs[0] : normal(sum.outputs[0]);
    const auto finish = [result, to, ranks, scale] {
      const auto mean = result / static_cast<double>(ranks) / scale;
      at::Tensor(to).copy_(
          at::where(result.isfinite(), mean.nan_to_num(), mean));  // rounded up, it may be beyond the range
    };
    return std::make_unique<FollowedWork>(std::make_unique<C10dWork>(start(sum, call), sum), finish);
  }

  std::unique_ptr<TransportWork> reduce_as_int(const Call& call) {
    Call wide = call;
    for (auto& input : wide.inputs) input = normal(input).to(at::kInt);
    const bool in_place = call.outputs.empty();
    if (!in_place) wide.outputs = {normal(call.outputs[0]).to(at::kInt)};
    const auto finish = [result = in_place ? wide.inputs[0] : wide.outputs[0],
                         to = normal(in_place ? call.inputs[0] : call.outputs[0])] { at::Tensor(to).copy_(result); };
    return std::make_unique<FollowedWork>(std::make_unique<C10dWork>(start(wide, call), wide), finish);
  }

  template <class Options>
  static Options with_reduce(const Call& call) {
    Options options;
    // Gloo adds bools as bytes, and a sum of them is "or".
    const bool any = call.reduce == ReduceOp::sum && call.inputs[0].scalar_type() == at::kBool;
    options.reduceOp = to_c10d(any ? ReduceOp::max : call.reduce);
    return options;
  }

  template <class Options>
  static Options with_root(const Call& call) {
    Options options;
    options.rootRank = call.peer;
    return options;
  }

  // Flat, because backends compare shapes, which collectives here do not care about; of stride 1, because one element
  // of a column has another stride and is contiguous all the same. as_bytes: for libtorch's Gloo, which moves some
  // dtypes only.
  static std::vector<at::Tensor> flattened(const std::vector<at::Tensor>& tensors, bool as_bytes) {
    std::vector<at::Tensor> flat;
    for (const auto& tensor : tensors) {
      flat.push_back(tensor.is_inference() ? normal(tensor) : tensor.as_strided({tensor.numel()}, {1}));
      if (as_bytes) flat.back() = flat.back().view(at::kByte);
    }
    return flat;
  }

  // A backend works on its own threads, where tensors made in InferenceMode cannot be written.
  static at::Tensor normal(const at::Tensor& tensor) {
    const c10::InferenceMode outside(false);
    return at::empty({0}, tensor.options()).set_(tensor.storage(), tensor.storage_offset(), {tensor.numel()}, {1});
  }

  c10::intrusive_ptr<c10d::Work> start(const Call& call) { return start(call, call); }

  // asked: the call as other ranks know it.
  c10::intrusive_ptr<c10d::Work> start(const Call& call, const Call& asked) {
    const bool as_bytes = is_gloo() && !reduces(call.op);
    auto inputs = flattened(call.inputs, as_bytes);
    auto outputs = flattened(call.outputs, as_bytes);
    const WithoutSigpipe guard;  // Gloo writes on the calling thread if it can
    if (before_collective_ && call.op != Op::send && call.op != Op::recv) before_collective_(asked);
    switch (call.op) {
      case Op::all_reduce:
        return backend_->allreduce(inputs, with_reduce<c10d::AllreduceOptions>(call));
      case Op::reduce: {
        auto options = with_reduce<c10d::ReduceOptions>(call);
        options.rootRank = call.peer;
        return backend_->reduce(inputs, options);
      }
      case Op::reduce_scatter: {
        if (inputs.size() > 1) {
          std::vector<std::vector<at::Tensor>> lists{inputs};
          return backend_->reduce_scatter(outputs, lists, with_reduce<c10d::ReduceScatterOptions>(call));
        }
        return backend_->_reduce_scatter_base(outputs[0], inputs[0], with_reduce<c10d::ReduceScatterOptions>(call));
      }
      case Op::all_gather: {
        if (outputs.size() > 1) {
          std::vector<std::vector<at::Tensor>> lists{outputs};
          return backend_->allgather(lists, inputs, {});
        }
        return backend_->_allgather_base(outputs[0], inputs[0], {});
      }
      case Op::broadcast:
        return backend_->broadcast(inputs, with_root<c10d::BroadcastOptions>(call));
      case Op::gather: {
        std::vector<std::vector<at::Tensor>> lists;
        if (!outputs.empty()) lists.push_back(outputs);
        return backend_->gather(lists, inputs, with_root<c10d::GatherOptions>(call));
      }
      case Op::scatter: {
        std::vector<std::vector<at::Tensor>> lists;
        if (!inputs.empty()) lists.push_back(inputs);
        return backend_->scatter(outputs, lists, with_root<c10d::ScatterOptions>(call));
      }
      case Op::all_to_all: {
        if (inputs.size() > 1) return backend_->alltoall(outputs, inputs, {});
        std::vector<int64_t> equal;
        return backend_->alltoall_base(outputs[0], inputs[0], equal, equal, {});
      }
      case Op::send:
        return backend_->send(inputs, call.peer, call.tag);
      case Op::recv:
        return call.peer == any_source ? backend_->recvAnysource(inputs, call.tag)
                                       : backend_->recv(inputs, call.peer, call.tag);
      case Op::barrier:
        return backend_->barrier({});
    }
    return {};
  }

  std::string name_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  std::function<void(const Call&)> before_collective_;
  std::function<void()> disconnect_;
  std::atomic<bool> given_up_ = false;
};

}  // namespace

std::shared_ptr<Transport> make_c10d_transport(std::string name, c10::intrusive_ptr<c10d::Backend> backend,
                                               std::function<void(const Call&)> before_collective,
                                               std::function<void()> disconnect) {
  return std::make_shared<C10dTransport>(std::move(name), std::move(backend), std::move(before_collective),
                                         std::move(disconnect));
}

}  // namespace shoal
