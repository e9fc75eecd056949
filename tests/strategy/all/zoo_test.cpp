// BEY01: every kind of parameter, under every strategy, at every world size, equals one process.

#include <torch/nn/module.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "shoal/decentralized.h"
#include "shoal/local_updates.h"
#include "shoal/shard_gossip.h"
#include "tests/strategy/decentralized/decentralized_simulation.h"
#include "tests/support/models.h"
#include "tests/support/training.h"
#include "tests/support/world.h"

namespace shoal::zoo_test {
namespace {

using test::batch;
using test::difference;
using test::group;
using test::Training;

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

const auto defaults = torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.01);

// Ranks that train on their own and average their parameters after every step: with SGD, the mean of gradients.
struct LocalSgd {
  explicit LocalSgd(at::ScalarType dtype)
      : model(std::make_shared<ZooImpl>(dtype)),
        optimizer(test::distinct(model->parameters()), defaults),
        local(std::static_pointer_cast<torch::nn::Module>(model), optimizer, group(), {.every = 1}) {}
  void zero_grad() { local.zero_grad(); }
  NoSync no_sync(bool) { return NoSync(nullptr); }
  at::Tensor forward(const at::Tensor& x) { return model->forward(x); }
  void step() { local.step(); }

  std::shared_ptr<ZooImpl> model;
  torch::optim::SGD optimizer;
  LocalUpdates local;
};

// Hosts of two ranks, where they can be, that average their shards with all others after every step.
struct Gossip {
  explicit Gossip(at::ScalarType dtype)
      : model(std::make_shared<ZooImpl>(dtype)),
        hosts(host_groups(group(), group().size() % 2 == 0 ? 2 : 1)),
        parallel(model, hosts.inside),
        optimizer(parallel, defaults, hosts.across,
                  {.topology = make_topology("complete", hosts.across.size()), .overlap = false}) {}
  void zero_grad() { optimizer.zero_grad(); }
  NoSync no_sync(bool accumulate) { return parallel.no_sync(accumulate); }
  at::Tensor forward(const at::Tensor& x) { return parallel.forward(x); }
  void step() { optimizer.step(); }

  std::shared_ptr<ZooImpl> model;
  HostGroups hosts;
  FullyShardedDataParallel<ZooImpl> parallel;
  ShardGossipOptimizer<torch::optim::SGD> optimizer;
};

template <class Trained>
void train_zoo(Trained& training, at::ScalarType dtype, int micros, double tolerance) {
  SCOPED_TRACE(std::to_string(micros) + " micro-batches");
  const auto reference = std::make_shared<ZooImpl>(dtype);
  const auto& model = training.model;
  torch::optim::SGD reference_optimizer(test::distinct(reference->parameters()), defaults);
  for (int64_t step = 0; step < 5; ++step) {
    training.zero_grad();
    reference_optimizer.zero_grad();
    for (int micro = 0; micro < micros; ++micro) {
      const auto local = training.no_sync(micro + 1 < micros);
      (training.forward(batch(group().rank(), step, micro).to(dtype)) / micros).backward();
      for (int rank = 0; rank < group().size(); ++rank) {
        (reference->forward(batch(rank, step, micro).to(dtype)) / (micros * group().size())).backward();
      }
    }
    training.step();
    reference_optimizer.step();
    const auto got = model->named_parameters();
    for (const auto& want : reference->named_parameters()) {
      const double allowed = want.value().scalar_type() == at::kFloat ? std::max(tolerance, 1e-6) : tolerance;
      ASSERT_LE(difference({got[want.key()]}, {want.value()}), allowed) << want.key() << " step " << step;
    }
    EXPECT_FALSE(model->never.grad().defined());
    EXPECT_FALSE(model->frozen->weight.grad().defined());
    EXPECT_EQ(model->conv->weight.strides(), reference->conv->weight.strides()) << "channels-last stays so";
    if (model->conv->weight.grad().defined()) {
      EXPECT_EQ(model->conv->weight.grad().strides(), model->conv->weight.strides());
    }
  }
}

// Ranks hold models of their own: equal to a simulation of all of them.
void train_decentralized_zoo(at::ScalarType dtype, int micros, bool views, double tolerance) {
  SCOPED_TRACE("decentralized with " + std::to_string(micros) + " micro-batches");
  const auto topology = make_topology("ring", group().size());
  const auto defaults = torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.01);
  test::Simulation<ZooImpl> simulation(
      topology, [&] { return std::make_shared<ZooImpl>(dtype); }, defaults);
  const auto model = std::make_shared<ZooImpl>(dtype);
  DecentralizedDataParallel<ZooImpl> parallel(
      model, optimizer_recipe<torch::optim::SGD>(defaults), group(),
      {.topology = topology, .bucket_cap_mb = 1e-4, .param_as_bucket_view = views});
  for (int64_t step = 0; step < 5; ++step) {
    for (int micro = 0; micro < micros; ++micro) {
      const auto local = parallel.no_sync(micro + 1 < micros);
      (parallel.forward(batch(group().rank(), step, micro).to(dtype)) / micros).backward();
    }
    simulation.step([&](ZooImpl& of, int rank) {
      at::Tensor sum;
      for (int micro = 0; micro < micros; ++micro) {
        const auto loss = of.forward(batch(rank, step, micro).to(dtype)) / micros;
        sum = sum.defined() ? sum + loss : loss;
      }
      return sum;
    });
    const auto got = model->named_parameters();
    for (const auto& want : simulation.model(group().rank()).named_parameters()) {
      const double allowed = want.value().scalar_type() == at::kFloat ? std::max(tolerance, 1e-5) : tolerance;
      ASSERT_LE(difference({got[want.key()]}, {want.value()}), allowed) << want.key() << " step " << step;
    }
    EXPECT_TRUE(at::allclose(model->never, at::ones({5}, dtype))) << "mixed with its equals, and never updated";
  }
}

// Everything in pairs on 2 ranks. At other sizes float64, which shows most, has micro-batches, and float32 has none.
bool in_turn(bool one, bool other) {
  return group().size() == 2 || one == other;
}

TEST(DecentralizedZoo, BEY01_every_parameter) {
  for (const bool views : {true, false}) {
    for (const int micros : {1, 3}) {
      if (!in_turn(views, micros == 3)) continue;
      train_decentralized_zoo(at::kDouble, micros, views, 1e-11);
      train_decentralized_zoo(at::kFloat, micros, views, 1e-5);
    }
  }
}

class Zoo : public testing::TestWithParam<std::string> {};

void train_under(const std::string& strategy, at::ScalarType dtype, double tolerance) {
  for (const int micros : {1, 3}) {
    if (!in_turn(dtype == at::kDouble, micros == 3)) continue;
    auto training =
        Training<ZooImpl>::make<torch::optim::SGD>(strategy, std::make_shared<ZooImpl>(dtype), group(), defaults,
                                                   {.find_unused_parameters = true, .bucket_mb = 1e-4});
    train_zoo(training, dtype, micros, tolerance);
  }
}

TEST_P(Zoo, BEY01_every_parameter_in_float64) {
  train_under(GetParam(), at::kDouble, 1e-12);
}

TEST_P(Zoo, BEY01_every_parameter_in_float32) {
  train_under(GetParam(), at::kFloat, 1e-6);
}

// Means of parameters, not of gradients: the float32 one rounds otherwise, and all others depend on it.
template <class Trained>
void train_averaging() {
  for (const auto dtype : {at::kDouble, at::kFloat}) {
    for (const int micros : {1, 3}) {
      if (!in_turn(dtype == at::kDouble, micros == 3)) continue;
      Trained training(dtype);
      train_zoo(training, dtype, micros, 1e-6);
    }
  }
}

TEST(ZooOfMeans, BEY01_every_parameter_under_local_sgd) {
  train_averaging<LocalSgd>();
}

TEST(ZooOfMeans, BEY01_every_parameter_under_gossip_of_shards) {
  train_averaging<Gossip>();
}

INSTANTIATE_TEST_SUITE_P(Strategies, Zoo,
                         testing::Values("ddp", "zero1", "zero2", "megatron", "megatron_in_grads",
                                         "megatron_no_overlap", "megatron_late_gather", "fsdp", "fsdp_grad_op",
                                         "fsdp_no_shard", "fsdp_hybrid", "fsdp_hybrid_grad_op"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace shoal::zoo_test
