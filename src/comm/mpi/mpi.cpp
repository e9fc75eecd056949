#include "comm/mpi/mpi.h"

#include <fmt/format.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>

#include "comm/mpi/mpi_work.h"
#include "comm/reduce/reduce_kernels.h"
#include "comm/rendezvous/world_state.h"
#include "comm/transport/empty_call.h"
#include "shoal/error.h"

namespace shoal {
namespace {

// Smaller tensors (in total over all ranks) are exchanged whole. Of larger ones every rank reduces a part, in pieces:
// this bounds temporary memory, and one piece is reduced while others are in flight.
constexpr int64_t small_bytes = 1 << 15;

// Sized so that a rank receives about a mebibyte for a piece of its own.
int64_t piece_bytes(int ranks) {
  constexpr int64_t received = 1 << 20;
  constexpr int64_t least = 1 << 16;
  return std::max(received / (ranks - 1), least);
}

// Tags from here on are for pieces: two per operation in flight, for inputs and for results.
constexpr int first_tag = 1 << 13;

// Hides writes from autograd, as MPI's own writes are hidden from it.
at::Tensor flat(const at::Tensor& tensor) {
  return tensor.variable_data().view({-1});
}

// Calls visit(owner, begin, length) for pieces of `numel` elements that `owners` ranks share evenly.
template <class Visit>
void for_each_piece(int64_t numel, int64_t piece, int owners, const Visit& visit) {
  for (int64_t offset = 0; offset * owners < numel; offset += piece) {
    for (int owner = 0; owner < owners; ++owner) {
      const auto begin = numel * owner / owners + offset;
      const auto end = std::min(begin + piece, numel * (owner + 1) / owners);
      if (begin < end) visit(owner, begin, end - begin);
    }
  }
}

// Piece of a reduction on this rank.
struct Piece {
  at::Tensor own;
  at::Tensor result;
  int owner;
  ReduceOp op;
  int input_tag;
  bool for_all;  // all ranks get the result, not only the owner

  int result_tag() const { return input_tag + 1; }
};

class MpiTransport : public Transport {
 public:
  MpiTransport(std::shared_ptr<MpiCommunicator> communicator, int rank, int size)
      : communicator_(std::move(communicator)), rank_(rank), size_(size) {}

  std::string name() const override { return "mpi"; }

  std::unique_ptr<TransportWork> issue(const Call& call) override {
    const torch::NoGradGuard no_grad;
    auto operation = std::make_shared<MpiOperation>();
    operation->communicator = communicator_;
    operation->tensors = call.inputs;
    operation->tensors.insert(operation->tensors.end(), call.outputs.begin(), call.outputs.end());
    try {
      start(is_empty(call) ? as_barrier(call) : call, *operation);
    } catch (const std::exception&) {
      put_in_flight(operation);  // keeps the parts that were started
      throw;
    }
    put_in_flight(operation);
    advance_all();
    return std::make_unique<MpiWork>(std::move(operation));
  }

 private:
  void start(const Call& call, MpiOperation& operation) {
    if (call.reduce == ReduceOp::premul_sum) {
      throw UsageError(fmt::format("{}: premul_sum is not supported by transport mpi", call.describe()));
    }
    if (call.outputs.size() > 1 && (call.op == Op::all_gather || call.op == Op::all_to_all)) {
      return exchange_lists(call, operation);
    }
    const bool takes_inputs = call.op == Op::reduce_scatter || call.op == Op::scatter;
    if ((call.inputs.size() > 1 && !takes_inputs) || (call.outputs.size() > 1 && call.op != Op::gather)) {
      throw UsageError(fmt::format("{}: several tensors are not supported by transport mpi", call.describe()));
    }
    switch (call.op) {
      case Op::all_reduce:
      case Op::reduce:
        return reduce(call, operation);
      case Op::reduce_scatter:
        return reduce_scatter(call, operation);
      case Op::gather:
        return gather(call, operation);
      case Op::scatter:
        return scatter(call, operation);
      case Op::barrier:
        return check_mpi(MPI_Ibarrier(communicator_->get(), operation.add().add_request()), "MPI_Ibarrier");
      case Op::all_gather:
      case Op::all_to_all:
      case Op::broadcast:
      case Op::send:
      case Op::recv:
        return move(call, operation);
    }
  }

  void reduce(const Call& call, MpiOperation& operation) {
    require_reducible(call);
    const bool for_all = call.op == Op::all_reduce;
    const auto tensor = flat(call.inputs[0]);
    if (for_all && static_cast<int64_t>(tensor.nbytes()) * size_ < small_bytes) {
      return exchange(tensor, call.reduce, operation);
    }
    const int tag = next_tag();
    for_each_piece(tensor.numel(), elements_of_piece(tensor), for_all ? size_ : 1,
                   [&](int owner, int64_t begin, int64_t length) {
                     const auto piece = tensor.narrow(0, begin, length);
                     start_piece({piece, piece, for_all ? owner : call.peer, call.reduce, tag, for_all}, operation);
                   });
  }

  void reduce_scatter(const Call& call, MpiOperation& operation) {
    require_reducible(call);
    const auto output = flat(call.outputs[0]);
    const auto input = call.inputs.size() > 1 ? joined(call, output.numel(), operation) : flat(call.inputs[0]);
    // A piece's result must not overwrite inputs of pieces that have not been sent.
    const auto target = output.is_alias_of(input) ? at::empty_like(output) : output;
    const int tag = next_tag();
    for_each_piece(input.numel(), elements_of_piece(input), size_, [&](int owner, int64_t begin, int64_t length) {
      const auto place = begin - owner * output.numel();
      start_piece({input.narrow(0, begin, length), target.narrow(0, place, length), owner, call.reduce, tag, false},
                  operation);
    });
    if (!target.is_same(output)) operation.finish = [=] { output.copy_(target); };
  }

  static at::Tensor joined(const Call& call, int64_t numel, MpiOperation& operation) {
    std::vector<at::Tensor> inputs;
    for (const auto& input : call.inputs) {
      inputs.push_back(flat(input));
      if (input.numel() == numel) continue;
      throw UsageError(fmt::format("{}: parts of different sizes are not supported by transport mpi", call.describe()));
    }
    operation.tensors.push_back(at::cat(inputs));
    return operation.tensors.back();
  }

  // One tensor per rank, each of its own size.
  void exchange_lists(const Call& call, MpiOperation& operation) {
    MPI_Comm communicator = communicator_->get();
    const int tag = next_tag();
    const auto input_for = [&](int rank) { return call.inputs.size() > 1 ? call.inputs[rank] : call.inputs[0]; };
    for (int rank = 0; rank < size_; ++rank) {
      const auto& output = call.outputs[rank];
      const auto input = input_for(rank);
      if (rank == rank_) {
        flat(output).copy_(flat(input));
        continue;
      }
      auto& incoming = operation.add();
      const auto& to_come = incoming.count(static_cast<int64_t>(output.nbytes()));
      check_mpi(
          MPI_Irecv(output.data_ptr(), to_come.count, to_come.type, rank, tag, communicator, incoming.add_request()),
          "MPI_Irecv");
      auto& outgoing = operation.add();
      const auto& to_go = outgoing.count(static_cast<int64_t>(input.nbytes()));
      check_mpi(MPI_Isend(input.data_ptr(), to_go.count, to_go.type, rank, tag, communicator, outgoing.add_request()),
                "MPI_Isend");
    }
  }

  // Every rank receives all inputs and reduces them.
  void exchange(const at::Tensor& tensor, ReduceOp op, MpiOperation& operation) {
    const auto all = at::empty({size_, tensor.numel()}, tensor.options());
    auto& part = operation.add();
    part.finish = [=] { reduce_in_order(tensor, all.unbind(), op); };
    const int bytes = static_cast<int>(tensor.nbytes());
    check_mpi(MPI_Iallgather(tensor.data_ptr(), bytes, MPI_BYTE, all.data_ptr(), bytes, MPI_BYTE, communicator_->get(),
                             part.add_request()),
              "MPI_Iallgather");
  }

  // The owner receives the other ranks' inputs of the piece and reduces them. MPI's own reductions took up to four
  // times as long, and would round 16-bit sums at every step.
  void start_piece(const Piece& piece, MpiOperation& operation) const {
    if (piece.owner == rank_) {
      operation.waiting.emplace_back([=, this_rank = rank_, ranks = size_, &operation](MpiPart& part) {
        collect_piece(piece, this_rank, ranks, part, operation);
      });
      return;
    }
    MPI_Comm communicator = communicator_->get();
    auto& part = operation.add();
    start_send(part, piece.own, piece.owner, piece.input_tag, communicator);
    if (!piece.for_all) return;
    part.finish = [piece, communicator, &operation] {
      start_receive(operation.add(MpiOperation::second), piece.result, piece.owner, piece.result_tag(), communicator);
    };
  }

  // Static, because an operation may outlive its transport.
  static void collect_piece(const Piece& piece, int this_rank, int ranks, MpiPart& part, MpiOperation& operation) {
    MPI_Comm communicator = operation.communicator->get();
    std::vector<at::Tensor> inputs(ranks, piece.own);
    for (int rank = 0; rank < ranks; ++rank) {
      if (rank == this_rank) continue;
      inputs[rank] = at::empty_like(piece.own);
      start_receive(part, inputs[rank], rank, piece.input_tag, communicator);
    }
    part.finish = [=, &operation] {
      reduce_in_order(piece.result, inputs, piece.op);
      if (!piece.for_all) return;
      auto& next = operation.add(MpiOperation::second);
      for (int rank = 0; rank < ranks; ++rank) {
        if (rank != this_rank) start_send(next, piece.result, rank, piece.result_tag(), communicator);
      }
    };
  }

  static void start_send(MpiPart& part, const at::Tensor& piece, int rank, int tag, MPI_Comm communicator) {
    check_mpi(MPI_Isend(piece.data_ptr(), static_cast<int>(piece.nbytes()), MPI_BYTE, rank, tag, communicator,
                        part.add_request()),
              "MPI_Isend");
  }

  static void start_receive(MpiPart& part, const at::Tensor& piece, int rank, int tag, MPI_Comm communicator) {
    check_mpi(MPI_Irecv(piece.data_ptr(), static_cast<int>(piece.nbytes()), MPI_BYTE, rank, tag, communicator,
                        part.add_request()),
              "MPI_Irecv");
  }

  int next_tag() { return static_cast<int>(2 * number_++ % first_tag); }

  int64_t elements_of_piece(const at::Tensor& tensor) const {
    return piece_bytes(size_) / static_cast<int64_t>(tensor.itemsize());
  }

  void gather(const Call& call, MpiOperation& operation) const {
    const auto& input = call.inputs[0];
    auto& part = operation.add();
    at::Tensor all;
    if (call.peer == rank_) {
      all = at::empty({size_, input.numel()}, input.options());
      part.finish = [all, outputs = call.outputs] {
        for (size_t rank = 0; rank < outputs.size(); ++rank) flat(outputs[rank]).copy_(all[static_cast<int64_t>(rank)]);
      };
    }
    const auto& bytes = part.count(static_cast<int64_t>(input.nbytes()));
    check_mpi(MPI_Igather(input.data_ptr(), bytes.count, bytes.type, all.defined() ? all.data_ptr() : nullptr,
                          bytes.count, bytes.type, call.peer, communicator_->get(), part.add_request()),
              "MPI_Igather");
  }

  void scatter(const Call& call, MpiOperation& operation) const {
    const auto& output = call.outputs[0];
    auto& part = operation.add();
    at::Tensor all;
    if (call.peer == rank_) {
      std::vector<at::Tensor> inputs;
      for (const auto& input : call.inputs) inputs.push_back(flat(input));
      all = at::cat(inputs);
      operation.tensors.push_back(all);
    }
    const auto& bytes = part.count(static_cast<int64_t>(output.nbytes()));
    check_mpi(MPI_Iscatter(all.defined() ? all.data_ptr() : nullptr, bytes.count, bytes.type, output.data_ptr(),
                           bytes.count, bytes.type, call.peer, communicator_->get(), part.add_request()),
              "MPI_Iscatter");
  }

  // Operations that only move bytes between the call's own tensors.
  void move(const Call& call, MpiOperation& operation) const {
    MPI_Comm communicator = communicator_->get();
    auto* const input = static_cast<char*>(call.inputs[0].data_ptr());
    auto* const output = call.outputs.empty() ? nullptr : static_cast<char*>(call.outputs[0].data_ptr());
    const auto input_bytes = static_cast<int64_t>(call.inputs[0].nbytes());
    auto& part = operation.add();
    const auto& bytes = part.count(call.op == Op::all_to_all ? input_bytes / size_ : input_bytes);
    auto* request = part.add_request();
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
        return check_mpi(
            MPI_Isend(input, bytes.count, bytes.type, call.peer, first_tag + call.tag, communicator, request),
            "MPI_Isend");
      default:
        if (call.peer == any_source) throw UsageError("receive from any source is not supported by transport mpi");
        return check_mpi(
            MPI_Irecv(input, bytes.count, bytes.type, call.peer, first_tag + call.tag, communicator, request),
            "MPI_Irecv");
    }
  }

  std::shared_ptr<MpiCommunicator> communicator_;
  int rank_;
  int size_;
  int64_t number_ = 0;  // number of operations in pieces, for their tags
};

}  // namespace

bool mpi_is_built() {
  return true;
}

std::string why_no_mpi() {
  return {};
}

std::shared_ptr<Transport> connect_over_mpi(const WorldState& world, const std::vector<int>& world_ranks, int rank,
                                            Milliseconds limit) {
  start_mpi(world, process_environment());
  return std::make_shared<MpiTransport>(std::make_shared<MpiCommunicator>(world, world_ranks, limit), rank,
                                        static_cast<int>(world_ranks.size()));
}

std::shared_ptr<Transport> make_mpi_transport(const WorldState& world, const std::vector<int>& world_ranks, int rank,
                                              Milliseconds limit) {
  return connect_over_mpi(world, world_ranks, rank, limit);
}

}  // namespace shoal
