// The host transport against a naive second implementation: every operation, reduction, dtype, size and kind of memory.

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <numeric>
#include <thread>

#include "comm/backend.h"
#include "shoal/base/error.h"
#include "shoal/comm/group.h"
#include "tests/support/world.h"

namespace shoal {
namespace {

using test::world;

const Group& group() {
  return world().group();
}

const std::vector<at::ScalarType>& dtypes() {
  static const std::vector<at::ScalarType> list{at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong,
                                                at::kInt,    at::kShort, at::kChar, at::kByte,     at::kBool};
  return list;
}

// Where a rank's tensors lie. mixed: shared on even ranks only.
enum class Memory { shared, staged, mixed };

at::Tensor in_memory(const at::Tensor& tensor, Memory memory) {
  if (memory == Memory::staged || (memory == Memory::mixed && group().rank() % 2 == 1)) return tensor.clone();
  const auto shared = group().allocate(tensor.numel(), tensor.options());
  return shared.copy_(tensor);
}

// Deterministic, different on every rank, with a fraction that 16-bit sums must round.
at::Tensor input(int rank, int64_t numel, at::ScalarType dtype, int salt = 0) {
  const auto numbers = (at::arange(numel, at::kLong) * 7 + rank * 13 + salt * 31) % 23 + 1;
  if (dtype == at::kBool) return (numbers % 2).to(dtype);
  if (!at::isFloatingType(dtype)) return (numbers % 5 + 1).to(dtype);
  return (numbers.to(at::kDouble) / 16 + 0.9).to(dtype);
}

at::Tensor combine(const at::Tensor& a, const at::Tensor& b, ReduceOp op) {
  switch (op) {
    case ReduceOp::min:
      return at::minimum(a, b);
    case ReduceOp::max:
      return at::maximum(a, b);
    case ReduceOp::product:
      return a * b;
    case ReduceOp::band:
      return at::bitwise_and(a, b);
    case ReduceOp::bor:
      return at::bitwise_or(a, b);
    case ReduceOp::bxor:
      return at::bitwise_xor(a, b);
    default:
      return a + b;
  }
}

// In rank order; 16-bit in float32, rounded once.
at::Tensor naive(const std::vector<at::Tensor>& inputs, ReduceOp op) {
  const auto dtype = inputs[0].scalar_type();
  const bool half = dtype == at::kHalf || dtype == at::kBFloat16;
  auto result = half ? inputs[0].to(at::kFloat) : inputs[0].clone();
  for (size_t i = 1; i < inputs.size(); ++i) result = combine(result, half ? inputs[i].to(at::kFloat) : inputs[i], op);
  if (op == ReduceOp::avg) result = result / static_cast<double>(inputs.size());
  return result.to(dtype);
}

std::vector<at::Tensor> all_inputs(int64_t numel, at::ScalarType dtype, int salt = 0) {
  std::vector<at::Tensor> list;
  for (int rank = 0; rank < group().size(); ++rank) list.push_back(input(rank, numel, dtype, salt));
  return list;
}

at::Tensor own(int64_t numel, at::ScalarType dtype, int salt = 0) {
  return input(group().rank(), numel, dtype, salt);
}

// Calls check(dtype, numel, memory) for every combination; numel reaches every way that data can travel: in the header,
// in one staged round, in many.
template <class Check>
void everywhere(Check check) {
  for (const auto dtype : dtypes()) {
    for (const int64_t numel : {0, 1, 63, 1001, 300007}) {
      for (const auto memory : {Memory::shared, Memory::staged, Memory::mixed}) {
        SCOPED_TRACE(::testing::Message() << dtype << " x " << numel << ", memory " << static_cast<int>(memory));
        check(dtype, numel, memory);
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
}

std::vector<ReduceOp> reductions(at::ScalarType dtype) {
  std::vector<ReduceOp> ops{ReduceOp::sum, ReduceOp::min, ReduceOp::max, ReduceOp::product};
  if (at::isFloatingType(dtype)) {
    ops.push_back(ReduceOp::avg);
  } else {
    ops.insert(ops.end(), {ReduceOp::band, ReduceOp::bor, ReduceOp::bxor});
  }
  return ops;
}

TEST(Host, IsTheTransportOfOneHost) {
  EXPECT_EQ(group().transport(), group().size() > 1 ? "host" : "identity");
}

TEST(Host, AllReduce) {
  everywhere([](at::ScalarType dtype, int64_t numel, Memory memory) {
    for (const auto op : numel < 300000 ? reductions(dtype) : std::vector<ReduceOp>{ReduceOp::sum}) {
      auto tensor = in_memory(own(numel, dtype), memory);
      group().all_reduce(tensor, op).wait();
      EXPECT_TRUE(at::equal(tensor, naive(all_inputs(numel, dtype), op))) << to_string(op);
    }
  });
}

TEST(Host, Reduce) {
  everywhere([](at::ScalarType dtype, int64_t numel, Memory memory) {
    for (const int root : {0, group().size() - 1}) {
      auto tensor = in_memory(own(numel, dtype), memory);
      group().reduce(tensor, root).wait();
      if (group().rank() == root) {
        EXPECT_TRUE(at::equal(tensor, naive(all_inputs(numel, dtype), ReduceOp::sum)));
      }
    }
  });
}

TEST(Host, ReduceScatter) {
  everywhere([](at::ScalarType dtype, int64_t numel, Memory memory) {
    const auto part = numel > 300000 ? numel / group().size() : numel;
    for (const auto op : numel < 300000 ? reductions(dtype) : std::vector<ReduceOp>{ReduceOp::sum}) {
      const auto whole = in_memory(own(part * group().size(), dtype), memory);
      auto result = at::empty({part}, dtype);
      group().reduce_scatter(result, whole, op).wait();
      const auto expected = naive(all_inputs(part * group().size(), dtype), op);
      EXPECT_TRUE(at::equal(result, expected.narrow(0, part * group().rank(), part))) << to_string(op);
      // In place: the result takes the place of this rank's part.
      group().reduce_scatter(whole.narrow(0, part * group().rank(), part), whole, op).wait();
      EXPECT_TRUE(at::equal(whole.narrow(0, part * group().rank(), part), result)) << to_string(op);
    }
  });
}

TEST(Host, AllGather) {
  everywhere([](at::ScalarType dtype, int64_t numel, Memory memory) {
    auto output = at::zeros({numel * group().size()}, dtype);
    group().all_gather(output, in_memory(own(numel, dtype), memory)).wait();
    EXPECT_TRUE(at::equal(output, at::cat(all_inputs(numel, dtype))));
    auto in_place = in_memory(at::zeros({numel * group().size()}, dtype), memory);
    const auto slot = in_place.narrow(0, numel * group().rank(), numel);
    slot.copy_(own(numel, dtype));
    group().all_gather(in_place, slot).wait();
    EXPECT_TRUE(at::equal(in_place, output));
  });
}

TEST(Host, BroadcastGatherScatter) {
  everywhere([](at::ScalarType dtype, int64_t numel, Memory memory) {
    const int root = group().size() - 1;
    auto tensor = in_memory(own(numel, dtype), memory);
    group().broadcast(tensor, root).wait();
    EXPECT_TRUE(at::equal(tensor, input(root, numel, dtype)));
    std::vector<at::Tensor> outputs;
    std::vector<at::Tensor> inputs;
    for (int rank = 0; group().rank() == root && rank < group().size(); ++rank) {
      outputs.push_back(at::zeros({numel}, dtype));
      inputs.push_back(in_memory(input(rank, numel, dtype, 5), memory));
    }
    group().gather(outputs, in_memory(own(numel, dtype), memory), root).wait();
    for (int rank = 0; rank < static_cast<int>(outputs.size()); ++rank) {
      EXPECT_TRUE(at::equal(outputs[rank], input(rank, numel, dtype)));
    }
    auto part = at::zeros({numel}, dtype);
    group().scatter(part, inputs, root).wait();
    EXPECT_TRUE(at::equal(part, own(numel, dtype, 5)));
  });
}

TEST(Host, AllToAll) {
  everywhere([](at::ScalarType dtype, int64_t numel, Memory memory) {
    const auto part = numel > 300000 ? numel / group().size() : numel;
    auto output = at::zeros({part * group().size()}, dtype);
    group().all_to_all(output, in_memory(own(part * group().size(), dtype), memory)).wait();
    for (int rank = 0; rank < group().size(); ++rank) {
      const auto sent = input(rank, part * group().size(), dtype).narrow(0, part * group().rank(), part);
      EXPECT_TRUE(at::equal(output.narrow(0, part * rank, part), sent));
    }
  });
}

TEST(Host, SendAndRecv) {
  everywhere([](at::ScalarType dtype, int64_t numel, Memory memory) {
    if (numel == 0 || group().size() == 1) return;
    const int size = group().size();
    const int next = (group().rank() + 1) % size;
    const int previous = (group().rank() + size - 1) % size;
    auto first = group().send(in_memory(own(numel, dtype), memory), next, 1);
    auto second = group().send(in_memory(own(numel, dtype, 3), memory), next, 2);
    auto third = group().send(in_memory(own(numel, dtype, 4), memory), next, 1);
    // Tags are chosen by the receiver; equal tags arrive in the order in which they were sent.
    auto tensor = in_memory(at::zeros({numel}, dtype), memory);
    group().recv(tensor, previous, 2).wait();
    EXPECT_TRUE(at::equal(tensor, input(previous, numel, dtype, 3)));
    group().recv(tensor, previous, 1).wait();
    EXPECT_TRUE(at::equal(tensor, input(previous, numel, dtype)));
    group().recv(tensor, previous, 1).wait();
    EXPECT_TRUE(at::equal(tensor, input(previous, numel, dtype, 4)));
    first.wait();
    second.wait();
    third.wait();
  });
}

TEST(Host, ManyOperationsAreInFlightAndWaitedForInAnyOrder) {
  // More than the ring of announcements holds.
  std::vector<at::Tensor> tensors;
  std::vector<Work> works;
  for (int i = 0; i < 100; ++i) {
    tensors.push_back(in_memory(own(i * 37 + 1, at::kFloat, i), i % 3 == 0 ? Memory::staged : Memory::shared));
    works.push_back(group().all_reduce(tensors.back()));
  }
  for (int i = 0; i < 100; ++i) {
    const int at = (i * 37 + 11 * group().rank()) % 100;
    works[at].wait();
    EXPECT_TRUE(at::equal(tensors[at], naive(all_inputs(at * 37 + 1, at::kFloat, at), ReduceOp::sum)));
  }
}

TEST(Host, ManyMessagesWithOneTagArriveInOrder) {
  if (group().size() == 1) GTEST_SKIP() << "nobody to send to";
  const int next = (group().rank() + 1) % group().size();
  const int previous = (group().rank() + group().size() - 1) % group().size();
  constexpr int count = 1000;
  std::vector<Work> sent;
  for (int i = 0; i < count; ++i) sent.push_back(group().send(at::full({1}, i, at::kInt), next));
  auto received = at::empty({1}, at::kInt);
  for (int i = 0; i < count; ++i) {
    group().recv(received, previous).wait();
    ASSERT_EQ(received.item<int>(), i);
  }
  for (auto& work : sent) work.wait();
}

TEST(Host, TwoGroupsAreUsedAtTheSameTimeInOppositeOrder) {
  std::vector<int> everyone(group().size());
  std::iota(everyone.begin(), everyone.end(), 0);
  const auto a = group().subgroup(everyone);
  const auto b = group().subgroup({everyone.rbegin(), everyone.rend()});
  for (int i = 0; i < 50; ++i) {
    auto x = in_memory(own(1000, at::kFloat, i), i % 2 == 0 ? Memory::staged : Memory::shared);
    auto y = in_memory(own(70000, at::kFloat, i + 1), Memory::staged);
    auto in_a = a.all_reduce(x);
    auto in_b = b.all_reduce(y);
    // Even ranks wait for one first, odd ranks for the other.
    if (group().rank() % 2 == 0) in_a.wait();
    in_b.wait();
    in_a.wait();
    EXPECT_TRUE(at::equal(x, naive(all_inputs(1000, at::kFloat, i), ReduceOp::sum)));
  }
}

TEST(Host, TwoThreadsUseAGroupEach) {
  std::vector<int> everyone(group().size());
  std::iota(everyone.begin(), everyone.end(), 0);
  const auto a = group().subgroup(everyone);
  const auto b = group().subgroup(everyone);
  const auto work = [](const Group& of) {
    for (int i = 0; i < 200; ++i) {
      auto x = at::full({300}, 1.0F);
      of.all_reduce(x).wait();
      EXPECT_EQ(x[299].item<float>(), of.size());
    }
  };
  std::thread other([&] { work(a); });
  work(b);
  other.join();
}

TEST(Host, ResultsDoNotDependOnHowDataAreCut) {
  // The same numbers as one tensor, and as pieces of odd sizes: bit for bit equal.
  const auto whole = own(50021, at::kFloat).mul_(1.1).sin_();
  auto at_once = in_memory(whole, Memory::shared);
  group().all_reduce(at_once).wait();
  auto in_pieces = in_memory(whole, Memory::staged);
  for (auto& piece : in_pieces.split(777)) group().all_reduce(piece).wait();
  EXPECT_TRUE(at::equal(at_once, in_pieces));
}

TEST(Host, ANaNOfOneRankShowsInMinAndMax) {
  for (const auto op : {ReduceOp::min, ReduceOp::max, ReduceOp::sum}) {
    auto tensor = at::ones({3});
    if (group().rank() == group().size() - 1) tensor[1] = NAN;
    group().all_reduce(tensor, op).wait();
    EXPECT_TRUE(tensor[1].isnan().item<bool>()) << to_string(op);
  }
}

TEST(Host, RefusesReductionsThatTheDtypeDoesNotHave) {
  if (group().size() == 1) GTEST_SKIP() << "nothing is reduced";
  EXPECT_THROW(group().all_reduce(at::ones({3}, at::kInt), ReduceOp::avg), UsageError);
  EXPECT_THROW(group().all_reduce(at::ones({3}), ReduceOp::bxor), UsageError);
  group().barrier().wait();
}

TEST(HostBackend, TakesPartsOfUnequalSizes) {
  if (group().size() == 1) GTEST_SKIP() << "one part";
  const auto backend = make_backend(group());
  const int size = group().size();
  const auto part_size = [](int rank) { return rank == 1 ? 0 : 5 + 70001 * rank; };
  std::vector<std::vector<at::Tensor>> outputs(1);
  std::vector<std::vector<at::Tensor>> inputs(1);
  for (int rank = 0; rank < size; ++rank) {
    outputs[0].push_back(at::zeros({part_size(rank)}));
    inputs[0].push_back(own(part_size(rank), at::kFloat, rank));
  }
  std::vector<at::Tensor> mine{own(part_size(group().rank()), at::kFloat)};
  backend->allgather(outputs, mine, {})->wait(c10d::kUnsetTimeout);
  for (int rank = 0; rank < size; ++rank)
    EXPECT_TRUE(at::equal(outputs[0][rank], input(rank, part_size(rank), at::kFloat)));

  std::vector<at::Tensor> reduced{at::zeros({part_size(group().rank())})};
  backend->reduce_scatter(reduced, inputs, {})->wait(c10d::kUnsetTimeout);
  EXPECT_TRUE(
      at::equal(reduced[0], naive(all_inputs(part_size(group().rank()), at::kFloat, group().rank()), ReduceOp::sum)));

  // Rank r sends i + r elements to rank i.
  std::vector<int64_t> to;
  std::vector<int64_t> from;
  for (int rank = 0; rank < size; ++rank) {
    to.push_back(rank + group().rank());
    from.push_back(rank + group().rank());
  }
  auto input_tensor = own(std::accumulate(to.begin(), to.end(), int64_t{0}), at::kDouble);
  auto output_tensor = at::zeros({std::accumulate(from.begin(), from.end(), int64_t{0})}, at::kDouble);
  backend->alltoall_base(output_tensor, input_tensor, from, to, {})->wait(c10d::kUnsetTimeout);
  int64_t at = 0;
  for (int rank = 0; rank < size; ++rank) {
    int64_t begin = 0;
    for (int before = 0; before < group().rank(); ++before) begin += before + rank;
    int64_t total = 0;
    for (int any = 0; any < size; ++any) total += any + rank;
    EXPECT_TRUE(at::equal(output_tensor.narrow(0, at, from[rank]),
                          input(rank, total, at::kDouble).narrow(0, begin, from[rank])));
    at += from[rank];
  }
}

TEST(HostBackend, HasCoalescedFormsAndFutures) {
  const auto backend = make_backend(group());
  std::vector<at::Tensor> tensors{own(10, at::kFloat), own(100000, at::kFloat), own(3, at::kFloat)};
  const auto work = backend->allreduce_coalesced(tensors, {});
  const auto future = work->getFuture();
  future->waitAndThrow();
  EXPECT_TRUE(work->isCompleted());
  EXPECT_TRUE(work->isSuccess());
  EXPECT_EQ(future->value().toTensorList().size(), 3);
  for (const auto& tensor : tensors) {
    EXPECT_TRUE(at::equal(tensor, naive(all_inputs(tensor.numel(), at::kFloat), ReduceOp::sum)));
  }
  std::vector<at::Tensor> outputs{at::zeros({2 * group().size()}), at::zeros({5 * group().size()})};
  std::vector<at::Tensor> inputs{own(2, at::kFloat), own(5, at::kFloat)};
  backend->allgather_into_tensor_coalesced(outputs, inputs, {})->wait(c10d::kUnsetTimeout);
  EXPECT_TRUE(at::equal(outputs[1], at::cat(all_inputs(5, at::kFloat))));
  backend->reduce_scatter_tensor_coalesced(inputs, outputs, {})->wait(c10d::kUnsetTimeout);
  backend->barrier({})->wait(c10d::kUnsetTimeout);
}

TEST(HostBackend, TheCallerGoesOnWhileAFutureIsWaitedFor) {
  const auto backend = make_backend(group());
  for (int i = 0; i < 20; ++i) {
    std::vector<at::Tensor> first{own(200000, at::kFloat, i)};
    std::vector<at::Tensor> second{own(300, at::kFloat, i)};
    const auto work = backend->allreduce(first, {});
    const auto future = work->getFuture();
    backend->allreduce(second, {})->wait(c10d::kUnsetTimeout);
    work->isCompleted();  // either answer is right; it must not wait
    future->waitAndThrow();
    EXPECT_TRUE(at::equal(first[0], naive(all_inputs(200000, at::kFloat, i), ReduceOp::sum)));
    EXPECT_TRUE(at::equal(second[0], naive(all_inputs(300, at::kFloat, i), ReduceOp::sum)));
  }
}

TEST(HostBackend, AWorkMayOutliveItsBackend) {
  for (int i = 0; i < 20; ++i) {
    auto backend = make_backend(group());
    std::vector<at::Tensor> first{own(1000, at::kFloat, i)};
    std::vector<at::Tensor> second{own(300, at::kFloat, i)};
    auto asked_before = backend->allreduce(first, {});
    auto asked_after = backend->allreduce(second, {});
    const auto early = asked_before->getFuture();
    backend.reset();
    asked_before.reset();
    const auto late = asked_after->getFuture();
    asked_after.reset();
    early->waitAndThrow();
    late->waitAndThrow();
    EXPECT_TRUE(at::equal(first[0], naive(all_inputs(1000, at::kFloat, i), ReduceOp::sum)));
    EXPECT_TRUE(at::equal(second[0], naive(all_inputs(300, at::kFloat, i), ReduceOp::sum)));
  }
}

// A slower peer works on what a faster one has dropped.
TEST(HostTransport, MemoryOfUnfinishedOperationsIsNotGivenToOthersWhenTheirGroupGoes) {
  if (group().size() == 1) GTEST_SKIP() << "no peers";
  std::vector<int> all(group().size());
  std::iota(all.begin(), all.end(), 0);
  constexpr int64_t numel = 100000;
  std::optional<Group> doomed = group().subgroup(all);
  const auto start_and_drop = [&] {
    doomed->all_reduce(doomed->allocate(numel, at::kFloat).fill_(1));
    doomed.reset();
  };
  at::Tensor fresh;
  if (group().rank() == 0) {
    start_and_drop();
    fresh = group().allocate(numel, at::kFloat);
  }
  group().barrier().wait();
  if (group().rank() != 0) start_and_drop();
  group().barrier().wait();
  if (group().rank() == 0) {
    EXPECT_EQ(fresh.count_nonzero().item<int64_t>(), 0);
  }
}

TEST(HostBackend, PremultipliedSum) {
  if (group().size() == 1) GTEST_SKIP() << "the identity transport returns its input";
  const auto backend = make_backend(group());
  for (const int64_t numel : {3, 200000}) {
    std::vector<at::Tensor> tensors{own(numel, at::kDouble)};
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::makePreMulSum(0.5 + group().rank());
    backend->allreduce(tensors, options)->wait(c10d::kUnsetTimeout);
    auto expected = at::zeros({numel}, at::kDouble);
    for (int rank = 0; rank < group().size(); ++rank) expected += input(rank, numel, at::kDouble) * (0.5 + rank);
    EXPECT_TRUE(at::allclose(tensors[0], expected, 1e-14));
  }
}

}  // namespace
}  // namespace shoal
