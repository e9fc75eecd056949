// Collectives of every dtype, and of views that are not plain memory.

#include "shoal/group.h"

#include <vector>

#include "comm/group/group_state.h"
#include "shoal/error.h"
#include "tests/support/refusal.h"
#include "tests/support/world.h"

namespace shoal::group_dtypes_test {
namespace {

using test::group;

// Such views share memory with a tensor of other values.
TEST(Group, conjugate_and_negated_views_arrive_as_their_values) {
  const auto& group = test::group();
  const int size = group.size(), rank = group.rank(), next = (rank + 1) % size;
  const auto value = [](int of) { return c10::complex<float>(static_cast<float>(of + 1), 5); };
  const auto conj = [&](int of) { return at::conj(at::full({4}, value(of), at::kComplexFloat)); };
  const auto right = [&](const at::Tensor& tensor, int of) {
    return tensor.eq(at::Scalar(c10::complex<float>(static_cast<float>(of + 1), -5))).all().item<bool>();
  };
  const auto arrives = [](int64_t numel) { return at::zeros({numel}, at::kComplexFloat); };
  auto all = arrives(4 * size);
  group.all_gather(all, conj(rank)).wait();
  for (int of = 0; of < size; ++of) EXPECT_TRUE(right(all.narrow(0, 4 * of, 4), of)) << all;
  auto root = rank == 0 ? conj(0) : arrives(4);
  group.broadcast(root, 0).wait();
  EXPECT_TRUE(right(root, 0)) << root;
  auto part = arrives(4);
  group.scatter(part, rank == 0 ? std::vector<at::Tensor>(size, conj(3)) : std::vector<at::Tensor>(), 0).wait();
  EXPECT_TRUE(right(part, 3)) << part;
  if (size > 1) {
    auto sending = group.send(conj(rank), next);
    group.recv(part, (rank + size - 1) % size).wait();
    sending.wait();
    EXPECT_TRUE(right(part, (rank + size - 1) % size)) << part;
  }
  const auto negated = at::imag(at::conj(at::full({1}, c10::complex<float>(1, 3), at::kComplexFloat)));  // -3
  ASSERT_TRUE(negated.is_neg() && negated.is_contiguous());
  auto sum = at::zeros({1});
  group.reduce_scatter(sum, size == 1 ? negated : at::full({size}, -3.0)).wait();
  EXPECT_EQ(sum.item<float>(), -3.F * static_cast<float>(size));
  // Results would have to be written with other values than they have.
  EXPECT_THROW(group.all_reduce(negated), UsageError);
  EXPECT_THROW(group.all_gather(at::conj(all), part), UsageError);
  const auto text = test::refusal<UsageError>([&] { group.reduce(negated, 0).wait(); });
  EXPECT_NE(text.find("tensor.resolve_conj().resolve_neg()"), std::string::npos) << text;
  EXPECT_EQ(group.all_reduce(1.0), size);  // and can continue
}

// It is contiguous, whatever its strides.
TEST(Group, an_element_of_a_column_is_moved_and_summed) {
  const auto& group = test::group();
  const int size = group.size(), rank = group.rank(), next = (rank + 1) % size;
  const auto table = at::zeros({4, 2});
  const auto cell = table.narrow(0, 1, 1).select(1, 0).fill_(rank + 1);
  ASSERT_EQ(cell.stride(0), 2);
  auto all = at::zeros({size});
  group.all_gather(all, cell).wait();
  EXPECT_TRUE(at::equal(all, at::arange(1, size + 1, at::kFloat)));
  if (size > 1) {
    auto received = at::zeros({1});
    auto sending = group.send(cell, next);
    group.recv(received, (rank + size - 1) % size).wait();
    sending.wait();
    EXPECT_EQ(received.item<int>(), (rank + size - 1) % size + 1);
  }
  group.broadcast(cell, size - 1).wait();
  EXPECT_EQ(cell.item<int>(), size);
  group.all_reduce(cell).wait();
  EXPECT_EQ(cell.item<int>(), size * size);
  const std::vector<at::Tensor> parts(static_cast<size_t>(size), cell);
  std::vector<at::Tensor> arrive;
  for (int of = 0; of < size; ++of) arrive.push_back(at::zeros({4, 2}).narrow(0, 1, 1).select(1, 0));
  issue(group, {.op = Op::all_to_all, .inputs = parts, .outputs = arrive, .label = {}}).wait();
  EXPECT_EQ(arrive[static_cast<size_t>(next)].item<int>(), size * size);
}

TEST(Group, refuses_reductions_that_the_dtype_does_not_have) {
  EXPECT_THROW(group().all_reduce(at::ones({3}, at::kInt), ReduceOp::avg), UsageError);
  EXPECT_THROW(group().all_reduce(at::ones({3}, at::kBool), ReduceOp::avg), UsageError);
  EXPECT_THROW(group().all_reduce(at::ones({3}), ReduceOp::bxor), UsageError);
  EXPECT_THROW(group().reduce(at::ones({3}, at::kUInt16), 0), UsageError);
  const auto part = at::ones({3}, at::kComplexFloat);
  EXPECT_THROW(group().reduce_scatter(part, part.repeat({group().size()})), UsageError);
  if (group().rank() == 0) {  // the others' next call is its next call, too
    const Call premultiplied{.op = Op::all_reduce,
                             .reduce = ReduceOp::premul_sum,
                             .factor = 2,
                             .inputs = {at::ones({3}, at::kInt)},
                             .outputs = {},
                             .label = {}};
    EXPECT_THROW(issue(group(), premultiplied), UsageError);
  }
  const auto sum = at::ones({3});
  group().all_reduce(sum).wait();
  EXPECT_TRUE(at::equal(sum, at::full({3}, static_cast<double>(group().size()))));
}

// Whole numbers whose sums are exact in every order, beyond a byte where the dtype has more.
at::Tensor whole_numbers(int rank, at::ScalarType dtype) {
  const auto small = at::arange(7, at::kLong).add(rank) % 3;
  const bool wide = dtype != at::kChar && dtype != at::kByte && dtype != at::kBool && dtype != at::kBFloat16;
  return (wide ? small * 200 - 201 : small).to(dtype);
}

TEST(Group, tensors_of_every_dtype_are_reduced_and_moved) {
  const auto& group = test::group();
  for (const auto dtype : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kShort,
                           at::kChar, at::kByte, at::kBool}) {
    SCOPED_TRACE(toString(dtype));
    auto sum = whole_numbers(0, dtype), most = sum.clone();
    for (int rank = 1; rank < group.size(); ++rank) {
      sum = sum + whole_numbers(rank, dtype);
      most = at::maximum(most, whole_numbers(rank, dtype));
    }
    const auto own = whole_numbers(group.rank(), dtype);
    auto values = own.clone();
    group.all_reduce(values).wait();
    EXPECT_TRUE(at::equal(values, sum));
    values = own.clone();
    group.all_reduce(values, ReduceOp::max).wait();
    EXPECT_TRUE(at::equal(values, most));
    values = own.clone();
    group.reduce(values, 0).wait();
    EXPECT_TRUE(group.rank() != 0 || at::equal(values, sum));
    auto part = at::zeros({7}, dtype);
    group.reduce_scatter(part, own.repeat({group.size()})).wait();
    EXPECT_TRUE(at::equal(part, sum));
    values = own.clone();
    group.broadcast(values, group.size() - 1).wait();
    EXPECT_TRUE(at::equal(values, whole_numbers(group.size() - 1, dtype)));
    auto all = at::zeros({7 * group.size()}, dtype);
    group.all_gather(all, own).wait();
    for (int rank = 0; rank < group.size(); ++rank) {
      EXPECT_TRUE(at::equal(all.slice(0, 7 * rank, 7 * (rank + 1)), whole_numbers(rank, dtype)));
    }
  }
}

TEST(Group, tensors_of_dtypes_that_have_no_sum_are_moved) {
  const auto& group = test::group();
  const int size = group.size(), rank = group.rank();
  for (const auto dtype : {at::kComplexFloat, at::kComplexDouble, at::kUInt16, at::kUInt32, at::kFloat8_e4m3fn}) {
    SCOPED_TRACE(toString(dtype));
    const auto of = [&](int from) { return at::full({5}, from + 1.0).to(dtype); };
    const auto same = [](const at::Tensor& a, const at::Tensor& b) {
      return at::equal(a.view(at::kByte), b.view(at::kByte));
    };
    const auto new_tensor = [&](int64_t numel) { return at::full({numel}, 9.0).to(dtype); };
    std::vector<at::Tensor> ranks;
    for (int from = 0; from < size; ++from) ranks.push_back(of(from));
    auto values = of(rank);
    group.broadcast(values, size - 1).wait();
    EXPECT_TRUE(same(values, of(size - 1)));
    auto all = new_tensor(5 * size);
    group.all_gather(all, of(rank)).wait();
    EXPECT_TRUE(same(all, at::cat(ranks)));
    auto exchanged = new_tensor(5 * size);
    group.all_to_all(exchanged, at::cat(std::vector<at::Tensor>(size, of(rank)))).wait();
    EXPECT_TRUE(same(exchanged, at::cat(ranks)));
    std::vector<at::Tensor> gathered;
    for (int from = 0; rank == 0 && from < size; ++from) gathered.push_back(new_tensor(5));
    group.gather(gathered, of(rank), 0).wait();
    for (size_t from = 0; from < gathered.size(); ++from) EXPECT_TRUE(same(gathered[from], ranks[from]));
    auto part = new_tensor(5);
    group.scatter(part, rank == 0 ? ranks : std::vector<at::Tensor>(), 0).wait();
    EXPECT_TRUE(same(part, of(rank)));
  }
}

TEST(Group, a_sum_of_bools_is_a_bool) {
  auto flags = at::ones({3}, at::kBool);
  group().all_reduce(flags).wait();
  EXPECT_TRUE(at::equal(flags.view(at::kByte), at::ones({3}, at::kByte)));
  auto part = at::ones({1}, at::kBool);
  group().reduce_scatter(part, at::ones({group().size()}, at::kBool)).wait();
  EXPECT_EQ(part.view(at::kByte).item<uint8_t>(), 1);
}

}  // namespace
}  // namespace shoal::group_dtypes_test
