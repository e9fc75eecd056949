// Every operation over MPI compared with a naive result; waits, dropped works and huge counts. Started by mpirun.

#include <fmt/format.h>

#include <climits>
#include <stdexcept>
#include <vector>

#include "shoal/error.h"
#include "shoal/group.h"
#include "tests/comm/host_inputs.h"

namespace shoal::mpi_test {
namespace {

using test::group;

constexpr at::ScalarType dtypes[] = {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong,
                                     at::kInt,    at::kShort, at::kChar, at::kByte,     at::kBool};
constexpr ReduceOp reduce_ops[] = {ReduceOp::sum,     ReduceOp::avg,  ReduceOp::min, ReduceOp::max,
                                   ReduceOp::product, ReduceOp::band, ReduceOp::bor, ReduceOp::bxor};

int size() {
  return group().size();
}

// Small numbers, so that every dtype holds every result exactly, except averages.
at::Tensor input(int rank, int64_t numel, at::ScalarType dtype) {
  constexpr int64_t period = 5;
  const auto numbers = (at::arange(period, at::kLong) * 7 + rank * 13) % period;
  const auto values = dtype == at::kBool ? numbers.gt(1) : (dtype == at::kByte ? numbers : numbers - 2).to(dtype);
  return values.repeat({numel / period + 1}).narrow(0, 0, numel).clone();
}

// From sums and bits in numbers that hold each of them exactly.
at::Tensor expected(ReduceOp op, int64_t numel, at::ScalarType dtype) {
  const bool bitwise = op == ReduceOp::band || op == ReduceOp::bor || op == ReduceOp::bxor;
  const auto exact = bitwise ? at::kLong : at::kDouble;
  auto result = input(0, numel, dtype).to(exact);
  for (int rank = 1; rank < size(); ++rank) result = test::combine(result, input(rank, numel, dtype).to(exact), op);
  if (op == ReduceOp::avg) result = result / size();
  return result.to(dtype);
}

bool has_meaning(ReduceOp op, at::ScalarType dtype) {
  const bool bitwise = op == ReduceOp::band || op == ReduceOp::bor || op == ReduceOp::bxor;
  return !(bitwise && at::isFloatingType(dtype)) && !(op == ReduceOp::avg && !at::isFloatingType(dtype));
}

void check_reductions(ReduceOp op, at::ScalarType dtype, int64_t part) {
  const auto numel = part * size();
  const auto result = expected(op, numel, dtype);
  const auto own = input(group().rank(), numel, dtype);
  const auto what = [&] { return fmt::format("{} {} {}", to_string(op), c10::toString(dtype), numel); };

  auto everywhere = own.clone();
  group().all_reduce(everywhere, op).wait();
  EXPECT_TRUE(at::equal(everywhere, result)) << "all_reduce " << what();

  for (int root = 0; root < size(); ++root) {
    auto at_root = own.clone();
    group().reduce(at_root, root, op).wait();
    if (group().rank() == root) {
      EXPECT_TRUE(at::equal(at_root, result)) << "reduce " << what();
    }
  }

  const auto own_part = result.narrow(0, part * group().rank(), part);
  auto output = at::empty({part}, own.options());
  group().reduce_scatter(output, own, op).wait();
  EXPECT_TRUE(at::equal(output, own_part)) << "reduce_scatter " << what();
  EXPECT_TRUE(at::equal(own, input(group().rank(), numel, dtype))) << "the input has changed: " << what();
  for (int place = 0; place < size(); ++place) {
    auto both = own.clone();
    auto inside = both.narrow(0, part * place, part);
    group().reduce_scatter(inside, both, op).wait();
    EXPECT_TRUE(at::equal(inside, own_part)) << "reduce_scatter into its input " << what();
  }
}

TEST(Mpi, carries_the_world) {
  EXPECT_EQ(group().transport(), "mpi");
}

TEST(Mpi, reductions_of_every_kind_and_dtype_are_the_naive_ones) {
  for (const auto dtype : dtypes) {
    for (const auto op : reduce_ops) {
      if (!has_meaning(op, dtype)) continue;
      for (const int64_t part : {1, 333, 5000}) check_reductions(op, dtype, part);
    }
  }
}

TEST(Mpi, large_reductions_are_cut_and_put_together) {
  constexpr int64_t piece = 1 << 20;  // bytes
  check_reductions(ReduceOp::sum, at::kDouble, piece / 8 + 17);
  check_reductions(ReduceOp::avg, at::kBFloat16, piece / 2 + 17);
  auto uneven = input(group().rank(), piece + 1, at::kFloat);
  group().all_reduce(uneven).wait();
  EXPECT_TRUE(at::equal(uneven, expected(ReduceOp::sum, uneven.numel(), at::kFloat)));
}

TEST(Mpi, sums_of_short_floats_are_rounded_once) {
  if (size() < 3) GTEST_SKIP() << "a sum of two numbers is rounded once in any case";
  // 256 + 1 is 256 in bfloat16.
  for (const int64_t numel : {1, 100000}) {
    auto tensor = at::full({numel}, group().rank() == 0 ? 256 : 1, at::kBFloat16);
    group().all_reduce(tensor).wait();
    EXPECT_TRUE(at::equal(tensor, at::full({numel}, 255 + size(), at::kBFloat16)));
  }
}

TEST(Mpi, refuses_what_has_no_meaning_and_goes_on) {
  EXPECT_THROW(group().all_reduce(at::ones({3}), ReduceOp::bor), UsageError);
  EXPECT_THROW(group().all_reduce(at::ones({3}, at::kBool), ReduceOp::avg), UsageError);
  EXPECT_THROW(group().all_reduce(at::ones({3}, at::kInt), ReduceOp::avg), UsageError);
  EXPECT_THROW(group().reduce(at::ones({3}, at::kComplexFloat), 0), UsageError);
  group().barrier().wait();
}

TEST(Mpi, moves_every_dtype) {
  const int rank = group().rank();
  for (const auto dtype : dtypes) {
    constexpr int64_t part = 300;
    const auto numel = part * size();
    std::vector<at::Tensor> inputs;
    std::vector<at::Tensor> columns;
    for (int peer = 0; peer < size(); ++peer) {
      inputs.push_back(input(peer, part, dtype));
      columns.push_back(input(peer, numel, dtype).narrow(0, part * rank, part));
    }
    auto gathered = at::empty({numel}, inputs[0].options());
    group().all_gather(gathered, inputs[rank]).wait();
    EXPECT_TRUE(at::equal(gathered, at::cat(inputs))) << dtype;
    gathered.zero_();
    gathered.narrow(0, part * rank, part).copy_(inputs[rank]);
    group().all_gather(gathered, gathered.narrow(0, part * rank, part)).wait();
    EXPECT_TRUE(at::equal(gathered, at::cat(inputs))) << "in place " << dtype;
    auto transposed = at::empty_like(gathered);
    group().all_to_all(transposed, input(rank, numel, dtype)).wait();
    EXPECT_TRUE(at::equal(transposed, at::cat(columns))) << dtype;
    auto sent = input(rank, part, dtype);
    group().broadcast(sent, size() - 1).wait();
    EXPECT_TRUE(at::equal(sent, inputs.back())) << dtype;
  }
}

TEST(Mpi, ranks_wait_in_different_orders) {
  const auto subgroup = group().subgroup([] {
    std::vector<int> backwards;
    for (int rank = size(); rank-- > 0;) backwards.push_back(rank);
    return backwards;
  }());
  std::vector<at::Tensor> tensors;
  std::vector<Work> works;
  for (int i = 0; i < 12; ++i) {
    tensors.push_back(input(group().rank(), 200000 + i, at::kFloat));
    works.push_back((i % 3 == 0 ? subgroup : group()).all_reduce(tensors.back()));
  }
  for (size_t i = 0; i < works.size(); ++i) works[group().rank() % 2 == 0 ? i : works.size() - 1 - i].wait();
  for (const auto& tensor : tensors) {
    EXPECT_TRUE(at::equal(tensor, expected(ReduceOp::sum, tensor.numel(), at::kFloat)));
  }
}

TEST(Mpi, messages_with_different_tags_pass_each_other) {
  const int next = (group().rank() + 1) % size();
  const int previous = (group().rank() + size() - 1) % size();
  auto large = group().send(at::full({1 << 20}, 1.F), next, 7);
  auto small = group().send(at::full({1}, 2.F), next, 0);
  auto one = at::empty({1});
  auto many = at::empty({1 << 20});
  group().recv(one, previous, 0).wait();
  group().recv(many, previous, 7).wait();
  large.wait();
  small.wait();
  EXPECT_EQ(one.item<float>(), 2);
  EXPECT_TRUE(at::equal(many, at::ones_like(many)));
}

TEST(Mpi, a_dropped_operation_is_waited_for) {
  const auto numel = 1 << 20;
  auto tensor = input(group().rank(), numel, at::kFloat);
  static_cast<void>(group().all_reduce(tensor));
  EXPECT_TRUE(at::equal(tensor, expected(ReduceOp::sum, numel, at::kFloat)));
}

TEST(Mpi, an_operation_that_an_exception_passes_still_serves_its_peers) {
  std::vector<int> everyone(static_cast<size_t>(size()));
  for (int rank = 0; rank < size(); ++rank) everyone[rank] = rank;
  const auto subgroup = group().subgroup(everyone);
  const auto numel = 1 << 20;
  if (group().rank() == 0) {
    try {
      const auto work = subgroup.all_reduce(input(0, numel, at::kFloat));
      throw std::runtime_error("nobody waits for it");
    } catch (const std::runtime_error&) {  // NOLINT(bugprone-empty-catch): thrown above
    }
  }
  group().barrier().wait();  // the other ranks begin only now
  if (group().rank() != 0) {
    auto tensor = input(group().rank(), numel, at::kFloat);
    subgroup.all_reduce(tensor).wait();
    EXPECT_TRUE(at::equal(tensor, expected(ReduceOp::sum, numel, at::kFloat)));
  }
  group().barrier().wait();
}

// Needs 7 GiB per rank: mpirun -n 2 mpi_test --transport mpi --gtest_also_run_disabled_tests
TEST(Mpi, DISABLED_counts_may_exceed_int) {
  constexpr int64_t numel = int64_t{INT_MAX} + 1000;
  auto tensor = at::full({numel}, group().rank() + 1, at::kByte);
  const auto check = [&](const at::Tensor& whole, int value) {
    for (const int64_t i : {int64_t{0}, numel / 2, numel - 1}) EXPECT_EQ(whole[i].item<int>(), value);
  };
  group().broadcast(tensor, 1).wait();
  check(tensor, 2);
  group().all_reduce(tensor).wait();
  check(tensor, 2 * size());
  tensor.fill_(group().rank());
  auto all = at::empty({numel * size()}, at::kByte);
  group().all_gather(all, tensor).wait();
  for (int rank = 0; rank < size(); ++rank) check(all.narrow(0, numel * rank, numel), rank);
  if (group().rank() == 0) group().send(all.narrow(0, numel, numel), 1).wait();
  if (group().rank() == 1) {
    group().recv(tensor.fill_(9), 0).wait();
    check(tensor, 1);
  }
}

}  // namespace
}  // namespace shoal::mpi_test
