// BEY01: every kind of parameter, at every world size, equals one process.

#include <torch/torch.h>

#include "shoal/strategy/ddp.h"
#include "tests/support/models.h"
#include "tests/support/world.h"

namespace shoal {
namespace {

using test::batch;
using test::difference;
using test::world;

const Group& group() {
  return world().group();
}

// Two names for one weight: registered twice, as tied heads are.
struct TiedImpl : torch::nn::Module {
  explicit TiedImpl(const at::Tensor& weight) { register_parameter("weight", weight); }
};

struct ZooImpl : torch::nn::Module {
  explicit ZooImpl(at::ScalarType dtype) {
    torch::manual_seed(11);
    tied = register_module("tied", torch::nn::Linear(torch::nn::LinearOptions(12, 12).bias(false)));
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 5, 2)));
    frozen = register_module("frozen", torch::nn::Linear(20, 7));
    out = register_module("out", torch::nn::Linear(7, 3));
    scalar = register_parameter("scalar", at::full({}, 0.7));
    empty = register_parameter("empty", at::empty({0, 4}));
    tiny = register_parameter("tiny", at::ones({1}));
    odd = register_parameter("odd", at::randn({7}));
    never = register_parameter("never", at::ones({5}));
    to(dtype);
    coarse = register_parameter("coarse", at::ones({3}, at::kFloat));  // another dtype in one model
    register_module("head", std::make_shared<TiedImpl>(tied->weight));
    for (auto& parameter : frozen->parameters()) parameter.requires_grad_(false);
    conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
  }

  at::Tensor forward(at::Tensor x) {
    x = torch::tanh(tied(x));
    x = torch::tanh(at::linear(x, tied->weight.t()));
    x = conv(x.view({-1, 3, 2, 2})).flatten(1);                       // [n, 5]
    x = torch::tanh(frozen(x.repeat({1, 4}))) * scalar * tiny + odd;  // [n, 7]
    x = out(x) * coarse.to(x.scalar_type());
    return x.pow(2).mean() + empty.sum();
  }

  torch::nn::Linear tied{nullptr}, frozen{nullptr}, out{nullptr};
  torch::nn::Conv2d conv{nullptr};
  at::Tensor scalar, empty, tiny, odd, never, coarse;
};

void train_zoo(at::ScalarType dtype, int micros, bool view, double tolerance) {
  auto model = std::make_shared<ZooImpl>(dtype);
  const auto reference = std::make_shared<ZooImpl>(dtype);
  DistributedDataParallel parallel(model, group(),
                                   {.find_unused_parameters = true,
                                    .bucket_cap_mb = 1e-3,
                                    .first_bucket_mb = 1e-4,
                                    .gradient_as_bucket_view = view});
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  torch::optim::SGD reference_optimizer(reference->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  for (int64_t step = 0; step < 5; ++step) {
    optimizer.zero_grad();
    reference_optimizer.zero_grad();
    for (int micro = 0; micro < micros; ++micro) {
      const auto local = parallel.no_sync(micro + 1 < micros);
      (parallel.forward(batch(group().rank(), step, micro).to(dtype)) / micros).backward();
      for (int rank = 0; rank < group().size(); ++rank) {
        (reference->forward(batch(rank, step, micro).to(dtype)) / (micros * group().size())).backward();
      }
    }
    optimizer.step();
    reference_optimizer.step();
    const auto got = model->named_parameters();
    for (const auto& want : reference->named_parameters()) {
      const double allowed = want.value().scalar_type() == at::kFloat ? std::max(tolerance, 1e-6) : tolerance;
      ASSERT_LE(difference({got[want.key()]}, {want.value()}), allowed) << want.key() << " step " << step;
    }
    EXPECT_FALSE(model->never.grad().defined());
    EXPECT_FALSE(model->frozen->weight.grad().defined());
    EXPECT_EQ(model->conv->weight.grad().strides(), model->conv->weight.strides()) << "channels-last stays so";
  }
}

TEST(DdpZoo, BEY01_every_parameter_in_float64) {
  for (const int micros : {1, 3}) {
    for (const bool view : {true, false}) train_zoo(at::kDouble, micros, view, 1e-12);
  }
}

TEST(DdpZoo, BEY01_every_parameter_in_float32) {
  for (const int micros : {1, 3}) {
    for (const bool view : {true, false}) train_zoo(at::kFloat, micros, view, 1e-6);
  }
}

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
    // 1000 samples a rank: a count that bfloat16 could not hold.
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
  // float16 ends at 65504, so this count cannot ride in the gradients' own bucket.
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

}  // namespace
}  // namespace shoal
