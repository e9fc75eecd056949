#include "comm/mpi.h"

#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>

#include "comm/mpi_reduction.h"
#include "comm/mpi_work.h"
#include "comm/world_state.h"

namespace shoal {
namespace {

// Large reductions go in pieces: MPI counts with int, and Open MPI reduces through temporary memory of a request's
// size, which is cheaper to reuse than to map (64 MiB of float32 on 2 ranks: 118 ms as one request, 34 ms as pieces).
constexpr int64_t piece_bytes = 1 << 20;

template <class Start>
void in_pieces(const at::Tensor& tensor, const Start& start) {
  auto* data = static_cast<char*>(tensor.data_ptr());
  const auto element = static_cast<int64_t>(tensor.itemsize());
  const int64_t piece = piece_bytes / element;
  for (int64_t begin = 0; begin < tensor.numel(); begin += piece) {
    start(data + begin * element, static_cast<int>(std::min(piece, tensor.numel() - begin)));
  }
}

// Autograd does not see what MPI writes; nor is it to see what is written here after MPI.
at::Tensor flat(const at::Tensor& tensor) {
  return tensor.variable_data().view({-1});
}

class MpiTransport : public Transport {
 public:
  MpiTransport(std::shared_ptr<MpiCommunicator> communicator, int rank, int size)
      : communicator_(std::move(communicator)), rank_(rank), size_(size) {}

  std::string name() const override { return "mpi"; }

  std::unique_ptr<TransportWork> issue(const Call& call) override {
    const torch::NoGradGuard no_grad;
    auto operation = std::make_shared<MpiOperation>();
    auto work = std::make_unique<MpiWork>(operation);  // first, so that what a failing start leaves is kept alive
    operation->communicator = communicator_;
    operation->tensors = call.inputs;
    operation->tensors.insert(operation->tensors.end(), call.outputs.begin(), call.outputs.end());
    start(call, *operation);
    return work;
  }

 private:
  void start(const Call& call, MpiOperation& operation) const {
    switch (call.op) {
      case Op::all_reduce:
      case Op::reduce:
        require_reducible(call);
        return reduce(call, operation);
      case Op::reduce_scatter:
        require_reducible(call);
        return reduce_scatter(call, operation);
      case Op::gather:
        return gather(call, operation);
      case Op::scatter:
        return scatter(call, operation);
      case Op::barrier:
        return check_mpi(MPI_Ibarrier(communicator_->get(), operation.add_request()), "MPI_Ibarrier");
      case Op::all_gather:
      case Op::all_to_all:
      case Op::broadcast:
      case Op::send:
      case Op::recv:
        return move(call, operation);
    }
  }

  void reduce(const Call& call, MpiOperation& operation) const {
    const auto result = flat(call.inputs[0]);
    const auto total = widened(result);
    const auto type = mpi_type(total.scalar_type());
    const auto op = mpi_op(call.reduce, total.scalar_type());
    const bool everywhere = call.op == Op::all_reduce;
    const bool here = everywhere || call.peer == rank_;
    operation.tensors.push_back(total);
    if (here) operation.finish = [result, total, op = call.reduce, size = size_] { conclude(result, total, op, size); };
    in_pieces(total, [&](void* data, int count) {
      auto* request = operation.add_request();
      if (everywhere) {
        check_mpi(MPI_Iallreduce(MPI_IN_PLACE, data, count, type, op, communicator_->get(), request), "MPI_Iallreduce");
      } else {
        check_mpi(MPI_Ireduce(here ? MPI_IN_PLACE : data, here ? data : nullptr, count, type, op, call.peer,
                              communicator_->get(), request),
                  "MPI_Ireduce");
      }
    });
  }

  // Not MPI_Ireduce_scatter_block, which took twice as long, and which cannot round 16-bit sums once.
  void reduce_scatter(const Call& call, MpiOperation& operation) const {
    const auto result = flat(call.outputs[0]);
    const auto parts = at::empty({size_, result.numel()}, result.options());
    operation.finish = [result, parts, op = call.reduce] { reduce_parts(result, parts, op); };
    const auto& bytes = operation.count_bytes(result.nbytes());
    check_mpi(MPI_Ialltoall(call.inputs[0].data_ptr(), bytes.count, bytes.type, parts.data_ptr(), bytes.count,
                            bytes.type, communicator_->get(), operation.add_request()),
              "MPI_Ialltoall");
  }

  void gather(const Call& call, MpiOperation& operation) const {
    const auto& input = call.inputs[0];
    at::Tensor all;
    if (call.peer == rank_) {
      all = at::empty({size_, input.numel()}, input.options());
      operation.finish = [all, outputs = call.outputs] {
        for (size_t rank = 0; rank < outputs.size(); ++rank) flat(outputs[rank]).copy_(all[static_cast<int64_t>(rank)]);
      };
    }
    const auto& bytes = operation.count_bytes(input.nbytes());
    check_mpi(MPI_Igather(input.data_ptr(), bytes.count, bytes.type, all.defined() ? all.data_ptr() : nullptr,
                          bytes.count, bytes.type, call.peer, communicator_->get(), operation.add_request()),
              "MPI_Igather");
  }

  void scatter(const Call& call, MpiOperation& operation) const {
    const auto& output = call.outputs[0];
    at::Tensor all;
    if (call.peer == rank_) {
      std::vector<at::Tensor> parts;
      for (const auto& input : call.inputs) parts.push_back(flat(input));
      all = at::cat(parts);
      operation.tensors.push_back(all);
    }
    const auto& bytes = operation.count_bytes(output.nbytes());
    check_mpi(MPI_Iscatter(all.defined() ? all.data_ptr() : nullptr, bytes.count, bytes.type, output.data_ptr(),
                           bytes.count, bytes.type, call.peer, communicator_->get(), operation.add_request()),
              "MPI_Iscatter");
  }

  // What only moves bytes between the call's own tensors.
  void move(const Call& call, MpiOperation& operation) const {
    MPI_Comm communicator = communicator_->get();
    auto* const input = static_cast<char*>(call.inputs[0].data_ptr());
    auto* const output = call.outputs.empty() ? nullptr : static_cast<char*>(call.outputs[0].data_ptr());
    const auto input_bytes = static_cast<int64_t>(call.inputs[0].nbytes());
    const auto& bytes = operation.count_bytes(call.op == Op::all_to_all ? input_bytes / size_ : input_bytes);
    auto* request = operation.add_request();
    switch (call.op) {
      case Op::all_gather: {
        const bool in_place = input == output + rank_ * input_bytes;
        return check_mpi(MPI_Iallgather(in_place ? MPI_IN_PLACE : input, bytes.count, bytes.type, output, bytes.count,
                                        bytes.type, communicator, request),
                         "MPI_Iallgather");
      }
      case Op::all_to_all:
        return check_mpi(
            MPI_Ialltoall(input, bytes.count, bytes.type, output, bytes.count, bytes.type, communicator, request),
            "MPI_Ialltoall");
      case Op::broadcast:
        return check_mpi(MPI_Ibcast(input, bytes.count, bytes.type, call.peer, communicator, request), "MPI_Ibcast");
      case Op::send:
        return check_mpi(MPI_Isend(input, bytes.count, bytes.type, call.peer, call.tag, communicator, request),
                         "MPI_Isend");
      default:
        return check_mpi(MPI_Irecv(input, bytes.count, bytes.type, call.peer, call.tag, communicator, request),
                         "MPI_Irecv");
    }
  }

  std::shared_ptr<MpiCommunicator> communicator_;
  int rank_;
  int size_;
};

}  // namespace

bool mpi_is_built() {
  return true;
}

std::shared_ptr<Transport> make_mpi_transport(const WorldState& world, const std::vector<int>& world_ranks, int rank) {
  start_mpi(world, process_environment());
  return std::make_shared<MpiTransport>(std::make_shared<MpiCommunicator>(world, world_ranks), rank,
                                        static_cast<int>(world_ranks.size()));
}

}  // namespace shoal
