// Host transport compared with a naive second implementation: every operation, reduction, dtype, size and kind of
// memory.

#include <gtest/gtest.h>

#include "shoal/error.h"
#include "tests/comm/host_inputs.h"

namespace shoal::test::host_test {
namespace {

const std::vector<at::ScalarType>& dtypes() {
  static const std::vector<at::ScalarType> list{at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong,
                                                at::kInt,    at::kShort, at::kChar, at::kByte,     at::kBool};
  return list;
}

// Calls check(dtype, numel, memory) for every combination; numel covers every path of the data: in the header, in one
// staged round, in many. Many rounds of every dtype are for 2 ranks alone: elsewhere they take most of the test's time.
// More than 4 ranks share the processors: they try one dtype of each kind.
template <class Check>
void everywhere(Check check) {
  for (const auto dtype : dtypes()) {
    if (group().size() > 4 && dtype != at::kFloat && dtype != at::kBFloat16 && dtype != at::kInt) continue;
    for (const int64_t numel : {0, 1, 63, 1001, 300007}) {
      if (numel > 300000 && group().size() > 2 && dtype != at::kFloat && dtype != at::kBFloat16) continue;
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

TEST(Host, is_the_transport_of_one_host) {
  EXPECT_EQ(group().transport(), group().size() > 1 ? "host" : "identity");
}

TEST(Host, all_reduce) {
  everywhere([](at::ScalarType dtype, int64_t numel, Memory memory) {
    for (const auto op : numel < 300000 ? reductions(dtype) : std::vector<ReduceOp>{ReduceOp::sum}) {
      auto tensor = in_memory(own(numel, dtype), memory);
      group().all_reduce(tensor, op).wait();
      EXPECT_TRUE(at::equal(tensor, naive(all_inputs(numel, dtype), op))) << to_string(op);
    }
  });
}

TEST(Host, reduce) {
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

TEST(Host, reduce_scatter) {
  everywhere([](at::ScalarType dtype, int64_t numel, Memory memory) {
    const auto part = numel > 300000 ? numel / group().size() : numel;
    for (const auto op : numel < 300000 ? reductions(dtype) : std::vector<ReduceOp>{ReduceOp::sum}) {
      const auto whole = in_memory(own(part * group().size(), dtype), memory);
      auto result = at::empty({part}, dtype);
      group().reduce_scatter(result, whole, op).wait();
      const auto expected = naive(all_inputs(part * group().size(), dtype), op);
      EXPECT_TRUE(at::equal(result, expected.narrow(0, part * group().rank(), part))) << to_string(op);
      // In place: the result replaces this rank's part.
      group().reduce_scatter(whole.narrow(0, part * group().rank(), part), whole, op).wait();
      EXPECT_TRUE(at::equal(whole.narrow(0, part * group().rank(), part), result)) << to_string(op);
    }
  });
}

TEST(Host, all_gather) {
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

TEST(Host, broadcast_gather_scatter) {
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

TEST(Host, all_to_all) {
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

TEST(Host, send_and_recv) {
  everywhere([](at::ScalarType dtype, int64_t numel, Memory memory) {
    if (numel == 0 || group().size() == 1) return;
    const int size = group().size();
    const int next = (group().rank() + 1) % size;
    const int previous = (group().rank() + size - 1) % size;
    auto first = group().send(in_memory(own(numel, dtype), memory), next, 1);
    auto second = group().send(in_memory(own(numel, dtype, 3), memory), next, 2);
    auto third = group().send(in_memory(own(numel, dtype, 4), memory), next, 1);
    // Tags are chosen by the receiver; messages with equal tags arrive in the order of sending.
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

TEST(Host, results_do_not_depend_on_how_data_are_cut) {
  // The same values as one tensor and as pieces of odd sizes are equal bit for bit.
  const auto whole = own(50021, at::kFloat).mul_(1.1).sin_();
  auto at_once = in_memory(whole, Memory::shared);
  group().all_reduce(at_once).wait();
  auto in_pieces = in_memory(whole, Memory::staged);
  for (auto& piece : in_pieces.split(777)) group().all_reduce(piece).wait();
  EXPECT_TRUE(at::equal(at_once, in_pieces));
}

TEST(Host, a_na_n_of_one_rank_shows_in_min_and_max) {
  for (const auto op : {ReduceOp::min, ReduceOp::max, ReduceOp::sum}) {
    auto tensor = at::ones({3});
    if (group().rank() == group().size() - 1) tensor[1] = NAN;
    group().all_reduce(tensor, op).wait();
    EXPECT_TRUE(tensor[1].isnan().item<bool>()) << to_string(op);
  }
}

}  // namespace
}  // namespace shoal::test::host_test
