#include "comm/hierarchical/hierarchical_plan.h"

#include <algorithm>

#include "comm/reduce/reduce_kernels.h"

namespace shoal {
namespace {

using Tensors = std::vector<at::Tensor>;

class Planner {
 public:
  Planner(const HostGrid& grid, const Call& call) : grid_(grid), call_(call) {}

  std::deque<Stage> plan() {
    const bool lists = call_.inputs.size() > 1 || call_.outputs.size() > 1;
    switch (call_.op) {
      case Op::all_reduce:
        all_reduce();
        break;
      case Op::reduce:
        reduce();
        break;
      case Op::broadcast:
        broadcast();
        break;
      case Op::reduce_scatter:
        lists ? flat() : reduce_scatter();
        break;
      case Op::all_gather:
        lists ? flat() : all_gather();
        break;
      case Op::barrier:
        for (const auto channel : {Channel::up, Channel::across, Channel::down}) {
          add(channel, {make(Op::barrier, {}, {})});
        }
        break;
      default:
        flat();
    }
    return std::move(stages_);
  }

 private:
  void add(Channel channel, std::vector<Call> calls, std::function<void()> then = nullptr) {
    stages_.push_back({channel, std::move(calls), std::move(then)});
  }
  void flat() { add(Channel::flat, {call_}); }

  void all_reduce() {
    const auto parts = ranges(call_.inputs[0]);
    const auto& own = parts[grid_.local];
    add(Channel::up, {on_host(Op::reduce_scatter, parts, {own})});
    add(Channel::across, {make(Op::all_reduce, {own}, {})});
    add(Channel::down, {make(Op::all_gather, {own}, parts)});
  }

  void reduce() {
    const auto [host, local] = grid_.place[call_.peer];
    const auto parts = ranges(call_.inputs[0]);
    const auto& own = parts[grid_.local];
    add(Channel::up, {on_host(Op::reduce_scatter, parts, {own})});
    const bool here = grid_.host == host;
    const auto sums = at::empty({here ? grid_.hosts : 0, own.numel()}, own.options());
    add(Channel::across, {make(Op::gather, {own}, here ? sums.unbind() : Tensors{}, host)},
        here ? summation(sums, own) : nullptr);
    if (here) add(Channel::down, gather_ranges(parts, local));
  }

  void broadcast() {
    const auto [host, local] = grid_.place[call_.peer];
    const auto parts = ranges(call_.inputs[0]);
    const auto& own = parts[grid_.local];
    if (grid_.host == host) add(Channel::up, scatter_ranges(parts, local));
    add(Channel::across, {make(Op::broadcast, {own}, {}, host)});
    add(Channel::down, {make(Op::all_gather, {own}, parts)});
  }

  void reduce_scatter() {
    const auto& output = call_.outputs[0];
    const auto numel = output.numel();
    const auto input = call_.inputs[0].view({size(), numel});
    // sums[h]: this host's contribution to the part of the rank at this place on host h.
    const auto sums = at::empty({grid_.hosts, numel}, output.options());
    const auto received = at::empty_like(sums);
    std::vector<Call> inside;
    for (int host = 0; host < grid_.hosts; ++host) {
      inside.push_back(on_host(Op::reduce_scatter, rows_of(input, host), {sums[host]}));
    }
    add(Channel::up, std::move(inside));
    add(Channel::across, {make(Op::all_to_all, {sums}, {received})}, summation(received, output));
  }

  void all_gather() {
    const auto& own = call_.inputs[0];
    const auto output = call_.outputs[0].view({size(), own.numel()});
    // column[h]: the input of the rank at this place on host h.
    const auto column = at::empty({grid_.hosts, own.numel()}, own.options());
    add(Channel::across, {make(Op::all_gather, {own}, {column})});
    std::vector<Call> inside;
    for (int host = 0; host < grid_.hosts; ++host) {
      inside.push_back(make(Op::all_gather, {column[host]}, rows_of(output, host)));
    }
    add(Channel::down, std::move(inside));
  }

  int size() const { return grid_.hosts * grid_.local_size; }

  Tensors rows_of(const at::Tensor& table, int host) const {
    Tensors rows;
    for (const int rank : grid_.ranks[host]) rows.push_back(table[rank]);
    return rows;
  }

  // Splits a tensor into the ranges that the local ranks carry.
  Tensors ranges(const at::Tensor& tensor) const {
    const auto flat = tensor.view({-1});
    const auto line = std::max<int64_t>(1, 128 / static_cast<int64_t>(flat.element_size()));
    const auto lines = (flat.numel() + line - 1) / line;
    Tensors list;
    for (int local = 0; local < grid_.local_size; ++local) {
      const auto begin = std::min(flat.numel(), lines * local / grid_.local_size * line);
      const auto end = std::min(flat.numel(), lines * (local + 1) / grid_.local_size * line);
      list.push_back(flat.narrow(0, begin, end - begin));
    }
    return list;
  }

  // Reduction between hosts. Each level averages, since a sum may be beyond the range; levels have equal sizes.
  // Premultiplied factors apply once.
  ReduceOp of_hosts() const { return call_.reduce == ReduceOp::premul_sum ? ReduceOp::sum : call_.reduce; }

  Call make(Op op, Tensors inputs, Tensors outputs, int peer = -1) const {
    return {.op = op,
            .reduce = of_hosts(),
            .peer = peer,
            .inputs = std::move(inputs),
            .outputs = std::move(outputs),
            .label = call_.label};
  }

  // The first reduction, within the host.
  Call on_host(Op op, Tensors inputs, Tensors outputs) const {
    auto made = make(op, std::move(inputs), std::move(outputs));
    if (call_.reduce == ReduceOp::premul_sum) made.reduce = ReduceOp::premul_sum;
    made.factor = call_.factor;
    return made;
  }

  // output <- the reduction of the hosts' values, in the order of hosts.
  std::function<void()> summation(const at::Tensor& received, const at::Tensor& output) const {
    return [received, output, op = of_hosts()] { reduce_in_order(output, received.unbind(), op); };
  }

  // A message to or from one local rank, for ranges of unequal size. Users' tags are never negative.
  Call message(Op op, const at::Tensor& part, int peer) const {
    auto made = make(op, {part}, {}, peer);
    made.tag = -1;
    return made;
  }

  std::vector<Call> gather_ranges(const Tensors& parts, int root) const {
    std::vector<Call> calls;
    for (int of = 0; of < grid_.local_size; ++of) {
      if (of == root || parts[of].numel() == 0) continue;
      if (grid_.local == of) calls.push_back(message(Op::send, parts[of], root));
      if (grid_.local == root) calls.push_back(message(Op::recv, parts[of], of));
    }
    return calls;
  }

  std::vector<Call> scatter_ranges(const Tensors& parts, int root) const {
    std::vector<Call> calls;
    for (int of = 0; of < grid_.local_size; ++of) {
      if (of == root || parts[of].numel() == 0) continue;
      if (grid_.local == root) calls.push_back(message(Op::send, parts[of], of));
      if (grid_.local == of) calls.push_back(message(Op::recv, parts[of], root));
    }
    return calls;
  }

  const HostGrid& grid_;
  const Call& call_;
  std::deque<Stage> stages_;
};

}  // namespace

std::deque<Stage> plan_stages(const HostGrid& grid, const Call& call) {
  return Planner(grid, call).plan();
}

}  // namespace shoal
