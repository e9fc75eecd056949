// ShardedDataParallel: rows SDP01 to SDP12, beyond strategies_test.cpp, zoo_test.cpp and faults_test.cpp. Communication
// and memory are in sharded_ddp_buckets_test.cpp.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include "shoal/error.h"
#include "shoal/optim.h"
#include "tests/strategy/zero/sharded_ddp_training.h"
#include "tests/support/refusal.h"

namespace shoal::test::sharded_ddp_test {
namespace {

TEST(ShardedDdp, SDP01_several_optimizers_over_disjoint_parameters) {
  auto model = seeded(1);
  Reference reference(seeded(1));
  auto head = model->third->parameters();
  auto body = model->first->parameters();
  for (const auto& parameter : model->second->parameters()) body.push_back(parameter);
  Sgd first(body, sgd, group());
  Sgd second(head, sgd, group());
  ShardedDataParallel parallel(model, {&first, &second}, group());
  for (int64_t number = 0; number < 4; ++number) {
    step(parallel, {&first, &second}, number);
    reference.step(number);
  }
  EXPECT_LT(difference(model->parameters(), reference.model()->parameters()), 1e-12);
}

TEST(ShardedDdp, SDP01_a_parameter_in_two_optimizers_or_in_none_is_named) {
  auto model = seeded(1);
  const auto expect_refused = [&](const std::vector<OSSCore*>& optimizers, const std::string& because) {
    try {
      ShardedDataParallel parallel(model, optimizers, group());
      ADD_FAILURE() << because;
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find(because), std::string::npos) << error.what();
    }
  };
  Sgd body(model->first->parameters(), sgd, group());
  Sgd all(model->parameters(), sgd, group());
  expect_refused({&body}, "parameter second.weight belongs to no optimizer");
  expect_refused({&all, &body}, "parameter first.weight is in two optimizers");
  expect_refused({}, "at least one OSS");
  EXPECT_THROW((ShardedDataParallel(model, all, group(), {.reduce_buffer_size = 0})), UsageError);
}

TEST(ShardedDdp, SDP01_an_optimizer_over_the_ranks_in_another_order_is_refused) {
  if (group().size() < 2) GTEST_SKIP() << "needs 2 ranks";
  std::vector<int> reversed;
  for (int rank = group().size(); rank-- > 0;) reversed.push_back(rank);
  const auto other = group().subgroup(reversed);
  auto model = seeded(1);
  Sgd optimizer(model->parameters(), sgd, other);
  const auto said = refusal([&] { ShardedDataParallel(model, optimizer, group()); });
  EXPECT_THAT(said, testing::HasSubstr("give both the same ranks in the same order"));
  ShardedDataParallel parallel(model, optimizer, other);
  step(parallel, {&optimizer}, 0);
}

TEST(ShardedDdp, SDP02_gradients_stay_on_their_owners_alone) {
  auto model = seeded(1);
  Sgd optimizer(model->parameters(), sgd, group());
  ShardedDataParallel parallel(model, optimizer, group());
  for (int number = 0; number < 2; ++number) {
    optimizer.zero_grad();
    mean_loss(parallel.forward(batch(group().rank(), number))).backward();
    auto reference = seeded(1);
    for (int rank = 0; rank < group().size(); ++rank) {
      (mean_loss(reference->forward(batch(rank, number))) / group().size()).backward();
    }
    for (size_t i = 0; i < model->parameters().size(); ++i) {
      const auto parameter = model->parameters()[i];
      if (optimizer.param_to_rank(parameter) == group().rank()) {
        EXPECT_LT(difference({parameter.grad()}, {reference->parameters()[i].grad()}), 1e-12);
      } else {
        EXPECT_THROW(parameter.grad().sum(), UsageError) << "a stand-in";
      }
    }
  }
}

TEST(ShardedDdp, SDP06_freezing_and_unfreezing_is_noticed_at_the_next_forward) {
  for (const bool automatic : {true, false}) {
    auto model = seeded(1);
    Reference reference(seeded(1));
    Sgd optimizer(model->parameters(), sgd, group());
    ShardedDataParallel parallel(model, optimizer, group(), {.auto_refresh_trainable = automatic});
    int64_t number = 0;
    for (const bool trainable : {true, false, true}) {
      for (auto* of : {&model, &reference.model()}) {
        for (auto& parameter : (*of)->second->parameters()) {
          parameter.requires_grad_(trainable);
          parameter.mutable_grad().reset();
        }
      }
      if (!automatic) {
        optimizer.refresh_trainable();
        parallel.refresh_trainable();
      }
      for (int i = 0; i < 2; ++i, ++number) {
        step(parallel, {&optimizer}, number);
        reference.step(number);
      }
      if (!trainable) break;
    }
    EXPECT_LT(difference(model->parameters(), reference.model()->parameters()), 1e-12);
    for (auto& parameter : model->second->parameters()) parameter.requires_grad_(true);
    if (!automatic) {
      optimizer.refresh_trainable();
      parallel.refresh_trainable();
    }
    const auto before = model->second->weight.detach().clone();
    step(parallel, {&optimizer}, 10);
    EXPECT_FALSE(at::equal(before, model->second->weight)) << "trains again";
  }
}

using Adam = OSS<torch::optim::Adam>;

void freeze(Mlp& model, bool first, bool others) {
  for (auto& item : model->named_parameters()) {
    const bool of_first = item.key().rfind("first.", 0) == 0;
    item.value().requires_grad_(!(of_first ? first : others));
  }
}

// What is frozen changes in every step, as a GAN's two halves do.
TEST(ShardedDdp, SDP06_freezing_per_step_keeps_state_and_equals_one_process) {
  auto model = seeded(1);
  auto reference = seeded(1);
  const torch::optim::AdamOptions options(1e-2);
  Adam optimizer(model->parameters(), options, group());
  torch::optim::Adam whole(reference->parameters(), options);
  ShardedDataParallel parallel(model, optimizer, group());
  for (int64_t number = 0; number < 12; ++number) {
    const bool even = number % 2 == 0;
    freeze(model, even, !even);
    freeze(reference, even, !even);
    mean_loss(parallel.forward(batch(group().rank(), number))).backward();
    optimizer.step();
    optimizer.zero_grad();
    for (int rank = 0; rank < group().size(); ++rank) {
      (mean_loss(reference->forward(batch(rank, number))) / group().size()).backward();
    }
    whole.step();
    whole.zero_grad();
  }
  EXPECT_LT(difference(model->parameters(), reference->parameters()), 1e-12);
  freeze(model, false, false);
  EXPECT_EQ(optimizer.state_dict(*model).at("first.weight").numbers.at("step"), 6);
}

// Layers of one size, so that ranks own as many of them each.
struct TowerImpl : torch::nn::Module {
  explicit TowerImpl(int count) {
    for (int i = 0; i < count; ++i) {
      const auto name = "layer" + std::to_string(i);
      layers.push_back(register_module(name, torch::nn::Linear(torch::nn::LinearOptions(12, 12).bias(false))));
    }
    to(at::kDouble);
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = x + torch::tanh(layer(x));
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};

// A rank's whole share is frozen and another layer unfrozen, before the forward or between backward and step: balanced
// shares would have other owners, but the gradients are where backward has left them.
TEST(ShardedDdp, SDP06_OSS09_freezing_and_unfreezing_before_clipping_equals_one_process) {
  for (const bool after_backward : {false, true}) {
    SCOPED_TRACE(after_backward ? "after backward" : "before forward");
    const auto made = [] {
      torch::manual_seed(4);
      auto model = std::make_shared<TowerImpl>(1 + 3 * group().size());
      model->layers[0]->weight.requires_grad_(false);
      return model;
    };
    const auto model = made(), reference = made();
    const torch::optim::AdamOptions options(1e-2);
    Adam optimizer(model->parameters(), options, group());
    torch::optim::Adam whole(reference->parameters(), options);
    ShardedDataParallel parallel(model, optimizer, group());
    std::vector<bool> of_rank_0{true};
    for (size_t i = 1; i < model->layers.size(); ++i) {
      of_rank_0.push_back(optimizer.param_to_rank(model->layers[i]->weight) == 0);
    }
    const auto freeze_share = [&](bool frozen) {
      for (const auto& of : {model, reference}) {
        for (size_t i = 0; i < of_rank_0.size(); ++i) {
          if (of_rank_0[i]) of->layers[i]->weight.requires_grad_(i == 0 || !frozen);
        }
      }
    };
    for (int64_t number = 0; number < 6; ++number) {
      const auto change = [&] {
        if (number == 1 || number == 3) freeze_share(number == 1);
      };
      if (!after_backward) change();
      mean_loss(parallel.forward(batch(group().rank(), number))).backward();
      for (int rank = 0; rank < group().size(); ++rank) {
        (mean_loss(reference->forward(batch(rank, number))) / group().size()).backward();
      }
      if (after_backward) change();
      const double norm = torch::nn::utils::clip_grad_norm_(reference->parameters(), 0.01);
      EXPECT_GT(norm, 0.01) << "clipping takes part";
      EXPECT_NEAR(optimizer.clip_grad_norm(0.01), norm, 1e-12) << "step " << number;
      optimizer.step();
      optimizer.zero_grad();
      whole.step();
      whole.zero_grad();
    }
    EXPECT_LT(difference(model->parameters(), reference->parameters()), 1e-10);
  }
}

// Once every pattern has been seen, a switch makes nothing anew: one small agreement and one small sum.
TEST(ShardedDdp, SDP06_a_switch_back_moves_no_parameters_and_frozen_gradients_do_not_travel) {
  auto log = std::make_shared<CallLog>();
  const auto recorded = group().recorded(log);
  auto model = seeded(1);
  Adam optimizer(model->parameters(), torch::optim::AdamOptions(1e-2), recorded);
  ShardedDataParallel parallel(model, optimizer, recorded, {.reduce_buffer_size = 20});
  int64_t number = 0;
  const auto train = [&](bool even) {
    freeze(model, even, !even);
    mean_loss(parallel.forward(batch(group().rank(), number++))).backward();
    optimizer.step();
    optimizer.zero_grad();
  };
  for (int i = 0; i < 4; ++i) train(i % 2 == 0);
  log->clear();
  train(true);
  int64_t trained = 0;
  for (const auto& parameter : model->parameters()) trained += parameter.requires_grad() ? parameter.numel() : 0;
  EXPECT_LE(log->bytes(Op::reduce), trained * 8 + 128 * 6);
  if (group().transport() == "tcp" || group().transport() == "gloo") {
    EXPECT_LE(log->bytes(Op::broadcast), trained * 8 + 128 * 6) << "what is frozen is not sent";
  } else {
    EXPECT_EQ(log->bytes(Op::broadcast), 0);
  }
}

TEST(ShardedDdp, SDP06_a_model_that_is_all_frozen_passes_gradients_on) {
  auto generator = seeded(2);
  auto generator_alone = seeded(2);
  torch::manual_seed(1);
  Mlp critic(5, 16, 5);
  torch::manual_seed(1);
  Mlp critic_alone(5, 16, 5);
  const torch::optim::AdamOptions options(1e-2);
  Adam of_generator(generator->parameters(), options, group());
  Adam of_critic(critic->parameters(), options, group());
  ShardedDataParallel parallel_generator(generator, of_generator, group());
  ShardedDataParallel parallel_critic(critic, of_critic, group());
  torch::optim::Adam generator_optimizer(generator_alone->parameters(), options);
  torch::optim::Adam critic_optimizer(critic_alone->parameters(), options);
  const auto set = [](Mlp& of, bool trainable) {
    for (auto& parameter : of->parameters()) parameter.requires_grad_(trainable);
  };
  for (int64_t number = 0; number < 6; ++number) {
    const auto x = batch(group().rank(), number);
    of_critic.zero_grad();
    mean_loss(parallel_critic.forward(parallel_generator.forward(x).detach())).backward();
    of_critic.step();
    set(critic, false);
    of_generator.zero_grad();
    parallel_critic.forward(parallel_generator.forward(x)).mean().backward();
    of_generator.step();
    set(critic, true);

    critic_optimizer.zero_grad();
    for (int rank = 0; rank < group().size(); ++rank) {
      const auto fake = generator_alone->forward(batch(rank, number)).detach();
      (mean_loss(critic_alone->forward(fake)) / group().size()).backward();
    }
    critic_optimizer.step();
    set(critic_alone, false);
    generator_optimizer.zero_grad();
    for (int rank = 0; rank < group().size(); ++rank) {
      (critic_alone->forward(generator_alone->forward(batch(rank, number))).mean() / group().size()).backward();
    }
    generator_optimizer.step();
    set(critic_alone, true);
  }
  EXPECT_LT(difference(critic->parameters(), critic_alone->parameters()), 1e-12);
  EXPECT_LT(difference(generator->parameters(), generator_alone->parameters()), 1e-11);
}

TEST(ShardedDdp, SDP06_without_auto_refresh_a_change_is_refused_by_name_until_the_wrapper_is_refreshed) {
  auto model = seeded(1);
  Reference reference(seeded(1));
  Sgd optimizer(model->parameters(), sgd, group());
  ShardedDataParallel parallel(model, optimizer, group(), {.auto_refresh_trainable = false});
  int64_t number = 0;
  for (const bool frozen : {true, false, true}) {
    for (auto* of : {&model, &reference.model()}) freeze(*of, false, frozen);
    const auto said = refusal([&] { parallel.forward(batch(group().rank(), number)); });
    EXPECT_THAT(said, testing::HasSubstr(frozen ? "parameter second.weight has been frozen" : "has been unfrozen"));
    EXPECT_THAT(said, testing::HasSubstr("call refresh_trainable()"));
    parallel.refresh_trainable();
    for (int i = 0; i < 2; ++i, ++number) {
      step(parallel, {&optimizer}, number);
      reference.step(number);
    }
  }
  EXPECT_LT(difference(model->parameters(), reference.model()->parameters()), 1e-12);
}

TEST(ShardedDdp, SDP06_micro_batches_of_a_parameter_that_is_frozen_since_are_reduced) {
  auto model = seeded(1);
  auto reference = seeded(1);
  Sgd optimizer(model->parameters(), sgd, group());
  ShardedDataParallel parallel(model, optimizer, group());
  torch::optim::SGD whole(reference->parameters(), sgd);
  for (int64_t number = 0; number < 4; ++number) {
    {
      const auto scope = parallel.no_sync();
      mean_loss(parallel.forward(batch(group().rank(), number))).backward();
    }
    freeze(model, true, false);
    mean_loss(parallel.forward(batch(group().rank(), number, 1))).backward();
    optimizer.step();
    optimizer.zero_grad();
    freeze(model, false, false);
    for (int64_t micro = 0; micro < 2; ++micro) {
      freeze(reference, micro == 1, false);
      for (int rank = 0; rank < group().size(); ++rank) {
        (mean_loss(reference->forward(batch(rank, number, micro))) / group().size()).backward();
      }
    }
    freeze(reference, false, false);
    whole.step();
    whole.zero_grad();
  }
  EXPECT_LT(difference(model->parameters(), reference->parameters()), 1e-12);
}

TEST(ShardedDdp, SDP06_a_parameter_unfrozen_before_wrapping_joins_the_optimizer) {
  auto model = seeded(1);
  Reference reference(seeded(1));
  freeze(model, true, false);
  Sgd optimizer(model->parameters(), sgd, group());
  freeze(model, false, false);
  ShardedDataParallel parallel(model, optimizer, group());
  for (int64_t number = 0; number < 3; ++number) {
    step(parallel, {&optimizer}, number);
    reference.step(number);
  }
  EXPECT_LT(difference(model->parameters(), reference.model()->parameters()), 1e-12);
}

TEST(ShardedDdp, SDP08_parameters_on_several_device_types_are_refused_with_a_list) {
  auto model = seeded(1);
  Sgd optimizer(model->parameters(), sgd, group());
  model->register_parameter("elsewhere", at::empty({2}, at::TensorOptions(at::kMeta)), false);
  try {
    ShardedDataParallel parallel(model, optimizer, group());
    ADD_FAILURE();
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("CPU (first.weight), META (elsewhere)"), std::string::npos)
        << error.what();
  }
}

TEST(ShardedDdp, SDP10_runs_are_reproducible_to_the_last_bit) {
  std::vector<std::vector<at::Tensor>> runs;
  for (int run = 0; run < 3; ++run) {
    auto model = seeded(1);
    Sgd optimizer(model->parameters(), sgd, group());
    ShardedDataParallel parallel(model, optimizer, group(), {.reduce_buffer_size = 100});
    for (int64_t number = 0; number < 10; ++number) step(parallel, {&optimizer}, number);
    auto& run_result = runs.emplace_back();
    for (const auto& parameter : model->parameters()) run_result.push_back(parameter.detach().clone());
  }
  for (size_t i = 0; i < runs[0].size(); ++i) {
    EXPECT_TRUE(at::equal(runs[0][i], runs[1][i]) && at::equal(runs[0][i], runs[2][i]));
  }
}

// Only what owners have is compared.
void expect_own_gradients(const Mlp& model, const OSSCore& optimizer, const std::vector<at::Tensor>& want) {
  for (size_t i = 0; i < model->parameters().size(); ++i) {
    const auto parameter = model->parameters()[i];
    if (optimizer.param_to_rank(parameter) != group().rank()) continue;
    EXPECT_LT(difference({parameter.grad()}, {want[i]}), 1e-12) << i;
  }
}

TEST(ShardedDdp, SDP10_reduce_sums_up_what_no_sync_has_left) {
  auto model = seeded(1);
  Reference reference(seeded(1));
  Sgd optimizer(model->parameters(), sgd, group());
  ShardedDataParallel parallel(model, optimizer, group());
  for (int64_t number = 0; number < 4; ++number) {
    {
      const auto scope = parallel.no_sync();
      mean_loss(parallel.forward(batch(group().rank(), number))).backward();
      if (number == 2) parallel.reduce();
    }
    if (number != 2) parallel.reduce();
    parallel.reduce();  // nothing is left
    optimizer.step();
    optimizer.zero_grad();
    reference.step(number);
  }
  EXPECT_LT(difference(model->parameters(), reference.model()->parameters()), 1e-12);
}

TEST(ShardedDdp, SDP10_reduce_sums_up_gradients_that_were_set_by_hand_and_adds_to_sums) {
  auto model = seeded(1);
  auto reference = seeded(1);
  Sgd optimizer(model->parameters(), sgd, group());
  ShardedDataParallel parallel(model, optimizer, group());
  std::vector<at::Tensor> want;
  for (auto& parameter : model->parameters()) {
    parameter.mutable_grad() = at::full_like(parameter, group().rank() + 1.0).detach();
    want.push_back(at::full_like(parameter, (group().size() + 1) / 2.0));
  }
  parallel.reduce();
  expect_own_gradients(model, optimizer, want);
  {
    const auto scope = parallel.no_sync();
    mean_loss(parallel.forward(batch(group().rank(), 0))).backward();
  }
  parallel.reduce();
  for (int rank = 0; rank < group().size(); ++rank) {
    (mean_loss(reference->forward(batch(rank, 0))) / group().size()).backward();
  }
  for (size_t i = 0; i < want.size(); ++i) want[i] = want[i] + reference->parameters()[i].grad();
  expect_own_gradients(model, optimizer, want);
}

struct WordsImpl : torch::nn::Module {
  WordsImpl() {
    words = register_module("words", torch::nn::Embedding(torch::nn::EmbeddingOptions(10, 4).sparse(true)));
    last = register_module("last", torch::nn::Linear(4, 3));
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) { return last(words(x)); }
  torch::nn::Embedding words{nullptr};
  torch::nn::Linear last{nullptr};
};

TEST(ShardedDdp, SDP02_sparse_gradients_stay_on_their_owners_alone_and_add_up) {
  const auto make = [] {
    torch::manual_seed(1);
    return std::make_shared<WordsImpl>();
  };
  const auto ids = [](int rank, int64_t step) { return at::tensor({rank, 3, static_cast<int>(step) % 10}, at::kLong); };
  auto model = make();
  auto reference = make();
  const torch::optim::SGDOptions plain(0.1);
  Sgd optimizer(model->parameters(), plain, group());
  ShardedDataParallel parallel(model, optimizer, group());
  torch::optim::SGD whole(reference->parameters(), plain);
  for (int64_t number = 0; number < 6; ++number) {
    mean_loss(parallel.forward(ids(group().rank(), number))).backward();
    for (int rank = 0; rank < group().size(); ++rank) {
      (mean_loss(reference->forward(ids(rank, number))) / group().size()).backward();
    }
    const auto& grad = model->words->weight.grad();
    const bool owner = optimizer.param_to_rank(model->words->weight) == group().rank();
    EXPECT_EQ(grad.defined() && grad.is_sparse(), owner) << "elsewhere is no memory of it";
    if (number % 2 == 0) continue;  // the next backward adds to it
    optimizer.step();
    optimizer.zero_grad();
    whole.step();
    whole.zero_grad();
  }
  EXPECT_LT(difference(model->parameters(), reference->parameters()), 1e-12);
}

// Sums that are there when a parameter gets another owner go along, and are not added up again.
TEST(ShardedDdp, SDP06_sums_of_earlier_steps_move_with_their_parameters) {
  auto model = seeded(1);
  auto reference = seeded(1);
  Adam optimizer(model->parameters(), torch::optim::AdamOptions(1e-2), group());
  torch::optim::Adam whole(reference->parameters(), torch::optim::AdamOptions(1e-2));
  ShardedDataParallel parallel(model, optimizer, group());
  for (int64_t number = 0; number < 4; ++number) {
    const auto named = model->named_parameters();
    for (auto* of : {&model, &reference}) {
      for (auto& item : (*of)->named_parameters()) {  // rank 0's share, and what is left of the others'
        item.value().requires_grad_(number % 2 == 0 || optimizer.param_to_rank(named[item.key()]) != 0 ||
                                    group().size() == 1);
      }
    }
    parallel.refresh_trainable();
    mean_loss(parallel.forward(batch(group().rank(), number))).backward();
    for (int rank = 0; rank < group().size(); ++rank) {
      (mean_loss(reference->forward(batch(rank, number))) / group().size()).backward();
    }
    std::vector<at::Tensor> want;
    for (const auto& parameter : reference->parameters()) want.push_back(parameter.grad());
    expect_own_gradients(model, optimizer, want);
    optimizer.step();
    whole.step();
  }
  EXPECT_LT(difference(model->parameters(), reference->parameters()), 1e-12);
}

TEST(ShardedDdp, SDP11_zero_grad_in_place_and_a_change_of_dtype_keep_training_right) {
  auto model = seeded(1);
  Reference reference(seeded(1));
  Sgd optimizer(model->parameters(), sgd, group());
  ShardedDataParallel parallel(model, optimizer, group());
  for (int64_t number = 0; number < 3; ++number) {
    mean_loss(parallel.forward(batch(group().rank(), number))).backward();
    optimizer.step();
    optimizer.zero_grad(/*set_to_none=*/false);
    reference.step(number);
  }
  EXPECT_LT(difference(model->parameters(), reference.model()->parameters()), 1e-12);
  optimizer.zero_grad();
  model->to(at::kFloat);
  const auto before = model->first->weight.detach().clone();
  mean_loss(parallel.forward(batch(group().rank(), 3).to(at::kFloat))).backward();
  for (const auto& parameter : optimizer.local_params()) EXPECT_EQ(parameter.grad().scalar_type(), at::kFloat);
  EXPECT_EQ(model->first->weight.scalar_type(), at::kFloat);
}

// Every optimizer's state goes on after the parameters' dtype has changed; fused ones convert it.
template <class Optimizer, class Defaults>
void expect_training_after_a_change_of_dtype(const Defaults& defaults) {
  torch::manual_seed(1);
  Mlp model(12, 16, 5, at::kFloat);
  torch::manual_seed(1);
  Mlp reference(12, 16, 5, at::kFloat);
  OSS<Optimizer> optimizer(model->parameters(), defaults, group());
  ShardedDataParallel parallel(model, optimizer, group());
  Optimizer whole(reference->parameters(), defaults);
  for (int64_t number = 0; number < 6; ++number) {
    const auto dtype = number < 3 ? at::kFloat : at::kDouble;
    for (auto* of : {&model, &reference}) {
      if (number == 3) (*of)->to(dtype);
    }
    mean_loss(parallel.forward(batch(group().rank(), number).to(dtype))).backward();
    optimizer.step();
    optimizer.zero_grad();
    for (int rank = 0; rank < group().size(); ++rank) {
      (mean_loss(reference->forward(batch(rank, number).to(dtype))) / group().size()).backward();
    }
    whole.step();
    whole.zero_grad();
  }
  EXPECT_LT(difference(model->parameters(), reference->parameters()), 1e-4);
  for (const auto& parameter : model->parameters()) EXPECT_EQ(parameter.scalar_type(), at::kDouble);
}

TEST(ShardedDdp, SDP11_training_goes_on_after_a_change_of_dtype_with_every_optimizer) {
  expect_training_after_a_change_of_dtype<torch::optim::SGD>(sgd);
  expect_training_after_a_change_of_dtype<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-3));
  expect_training_after_a_change_of_dtype<FusedSGD>(sgd);
  expect_training_after_a_change_of_dtype<FusedAdam>(torch::optim::AdamOptions(1e-3));
  expect_training_after_a_change_of_dtype<FusedAdamW>(torch::optim::AdamWOptions(1e-3));
  expect_training_after_a_change_of_dtype<FusedAdagrad>(torch::optim::AdagradOptions(1e-3));
}

// Trainable parameters lie in memory that the optimizer shares, with rank 0's values; the option is about the rest.
TEST(ShardedDdp, SDP01_SDP07_without_sync_at_startup_frozen_parameters_and_buffers_stay_each_ranks_own) {
  for (const bool sync : {true, false}) {
    torch::manual_seed(group().rank());
    torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::BatchNorm1d(4), torch::nn::Linear(4, 4));
    auto frozen = model->parameters()[0];
    frozen.requires_grad_(false);
    model->named_buffers()["1.running_mean"].fill_(group().rank());
    const auto own = frozen.detach().clone();
    Sgd optimizer(model->parameters(), sgd, group());
    ShardedDataParallel parallel(model, optimizer, group(),
                                 {.broadcast_buffers = false, .sync_models_at_startup = sync});
    EXPECT_EQ(at::equal(frozen, own), !sync || group().rank() == 0);
    EXPECT_EQ(model->named_buffers()["1.running_mean"][0].item<double>(), sync ? 0 : group().rank());
    auto trainable = model->parameters()[4].detach().clone();
    group().broadcast(trainable, 0).wait();
    EXPECT_TRUE(at::equal(trainable, model->parameters()[4]));
  }
}

TEST(ShardedDdp, SDP07_rank_0s_values_and_buffers_reach_all_ranks) {
  torch::manual_seed(group().rank());
  torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::BatchNorm1d(4));
  Sgd optimizer(model->parameters(), sgd, group());
  ShardedDataParallel parallel(model, optimizer, group());
  const auto same = [&](const at::Tensor& tensor) {
    auto first = tensor.detach().clone();
    group().broadcast(first, 0).wait();
    return at::equal(first, tensor);
  };
  torch::manual_seed(0);
  torch::nn::Linear of_rank_0(4, 4);
  EXPECT_TRUE(at::equal(model->parameters()[0], of_rank_0->weight));
  parallel.forward(at::randn({8, 4}) + group().rank()).sum().backward();
  optimizer.zero_grad();
  const auto mean = model->named_buffers()["1.running_mean"];
  EXPECT_EQ(same(mean), group().rank() == 0) << "each rank has seen its own batch";
  auto expected = mean.clone();
  group().broadcast(expected, 0).wait();
  model->eval();
  parallel.forward(at::ones({2, 4})).sum().backward();
  EXPECT_TRUE(at::equal(mean, expected)) << "sent before forward";
}

}  // namespace
}  // namespace shoal::test::sharded_ddp_test
