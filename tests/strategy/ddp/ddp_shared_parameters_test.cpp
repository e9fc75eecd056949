// Networks with one encoder, each in a wrapper of its own.

#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <memory>
#include <string>
#include <vector>

#include "shoal/ddp.h"
#include "shoal/decentralized.h"
#include "shoal/error.h"
#include "shoal/fsdp.h"
#include "shoal/local_updates.h"
#include "shoal/megatron.h"
#include "shoal/optimizer_in_backward.h"
#include "shoal/zero.h"
#include "tests/support/models.h"
#include "tests/support/refusal.h"
#include "tests/support/world.h"

namespace shoal::test::ddp_shared_parameters_test {
namespace {

struct HeadImpl : torch::nn::Module {
  explicit HeadImpl(const Mlp& shared) {
    encoder = register_module("encoder", shared);
    head = register_module("head", torch::nn::Linear(5, 3));
    to(test_device(), at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) { return head(torch::tanh(encoder(x))); }

  Mlp encoder{nullptr};
  torch::nn::Linear head{nullptr};
};

struct Networks {
  Networks() {
    left = std::make_shared<HeadImpl>(encoder);
    right = std::make_shared<HeadImpl>(encoder);
  }
  std::vector<at::Tensor> parameters() const {
    auto all = left->parameters();
    for (const auto& parameter : right->head->parameters()) all.push_back(parameter);
    return all;
  }

  Mlp encoder = seeded(1);
  std::shared_ptr<HeadImpl> left, right;
};

using Parallel = DistributedDataParallel<HeadImpl>;

// In one process: the mean over ranks of the losses of `network` at their batches.
void reference_backward(const std::shared_ptr<HeadImpl>& network, int64_t step, int64_t micro = 0) {
  for (int rank = 0; rank < group().size(); ++rank) {
    (mean_loss(network->forward(batch(rank, step, micro))) / group().size()).backward();
  }
}

class DdpSharedParameters : public testing::TestWithParam<bool> {};

TEST_P(DdpSharedParameters, DDP08_each_wrapper_acts_in_the_backwards_of_its_own_forwards) {
  const Networks networks, alone;
  const DistributedDataParallelOptions options{.gradient_as_bucket_view = GetParam()};
  Parallel left(networks.left, group(), options), right(networks.right, group(), options);
  torch::optim::SGD of_left(networks.left->parameters(), 0.1), of_right(networks.right->parameters(), 0.1);
  torch::optim::SGD alone_left(alone.left->parameters(), 0.1), alone_right(alone.right->parameters(), 0.1);
  const auto turn = [&](Parallel& parallel, auto& optimizer, const auto& reference, auto& alone_optimizer,
                        int64_t step) {
    optimizer.zero_grad();
    alone_optimizer.zero_grad();
    mean_loss(parallel.forward(batch(group().rank(), step))).backward();
    reference_backward(reference, step);
    EXPECT_LT(difference(gradients(*parallel.module()), gradients(*reference)), 1e-12) << "step " << step;
    optimizer.step();
    alone_optimizer.step();
  };
  int64_t lefts = 0;
  int64_t rights = 0;
  for (int64_t step = 0; step < 9; ++step) {
    if (step % 3 == 1) {
      turn(right, of_right, alone.right, alone_right, step);
      ++rights;
    } else {
      turn(left, of_left, alone.left, alone_left, step);
      ++lefts;
    }
    EXPECT_EQ(left.steps(), lefts);
    EXPECT_EQ(right.steps(), rights);
  }
  EXPECT_LT(difference(networks.parameters(), alone.parameters()), 1e-12);
}

TEST_P(DdpSharedParameters, DDP08_backwards_of_several_wrappers_add_up_in_the_shared_gradient) {
  const Networks networks, alone;
  const DistributedDataParallelOptions options{.gradient_as_bucket_view = GetParam()};
  Parallel left(networks.left, group(), options), right(networks.right, group(), options);
  torch::optim::SGD optimizer(networks.parameters(), 0.1), alone_optimizer(alone.parameters(), 0.1);
  for (int64_t step = 0; step < 4; ++step) {
    optimizer.zero_grad(/*set_to_none=*/step % 2 == 0);
    alone_optimizer.zero_grad();
    mean_loss(left.forward(batch(group().rank(), step))).backward();
    mean_loss(right.forward(batch(group().rank(), step, 1))).backward();
    reference_backward(alone.left, step);
    reference_backward(alone.right, step, 1);
    optimizer.step();
    alone_optimizer.step();
    ASSERT_LT(difference(networks.parameters(), alone.parameters()), 1e-12) << "step " << step;
  }
  // One backward of both.
  for (int64_t step = 4; step < 8; ++step) {
    optimizer.zero_grad();
    alone_optimizer.zero_grad();
    const auto own = batch(group().rank(), step);
    (mean_loss(left.forward(own)) + mean_loss(right.forward(own))).backward();
    reference_backward(alone.left, step);
    reference_backward(alone.right, step);
    optimizer.step();
    alone_optimizer.step();
    ASSERT_LT(difference(networks.parameters(), alone.parameters()), 1e-12) << "step " << step;
  }
}

TEST_P(DdpSharedParameters, DDP07_gradients_accumulate_in_turns) {
  const Networks networks, alone;
  const DistributedDataParallelOptions options{.gradient_as_bucket_view = GetParam()};
  Parallel left(networks.left, group(), options), right(networks.right, group(), options);
  torch::optim::SGD of_left(networks.left->parameters(), 0.1), of_right(networks.right->parameters(), 0.1);
  torch::optim::SGD alone_left(alone.left->parameters(), 0.1), alone_right(alone.right->parameters(), 0.1);
  const auto accumulate = [&](Parallel& parallel, auto& optimizer, const auto& reference, auto& alone_optimizer,
                              int64_t step) {
    for (int64_t micro = 0; micro < 3; ++micro) {
      const auto scope = parallel.no_sync(micro < 2);
      mean_loss(parallel.forward(batch(group().rank(), step, micro))).backward();
      reference_backward(reference, step, micro);
    }
    optimizer.step();
    optimizer.zero_grad();
    alone_optimizer.step();
    alone_optimizer.zero_grad();
  };
  for (int64_t step = 0; step < 3; ++step) {
    accumulate(left, of_left, alone.left, alone_left, step);
    accumulate(right, of_right, alone.right, alone_right, step);
    ASSERT_LT(difference(networks.parameters(), alone.parameters()), 1e-12) << "step " << step;
  }
}

INSTANTIATE_TEST_SUITE_P(Views, DdpSharedParameters, testing::Bool(), testing::PrintToStringParamName());

// A former wrapper may live a while, as in Python.
TEST(DdpSharedParameters, DDP08_a_former_wrapper_of_the_module_takes_no_part) {
  auto model = seeded(1);
  DistributedDataParallel<MlpImpl> former(model.ptr(), group());
  mean_loss(former.forward(batch(group().rank(), 0))).backward();
  DistributedDataParallel<MlpImpl> present(model.ptr(), group());
  for (int64_t step = 0; step < 3; ++step) mean_loss(present.forward(batch(group().rank(), step))).backward();
  EXPECT_EQ(former.steps(), 1);
  EXPECT_EQ(present.steps(), 3);
}

TEST(DdpSharedParameters, DDP08_the_module_of_a_wrapper_without_its_forward_is_refused_where_parameters_are_shared) {
  torch::nn::Linear last(5, 3);
  const auto network = [&](int seed) { return torch::nn::Sequential(seeded(seed), torch::nn::Tanh(), last); };
  last->to(test_device(), at::kDouble);
  auto one = network(1);
  auto other = network(2);
  DistributedDataParallel<torch::nn::SequentialImpl> left(one, group()), right(other, group());
  mean_loss(left.forward(batch(group().rank(), 0))).backward();
  const auto text = refusal([&] { mean_loss(other->forward(batch(group().rank(), 0))).backward(); });
  EXPECT_NE(text.find("parameter 2."), std::string::npos) << text;
  EXPECT_NE(text.find("call the forward of the wrapper"), std::string::npos) << text;
}

template <class Make>
void expect_refusal(const std::string& name, const Make& make) {
  const auto text = refusal(make);
  EXPECT_NE(text.find(name + ": parameter encoder."), std::string::npos) << text;
  EXPECT_NE(text.find("is in another wrapper"), std::string::npos) << text;
}

TEST(DdpSharedParameters, wrappers_that_shard_or_mix_refuse_parameters_of_others) {
  const torch::optim::SGDOptions sgd(0.1);
  const auto refused_by_all = [&](const std::shared_ptr<HeadImpl>& network) {
    expect_refusal("FullyShardedDataParallel", [&] { FullyShardedDataParallel<HeadImpl>(network, group()); });
    expect_refusal("DistributedOptimizer", [&] { DistributedOptimizer<torch::optim::SGD>(network, sgd, group()); });
    expect_refusal("DecentralizedDataParallel", [&] {
      DecentralizedDataParallel<HeadImpl>(network, optimizer_recipe<torch::optim::SGD>(sgd), group());
    });
    torch::optim::SGD whole(network->parameters(), sgd);
    expect_refusal("LocalUpdates", [&] { LocalUpdates(network, whole, group(), {.every = 2}); });
    OSS<torch::optim::SGD> sharded(network->parameters(), sgd, group());
    expect_refusal("ShardedDataParallel", [&] { ShardedDataParallel<HeadImpl>(network, sharded, group()); });
  };
  {
    const Networks networks;
    const Parallel left(networks.left, group());
    refused_by_all(networks.right);
  }
  {
    const Networks networks;
    const Parallel left(networks.left, group());
    Parallel right(networks.right, group());
    torch::optim::SGD optimizer(networks.right->parameters(), sgd);
    expect_refusal("OptimizerInBackward", [&] { OptimizerInBackward(right, optimizer); });
  }
  {
    const Networks networks;
    const FullyShardedDataParallel<HeadImpl> left(networks.left, group());
    expect_refusal("DistributedDataParallel", [&] { Parallel(networks.right, group()); });
    expect_refusal("FullyShardedDataParallel", [&] { FullyShardedDataParallel<HeadImpl>(networks.right, group()); });
  }
  {
    const Networks networks;
    { const DistributedOptimizer<torch::optim::SGD> left(networks.left, sgd, group()); }
    const Parallel right(networks.right, group());  // the other one is gone
    EXPECT_EQ(right.steps(), 0);
  }
}

}  // namespace
}  // namespace shoal::test::ddp_shared_parameters_test
