// Parameters that DDP puts into separate buckets: other dtypes, sparse gradients.

#include <torch/nn/init.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "shoal/ddp.h"
#include "tests/support/models.h"
#include "tests/support/world.h"

namespace shoal::ddp_zoo_test {
namespace {

using test::batch;
using test::difference;
using test::group;

struct MixedImpl : torch::nn::Module {
  MixedImpl() {
    torch::manual_seed(2);
    first = register_module("first", torch::nn::Linear(12, 8));
    second = register_module("second", torch::nn::Linear(8, 4));
    second->to(at::kBFloat16);
  }
  at::Tensor forward(at::Tensor x) {
    return second(torch::tanh(first(x)).to(at::kBFloat16)).to(at::kFloat).pow(2).sum();
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
};

TEST(DdpZoo, DDP14_dtypes_have_buckets_of_their_own) {
  auto log = std::make_shared<CallLog>();
  auto model = std::make_shared<MixedImpl>();
  MixedImpl reference;
  DistributedDataParallel parallel(model, group().recorded(log));
  EXPECT_EQ(parallel.buckets().size(), 2U);
  for (int64_t step = 0; step < 2; ++step) {
    model->zero_grad();
    log->clear();
    // 1000 samples per rank: a count that bfloat16 cannot hold.
    parallel.backward(parallel.forward(batch(group().rank(), step).to(at::kFloat)), 1001);
    std::set<c10::ScalarType> dtypes;
    for (const auto& record : log->records()) {
      if (record.op == Op::all_reduce) dtypes.insert(record.dtype);
    }
    EXPECT_EQ(dtypes, (std::set<c10::ScalarType>{at::kFloat, at::kBFloat16}));
  }
  for (int rank = 0; rank < group().size(); ++rank) {
    (reference.forward(batch(rank, 1).to(at::kFloat)) / (1001 * group().size())).backward();
  }
  EXPECT_LT(difference({model->first->weight.grad()}, {reference.first->weight.grad()}), 1e-2);
  EXPECT_LT(difference({model->second->weight.grad()}, {reference.second->weight.grad()}), 2e-2);
}

TEST(DdpZoo, DDP14_weights_are_exact_for_a_model_of_16_bit_parameters_alone) {
  auto model = std::make_shared<torch::nn::LinearImpl>(torch::nn::LinearOptions(1, 1).bias(false));
  model->to(at::kHalf);
  DistributedDataParallel parallel(model, group());
  // float16's maximum is 65504, so this count cannot ride in the gradients' own bucket.
  const double tokens = 100000;
  parallel.backward(parallel.forward(at::full({1, 1}, 1000, at::kHalf)).sum(), tokens);
  // Each addition, and the division, rounds to 11 bits.
  EXPECT_NEAR(model->weight.grad().item<float>(), 0.01, 0.01 * (group().size() + 1) / 2048);
}

struct SparseImpl : torch::nn::Module {
  explicit SparseImpl(bool sparse) {
    torch::manual_seed(2);
    table = register_module("table", torch::nn::Embedding(torch::nn::EmbeddingOptions(40, 3).sparse(sparse)));
    linear = register_module("linear", torch::nn::Linear(3, 2));
    to(at::kDouble);
  }
  at::Tensor forward(at::Tensor indices) { return linear(table(indices)).pow(2).sum(); }
  torch::nn::Embedding table{nullptr};
  torch::nn::Linear linear{nullptr};
};

TEST(DdpZoo, DDP14_sparse_gradients_are_reduced_as_sparse) {
  auto log = std::make_shared<CallLog>();
  auto model = std::make_shared<SparseImpl>(true);
  DistributedDataParallel parallel(model, group().recorded(log));
  const auto indices = [](int rank, int64_t step) {
    return at::tensor({rank, static_cast<int>(step), 7, 7}, at::kLong);
  };
  for (int64_t step = 0; step < 3; ++step) {
    model->zero_grad();
    parallel.forward(indices(group().rank(), step)).backward();
    SparseImpl reference(false);
    for (int rank = 0; rank < group().size(); ++rank) {
      (reference.forward(indices(rank, step)) / group().size()).backward();
    }
    const auto grad = model->table->weight.grad();
    ASSERT_TRUE(grad.is_sparse());
    EXPECT_LT(difference({grad.to_dense()}, {reference.table->weight.grad()}), 1e-12);
    EXPECT_LT(difference({model->linear->weight.grad()}, {reference.linear->weight.grad()}), 1e-12);
  }
  for (const auto& record : log->records()) {
    EXPECT_TRUE(record.op != Op::all_reduce || record.bytes < 40 * 3 * 8) << "the table is not reduced densely";
  }
}

TEST(DdpZoo, DDP14_sparse_means_of_16_bits_do_not_overflow_in_their_sum) {
  torch::nn::Embedding table(torch::nn::EmbeddingOptions(4, 3).sparse(true));
  table->to(at::kHalf);
  torch::nn::init::zeros_(table->weight);
  DistributedDataParallel parallel(table, group());
  (parallel.forward(at::zeros({1}, at::kLong)) * 60000).sum().backward();
  const auto& grad = table->weight.grad();
  EXPECT_EQ(grad.scalar_type(), at::kHalf);
  EXPECT_TRUE(grad.to_dense()[0].eq(60000).all().item<bool>()) << grad.to_dense();
}

TEST(DdpZoo, DDP14_sparse_means_add_up_without_zero_grad) {
  auto model = std::make_shared<SparseImpl>(true);
  DistributedDataParallel parallel(model, group());
  SparseImpl reference(false);
  const auto rank = group().rank();
  const auto indices = [](int of, int64_t step) { return at::tensor({of, static_cast<int>(step), 7}, at::kLong); };
  for (int64_t step = 0; step < 3; ++step) {
    const int ranks = step == 1 ? 1 : group().size();  // that have samples
    const auto loss = parallel.forward(indices(rank, step));
    rank < ranks ? parallel.backward(loss, 3) : parallel.backward(at::Tensor(), 0);
    for (int of = 0; of < ranks; ++of) (reference.forward(indices(of, step)) / (3 * ranks)).backward();
    EXPECT_LT(difference({model->table->weight.grad().to_dense()}, {reference.table->weight.grad()}), 1e-12);
    EXPECT_LT(difference({model->linear->weight.grad()}, {reference.linear->weight.grad()}), 1e-12);
  }
}

struct TiedImpl : torch::nn::Module {
  explicit TiedImpl(bool sparse) {
    torch::manual_seed(2);
    table = register_module("table", torch::nn::Embedding(torch::nn::EmbeddingOptions(40, 3).sparse(sparse)));
    to(at::kDouble);
  }
  // tied: whether the weight is the decoder's, too.
  at::Tensor forward(at::Tensor indices, bool tied) {
    const auto x = torch::tanh(table(indices));
    return (tied ? at::linear(x, table->weight) : x).pow(2).sum();
  }
  torch::nn::Embedding table{nullptr};
};

// As autograd's: dense where one of the terms is.
TEST(DdpZoo, DDP14_a_sparse_gradient_that_is_dense_on_some_ranks_is_the_mean_and_dense) {
  const auto rank = group().rank();
  const auto indices = [](int of, int64_t step) { return at::tensor({of, static_cast<int>(step), 7}, at::kLong); };
  for (const bool zeroes : {true, false}) {
    auto model = std::make_shared<TiedImpl>(true);
    DistributedDataParallel parallel(model, group());
    TiedImpl reference(false);
    bool dense = false;
    for (int64_t step = 0; step < 5; ++step) {
      SCOPED_TRACE(step);
      const auto tied = [&](int of) { return step == 2 || (step == 3 && of == 0); };
      if (zeroes) {
        model->zero_grad();
        reference.zero_grad();
        dense = false;
      }
      dense = dense || step == 2 || step == 3;
      parallel.forward(indices(rank, step), tied(rank)).backward();
      for (int of = 0; of < group().size(); ++of) {
        (reference.forward(indices(of, step), tied(of)) / group().size()).backward();
      }
      const auto grad = model->table->weight.grad();
      EXPECT_EQ(grad.is_sparse(), !dense);
      EXPECT_LT(difference({grad.is_sparse() ? grad.to_dense() : grad}, {reference.table->weight.grad()}), 1e-12);
    }
  }
}

}  // namespace
}  // namespace shoal::ddp_zoo_test
