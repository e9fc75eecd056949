// ShardedDataParallel: reduction to the owners of gradients, its times and its memory.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <chrono>
#include <iostream>
#include <set>
#include <sstream>
#include <thread>

#include "comm/group/group_state.h"
#include "comm/rendezvous/world_state.h"
#include "engine/buckets/step_trailer.h"
#include "shoal/ddp.h"
#include "shoal/optim.h"
#include "tests/strategy/zero/sharded_ddp_training.h"
#include "tests/support/memory_meter.h"
#include "tests/support/refusal.h"
#include "tests/support/with_transport.h"

namespace shoal::test::sharded_ddp_buckets_test {
namespace {

// Bytes of memory that ranks share.
int64_t shared_bytes() {
  return static_cast<int64_t>(state_of(group())->world->memory->bytes_in_use());
}

TEST(ShardedDdp, SDP02_gradient_memory_falls_with_the_number_of_ranks) {
  constexpr int64_t layers = 16;
  constexpr int64_t width = 768;  // more than a model whose passing buckets are kept
  constexpr int64_t layer_bytes = width * width * 4;
  torch::manual_seed(1);
  torch::nn::Sequential model;
  for (int64_t i = 0; i < layers; ++i) {
    model->push_back(torch::nn::Linear(torch::nn::LinearOptions(width, width).bias(false)));
  }
  Sgd optimizer(model->parameters(), torch::optim::SGDOptions(0.1), group());
  group().broadcast(at::zeros({1000}), 0).wait();  // makes the staging buffer, which is never freed
  const auto x = at::ones({1, width});
  auto& meter = MemoryMeter::instance();
  const auto live = [&] { return meter.live() + shared_bytes(); };
  const auto before = live();
  ShardedDataParallel parallel(model, optimizer, group(), {.reduce_buffer_size = width * width});
  const auto own = layer_bytes * ((layers + group().size() - 1) / group().size());
  int64_t held = 0;
  int64_t most = 0;
  for (int number = 0; number < 3; ++number) {
    std::vector<unsigned> hooks;
    for (auto& parameter : model->parameters()) {
      hooks.push_back(parameter.register_hook([&](const at::Tensor&) { most = std::max(most, live() - before); }));
    }
    parallel.forward(x).sum().backward();
    for (size_t i = 0; i < hooks.size(); ++i) model->parameters()[i].remove_hook(hooks[i]);
    // libtorch's Gloo releases a tensor a moment after the operation has ended, on its own thread.
    held = live() - before;
    for (int tries = 0; tries < 200 && held > own + layer_bytes / 4; ++tries) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      held = live() - before;
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  EXPECT_LE(held, own + layer_bytes / 4) << "after backward: this rank's share";
  // During backward: the share, the buckets on their way, and the gradient that is being made.
  if (group().transport() == "host") {
    EXPECT_LE(most, own + 6 * layer_bytes);
  }
}

class CountingTransport : public Transport {
 public:
  explicit CountingTransport(std::shared_ptr<Transport> inner) : inner_(std::move(inner)) {}
  std::string name() const override { return inner_->name(); }
  at::Tensor allocate(int64_t numel, const at::TensorOptions& options) override {
    ++allocated;
    return inner_->allocate(numel, options);
  }
  std::unique_ptr<TransportWork> issue(const Call& call) override { return inner_->issue(call); }
  int64_t allocated = 0;

 private:
  std::shared_ptr<Transport> inner_;
};

TEST(ShardedDdp, SDP02_a_small_model_keeps_the_memory_of_buckets_on_their_way) {
  std::shared_ptr<CountingTransport> transport;
  const auto counted = with_transport(group(), [&](std::shared_ptr<Transport> inner) {
    return transport = std::make_shared<CountingTransport>(std::move(inner));
  });
  auto model = seeded(1);
  Reference reference(seeded(1));
  Sgd optimizer(model->parameters(), sgd, group());
  ShardedDataParallel parallel(model, optimizer, counted, {.reduce_buffer_size = 100});
  for (int64_t number = 0; number < 6; ++number) {
    step(parallel, {&optimizer}, number);
    reference.step(number);
    if (number == 1) transport->allocated = 0;  // buckets are rebuilt in the second step
  }
  EXPECT_EQ(transport->allocated, 0);
  EXPECT_LT(difference(model->parameters(), reference.model()->parameters()), 1e-12);
}

TEST(ShardedDdp, SDP02_buckets_on_their_way_use_each_others_memory_though_their_sizes_differ) {
  if (group().size() == 1 || group().transport() != "host") GTEST_SKIP() << "memory that ranks share";
  std::shared_ptr<CountingTransport> transport;
  const auto counted = with_transport(group(), [&](std::shared_ptr<Transport> inner) {
    return transport = std::make_shared<CountingTransport>(std::move(inner));
  });
  torch::manual_seed(1);
  torch::nn::Sequential model;
  const auto add = [&](int64_t in, int64_t out) {
    model->push_back(torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false)));
  };
  for (int64_t i = 0; i < 8; ++i) {
    add(768, 768);
    add(768, 384);
    add(384, 768);
  }
  Sgd optimizer(model->parameters(), torch::optim::SGDOptions(0.1), group());
  // A gradient has a bucket of its own: buckets of several owners would fill at the same time.
  ShardedDataParallel parallel(model, optimizer, counted, {.reduce_buffer_size = 1});
  for (int number = 0; number < 4; ++number) {
    transport->allocated = 0;
    parallel.forward(at::ones({1, 768})).sum().backward();
    optimizer.step();
    optimizer.zero_grad();
    if (number < 2) continue;  // buckets are rebuilt in the second step
    EXPECT_GE(transport->allocated, 1) << "no memory stays from step to step";
    EXPECT_LE(transport->allocated, 3) << "two buckets on their way, and one that fills";
  }
}

TEST(ShardedDdp, SDP03_buckets_are_small_where_ranks_share_memory) {
  torch::manual_seed(1);
  torch::nn::Sequential model;
  constexpr int64_t width = 512;  // 1 MiB a layer
  for (int64_t i = 0; i < 48; ++i) {
    model->push_back(torch::nn::Linear(torch::nn::LinearOptions(width, width).bias(false)));
  }
  const auto largest = [&](const ShardedDataParallelOptions& options) {
    Sgd optimizer(model->parameters(), torch::optim::SGDOptions(0.1), group());
    ShardedDataParallel parallel(model, optimizer, group(), options);
    size_t most = 0;
    for (const auto& bucket : parallel.buckets()) most = std::max(most, bucket.size());
    return most;
  };
  if (group().size() == 1) {
    EXPECT_EQ(largest({}), 1U) << "not grouped";
    return;
  }
  const auto quarter = static_cast<size_t>(48 / group().size() / 4);
  const bool shared = group().transport() == "host";
  EXPECT_EQ(largest({}), shared ? std::min<size_t>(4, quarter) : quarter);
  EXPECT_EQ(largest({.communication_hook = std::make_shared<SumHook>()}), quarter) << "the hook's buckets are large";
}

TEST(ShardedDdp, SDP03_buckets_hold_one_owners_gradients_up_to_the_cap) {
  auto log = std::make_shared<CallLog>();
  auto model = seeded(1);
  Sgd optimizer(model->parameters(), sgd, group());
  ShardedDataParallel parallel(model, optimizer, group().recorded(log), {.reduce_buffer_size = 300});
  const auto named = model->named_parameters();
  for (const auto& bucket : parallel.buckets()) {
    std::set<int> owners;
    for (const auto& name : bucket) owners.insert(optimizer.param_to_rank(named[name]));
    EXPECT_EQ(owners.size(), 1U);
  }
  step(parallel, {&optimizer}, 0);
  log->clear();
  mean_loss(parallel.forward(batch(group().rank(), 1))).backward();
  EXPECT_EQ(log->count(Op::reduce), static_cast<int64_t>(parallel.buckets().size()));
  int64_t numel = 0;
  for (const auto& parameter : model->parameters()) numel += parameter.numel();
  EXPECT_GE(log->bytes(Op::reduce), numel * 8);
  EXPECT_LE(log->bytes(Op::reduce), numel * 8 + 128 * 6) << "every gradient once, aligned to 128 bytes";
  EXPECT_EQ(log->count(Op::all_reduce), 1) << "who used what";
  EXPECT_EQ(log->bytes(Op::all_reduce), StepTrailer::numel(6) * 8);
}

// Layers that are used in the reverse order of their registration.
struct BackwardsImpl : torch::nn::Module {
  static constexpr int64_t layers = 12;
  BackwardsImpl() {
    for (int64_t i = 0; i < layers; ++i) {
      all.push_back(register_module("layer" + std::to_string(i),
                                    torch::nn::Linear(torch::nn::LinearOptions(12, 12).bias(false))));
    }
    to(at::kDouble);
  }
  at::Tensor forward(at::Tensor x) {
    for (auto layer = all.rbegin(); layer != all.rend(); ++layer) x = torch::tanh((*layer)(x));
    return x;
  }
  std::vector<torch::nn::Linear> all;
};

TEST(ShardedDdp, SDP10_buckets_leave_as_gradients_become_ready_and_owners_take_turns) {
  const auto make = [] {
    torch::manual_seed(1);
    return std::make_shared<BackwardsImpl>();
  };
  auto log = std::make_shared<CallLog>();
  auto model = make();
  Sgd optimizer(model->parameters(), sgd, group());
  ShardedDataParallel parallel(model, optimizer, group().recorded(log), {.reduce_buffer_size = 144});
  auto same = make();
  DistributedDataParallel ddp(same, group());
  torch::optim::SGD plain(same->parameters(), sgd);
  for (int64_t number = 0; number < 5; ++number) {
    log->clear();
    step(parallel, {&optimizer}, number);
    mean_loss(ddp.forward(batch(group().rank(), number))).backward();
    plain.step();
    plain.zero_grad();
  }
  std::vector<std::string> left;
  std::vector<int> owners;
  for (const auto& record : log->records()) {
    if (record.op != Op::reduce) continue;
    left.push_back(record.label.what);
    owners.push_back(optimizer.param_to_rank(model->all[left.size() - 1]->weight));
  }
  ASSERT_EQ(left.size(), model->all.size());
  for (size_t i = 0; i < left.size(); ++i) {
    EXPECT_EQ(left[i].substr(left[i].find("gradients")), "gradients of layer" + std::to_string(i) + ".weight")
        << "the last one used is ready first";
    for (size_t back = 1; back < static_cast<size_t>(group().size()) && back <= i; ++back) {
      EXPECT_NE(owners[i], owners[i - back]);
    }
  }
  for (size_t i = 0; i < model->all.size(); ++i) {
    if (group().transport() == "gloo") {
      EXPECT_LT(difference({model->all[i]->weight}, {same->all[i]->weight}), 1e-12);
    } else {
      EXPECT_TRUE(at::equal(model->all[i]->weight, same->all[i]->weight));
    }
  }
}

TEST(ShardedDdp, SDP04_reduce_fp16_halves_the_bytes_also_in_buckets) {
  auto log = std::make_shared<CallLog>();
  torch::manual_seed(1);
  Mlp model(12, 16, 5, at::kFloat);
  torch::manual_seed(1);
  Mlp reference(12, 16, 5, at::kFloat);
  Sgd optimizer(model->parameters(), sgd, group());
  ShardedDataParallel parallel(model, optimizer, group().recorded(log), {.reduce_fp16 = true});
  log->clear();
  mean_loss(parallel.forward(batch(group().rank(), 0).to(at::kFloat))).backward();
  int64_t numel = 0;
  for (const auto& parameter : model->parameters()) numel += parameter.numel();
  EXPECT_LE(log->bytes(Op::reduce), numel * 2 + 128 * 6);
  for (int rank = 0; rank < group().size(); ++rank) {
    (mean_loss(reference->forward(batch(rank, 0).to(at::kFloat))) / group().size()).backward();
  }
  for (size_t i = 0; i < model->parameters().size(); ++i) {
    if (optimizer.param_to_rank(model->parameters()[i]) != group().rank()) continue;
    const auto grad = model->parameters()[i].grad();
    EXPECT_LT(difference({grad}, {reference->parameters()[i].grad()}), 2e-3) << "11 bits";
  }
  EXPECT_NO_THROW(optimizer.step());
}

// One weight whose gradient is what the input says.
struct Scalar : torch::nn::Module {
  Scalar() : weight(register_parameter("weight", at::zeros({3}))) {}
  at::Tensor forward(const at::Tensor& x) { return (weight * x).sum(); }
  at::Tensor weight;
};

template <class Optimizer, class Defaults>
void expect_float32_gradients(const Defaults& defaults) {
  torch::manual_seed(1);
  Mlp model(12, 16, 5, at::kFloat);
  OSS<Optimizer> optimizer(model->parameters(), defaults, group());
  ShardedDataParallel parallel(model, optimizer, group(), {.reduce_fp16 = true});
  for (int64_t number = 0; number < 3; ++number) {
    mean_loss(parallel.forward(batch(group().rank(), number).to(at::kFloat))).backward();
    for (const auto& parameter : optimizer.local_params()) EXPECT_EQ(parameter.grad().scalar_type(), at::kFloat);
    optimizer.step();
    optimizer.zero_grad();
  }
}

TEST(ShardedDdp, SDP04_reduce_fp16_leaves_gradients_in_the_parameters_dtype_for_every_optimizer) {
  expect_float32_gradients<torch::optim::SGD>(sgd);
  expect_float32_gradients<FusedSGD>(sgd);
  expect_float32_gradients<FusedAdam>(torch::optim::AdamOptions(1e-2));
  expect_float32_gradients<FusedAdamW>(torch::optim::AdamWOptions(1e-2));
  expect_float32_gradients<FusedAdagrad>(torch::optim::AdagradOptions(1e-2));
  expect_float32_gradients<AccumAdam>(AccumAdamOptions(1e-2));
}

TEST(ShardedDdp, SDP04_reduce_fp16_overflows_where_the_mean_does_and_not_before) {
  auto model = std::make_shared<Scalar>();
  Sgd optimizer(model->parameters(), sgd, group());
  ShardedDataParallel parallel(model, optimizer, group(), {.reduce_fp16 = true});
  const double own = group().rank() == 0 ? 60000.0 * group().size() : 0;
  parallel.forward(at::full({3}, own)).backward();
  if (optimizer.local_params().empty()) return;
  EXPECT_TRUE(at::allclose(model->weight.grad(), at::full({3}, 60000.0), 1e-3));
}

TEST(ShardedDdp, SDP04_reduce_fp16_adds_micro_batches_up_in_the_parameters_dtype) {
  auto model = std::make_shared<Scalar>();
  Sgd optimizer(model->parameters(), sgd, group());
  ShardedDataParallel parallel(model, optimizer, group(), {.reduce_fp16 = true});
  {
    const auto scope = parallel.no_sync();
    parallel.forward(at::full({3}, 4.0)).backward();
    for (int i = 0; i < 99; ++i) parallel.forward(at::full({3}, 1e-3)).backward();
    EXPECT_EQ(model->weight.grad().scalar_type(), at::kFloat);
  }
  parallel.forward(at::full({3}, 1e-3)).backward();
  if (optimizer.local_params().empty()) return;
  EXPECT_TRUE(at::allclose(model->weight.grad(), at::full({3}, 4.1), 1e-3)) << model->weight.grad();
}

TEST(ShardedDdp, SDP04_reduce_fp16_and_a_communication_hook_are_refused_together) {
  auto model = seeded(1);
  Sgd optimizer(model->parameters(), sgd, group());
  const ShardedDataParallelOptions both{.communication_hook = std::make_shared<SumHook>(), .reduce_fp16 = true};
  EXPECT_THAT(refusal([&] { ShardedDataParallel(model, optimizer, group(), both); }),
              testing::HasSubstr("reduce_fp16 and communication_hook sum exclude each other"));
  const ShardedDataParallelOptions wide{.grad_reduce_in_fp32 = true, .reduce_fp16 = true};
  EXPECT_THAT(refusal([&] { wide.validate(); }),
              testing::HasSubstr("reduce_fp16 and grad_reduce_in_fp32 exclude each other"));
}

TEST(ShardedDdp, SDP03_no_bucket_exceeds_the_cap_unless_one_parameter_does) {
  for (const int64_t cap : {20, 100, 200, 300}) {
    auto model = seeded(1);
    Sgd optimizer(model->parameters(), sgd, group());
    ShardedDataParallel parallel(model, optimizer, group(), {.reduce_buffer_size = cap});
    const auto named = model->named_parameters();
    for (int64_t number = 0; number < 2; ++number) {
      for (const auto& bucket : parallel.buckets()) {
        int64_t numel = 0;
        for (const auto& name : bucket) numel += named[name].numel();
        EXPECT_TRUE(numel <= cap || bucket.size() == 1) << numel << " elements for a cap of " << cap;
      }
      step(parallel, {&optimizer}, number);  // buckets are rebuilt in the second step
    }
  }
}

TEST(ShardedDdp, SDP03_rank_0_says_how_large_model_shares_and_buckets_are) {
  for (const bool logged : {true, false}) {
    std::ostringstream said;
    auto* const standard = std::clog.rdbuf(said.rdbuf());
    auto model = seeded(1);
    Sgd optimizer(model->parameters(), sgd, group());
    ShardedDataParallel parallel(model, optimizer, group(), {.log_sizes = logged, .reduce_buffer_size = 300});
    std::clog.rdbuf(standard);
    if (!logged || group().rank() != 0) {
      EXPECT_EQ(said.str(), "");
    } else if (group().size() == 1) {
      EXPECT_THAT(said.str(), testing::HasSubstr("565 trainable elements on one rank; gradients are not grouped"));
    } else {
      EXPECT_THAT(said.str(), testing::HasSubstr("565 trainable elements, in shares of "));
      EXPECT_THAT(said.str(), testing::HasSubstr(std::to_string(parallel.buckets().size()) + " buckets of "));
    }
  }
}

TEST(ShardedDdp, SDP08_a_forward_names_an_optimizer_that_has_gone) {
  auto model = seeded(1);
  auto optimizer = std::make_unique<Sgd>(model->parameters(), torch::optim::SGDOptions(0.1), group());
  ShardedDataParallel parallel(model, *optimizer, group());
  mean_loss(parallel.forward(batch(group().rank(), 0))).backward();
  optimizer->step();
  optimizer.reset();
  EXPECT_THAT(refusal([&] { parallel.forward(batch(group().rank(), 1)); }),
              testing::HasSubstr("an OSS that it was made with is gone"));
  EXPECT_THAT(refusal([&] { parallel.refresh_trainable(); }), testing::HasSubstr("an OSS that it was made with"));
}

}  // namespace
}  // namespace shoal::test::sharded_ddp_buckets_test
