// Many tensors in one collective, and sparse ones.

#include "comm/group/coalesce.h"
#include "shoal/group.h"

#include <utility>
#include <vector>

#include "shoal/error.h"
#include "tests/support/world.h"

namespace shoal::coalesce_test {
namespace {

using test::group;

TEST(Coalesce, broadcasts_any_mixture_in_chunks) {
  auto log = std::make_shared<CallLog>();
  const auto recorded = group().recorded(log);
  const double value = group().rank() + 1;
  std::vector<at::Tensor> tensors = {at::full({10}, value),
                                     at::full({3, 4}, value).t(),
                                     at::full({}, value),
                                     at::full({0}, value),
                                     at::full({5}, value, at::kDouble),
                                     at::full({2, 3, 4, 4}, value).contiguous(at::MemoryFormat::ChannelsLast)};
  broadcast_coalesced(recorded, tensors, 0, {}, /*chunk_bytes=*/64);
  for (const auto& tensor : tensors) EXPECT_TRUE(at::equal(tensor, at::ones_like(tensor)));
  // floats: 40 + (48, 64 > rest) ... : {10}, {3,4} + {} , {2,3,4,4}; doubles: {5}
  EXPECT_EQ(log->count(Op::broadcast), 4);
}

TEST(Coalesce, sums_sparse_tensors_of_ranks_that_have_one) {
  const int ranks = group().size();
  const bool has = group().rank() % 2 == 0;
  at::Tensor sparse;
  auto expected = at::zeros({6, 2});
  for (int rank = 0; rank < ranks; rank += 2) {
    expected[rank % 6] += rank + 1;
    expected[5] += 1;
  }
  if (has) {
    auto dense = at::zeros({6, 2});
    dense[group().rank() % 6] += group().rank() + 1;
    dense[5] += 1;
    sparse = dense.to_sparse(1);
  }
  const auto result = all_reduce_sparse(group(), sparse, {6, 2}, at::TensorOptions(at::kFloat), 0.5, {});
  EXPECT_EQ(result.present, (ranks + 1) / 2);
  EXPECT_DOUBLE_EQ(result.weight, 0.5 * ranks);
  EXPECT_TRUE(at::equal(result.sum.to_dense(), expected));
  EXPECT_FALSE(all_reduce_sparse(group(), {}, {6, 2}, at::TensorOptions(at::kFloat), 1, {}).sum.defined());
}

TEST(Coalesce, sums_of_16_bits_are_in_float32) {
  const auto own = at::full({2, 2}, 60000, at::kHalf).to_sparse(1);
  const auto sum = all_reduce_sparse(group(), own, {2, 2}, own.values().options(), 1, {}).sum;
  EXPECT_TRUE(at::equal(sum.to_dense(), at::full({2, 2}, 60000.0 * group().size(), at::kFloat)));
}

TEST(Coalesce, a_sum_in_a_wider_dtype_travels_in_its_own) {
  auto log = std::make_shared<CallLog>();
  const auto own = at::full({2, 2}, 3e38, at::kFloat).to_sparse(1);
  const auto sum =
      all_reduce_sparse(group().recorded(log), own, {2, 2}, own.values().options(), 1, {}, {}, at::kDouble).sum;
  const auto expected = at::full({2, 2}, 3e38, at::kFloat).to(at::kDouble) * group().size();
  EXPECT_TRUE(at::equal(sum.to_dense(), expected));
  EXPECT_EQ(log->bytes(Op::all_gather), (5 * 8 + 2 * 8 + 4 * 4) * group().size()) << "header, indices and values";
}

TEST(Coalesce, a_dense_tensor_among_sparse_ones_makes_the_sum_dense) {
  const int last = group().size() - 1;
  auto expected = at::zeros({6, 2});
  for (int rank = 0; rank <= last; ++rank) expected[rank % 6] += rank + 1;
  auto own = at::zeros({6, 2});
  own[group().rank() % 6] += group().rank() + 1;
  for (const bool dense : {true, false}) {
    const auto passed = dense && group().rank() == last ? own : own.to_sparse(1);
    const auto result = all_reduce_sparse(group(), passed, {6, 2}, at::TensorOptions(at::kFloat), 1, {});
    EXPECT_EQ(result.present, group().size());
    EXPECT_EQ(result.sum.is_sparse(), !dense);
    EXPECT_TRUE(at::equal(dense ? result.sum : result.sum.to_dense(), expected));
  }
}

TEST(Coalesce, sparse_tensors_of_different_kinds_are_refused_on_all_ranks) {
  if (group().size() == 1) GTEST_SKIP() << "one rank agrees with itself";
  const int odd = group().size() - 1;
  const auto sum_of = [](const at::Tensor& sparse) {
    return all_reduce_sparse(group(), sparse, sparse.sizes(), sparse.values().options(), 1, {}).sum;
  };
  const auto common = at::ones({4, 2}).to_sparse(1);
  const std::pair<at::Tensor, std::string> others[] = {
      {at::ones({2000, 2}).to_sparse(1), "Float [2000, 2], sparse dimensions: 1"},
      {at::ones({4, 2}).to_sparse(2), "Float [4, 2], sparse dimensions: 2"},
      {at::ones({4, 2}, at::kDouble).to_sparse(1), "Double [4, 2], sparse dimensions: 1"}};
  for (const auto& [other, text] : others) {
    try {
      sum_of(group().rank() == odd ? other : common);
      ADD_FAILURE() << "no error, but " << text;
    } catch (const DisagreeError& error) {
      EXPECT_NE(
          std::string(error.what())
              .find("rank 0 has Float [4, 2], sparse dimensions: 1, rank " + std::to_string(odd) + " has " + text),
          std::string::npos)
          << error.what();
    }
    EXPECT_TRUE(at::equal(sum_of(common).to_dense(), at::full({4, 2}, static_cast<double>(group().size()))));
  }
}

}  // namespace
}  // namespace shoal::coalesce_test
