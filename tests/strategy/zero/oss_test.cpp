// OSS, rows OSS01 to OSS08: shards, and results of training. oss_state_test.cpp has the rest.

#include <gtest/gtest.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "shoal/error.h"
#include "shoal/optim.h"
#include "shoal/zero.h"
#include "tests/strategy/all/mean_gradients.h"

namespace shoal::test::oss_test {
namespace {

using torch::optim::OptimizerParamGroup;

int64_t numel_of(const std::vector<at::Tensor>& tensors) {
  return std::accumulate(tensors.begin(), tensors.end(), int64_t{0},
                         [](int64_t sum, const at::Tensor& tensor) { return sum + tensor.numel(); });
}

template <class Optimizer, class Defaults>
void expect_equal_to_unsharded(const Defaults& defaults) {
  auto model = seeded(1);
  auto reference = seeded(1);
  OSS<Optimizer> sharded(model->parameters(), defaults, group());
  Optimizer whole(reference->parameters(), defaults);
  for (int64_t step = 0; step < 5; ++step) {
    set_mean_gradients(model, step);
    set_mean_gradients(reference, step);
    sharded.step();
    whole.step();
    for (size_t i = 0; i < model->parameters().size(); ++i) {
      ASSERT_TRUE(at::equal(model->parameters()[i], reference->parameters()[i]))
          << "parameter " << i << " step " << step;
    }
  }
}

TEST(Oss, OSS01_every_optimizer_equals_the_unsharded_one_exactly) {
  expect_equal_to_unsharded<torch::optim::SGD>(torch::optim::SGDOptions(0.1));
  expect_equal_to_unsharded<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9).nesterov(true));
  expect_equal_to_unsharded<torch::optim::Adam>(torch::optim::AdamOptions(1e-2).amsgrad(true));
  expect_equal_to_unsharded<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2));
  expect_equal_to_unsharded<torch::optim::RMSprop>(torch::optim::RMSpropOptions(1e-2).centered(true));
  expect_equal_to_unsharded<torch::optim::Adagrad>(torch::optim::AdagradOptions(1e-2));
  expect_equal_to_unsharded<FusedAdamW>(torch::optim::AdamWOptions(1e-2));
  expect_equal_to_unsharded<Lamb>(LambOptions(1e-2));
}

class PickySgd : public torch::optim::SGD {
 public:
  PickySgd(const std::vector<OptimizerParamGroup>& groups, const torch::optim::SGDOptions& options)
      : SGD(groups, options) {
    if (options.momentum() > 0.5) throw std::invalid_argument("too much momentum");
  }
};

TEST(Oss, OSS01_an_optimizer_that_cannot_be_made_on_one_rank_is_a_usage_error_on_all) {
  auto model = seeded(1);
  const bool wrong = world().rank() == world().size() - 1;
  try {
    OSS<PickySgd> sharded(model->parameters(), torch::optim::SGDOptions(0.1).momentum(wrong ? 0.9 : 0.1), group());
    ADD_FAILURE() << "nothing was thrown";
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("too much momentum"), std::string::npos) << error.what();
  }
}

class FailingSgd : public torch::optim::SGD {
 public:
  using SGD::SGD;
  at::Tensor step(LossClosure) override {
    if (world().rank() == 0) throw std::runtime_error("the disk is full");
    return SGD::step();
  }
};

// The program of the rank that has failed goes on, so nothing else would tell the others.
TEST(Oss, OSS01_a_rank_whose_local_optimizer_throws_ends_the_step_of_all) {
  if (world().size() == 1) GTEST_SKIP() << "one rank waits for nobody";
  const auto own = fresh_group();
  auto model = seeded(1);
  OSS<FailingSgd> sharded(model->parameters(), torch::optim::SGDOptions(0.1), own);
  set_mean_gradients(model, 0);
  group().barrier().wait();  // a rank that is still in the constructor would get the error there
  const auto begin = Clock::now();
  if (world().rank() == 0) {
    EXPECT_THROW(sharded.step(), std::runtime_error);
  } else {
    try {
      sharded.step();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const CommError& error) {
      EXPECT_NE(std::string(error.what())
                    .find("rank 0 has failed: OSS: its local optimizer has failed in step(): the disk is full"),
                std::string::npos)
          << error.what();
    }
  }
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(4));
  EXPECT_THROW(own.barrier().wait(), CommError);
}

// The model is in float64; as the moments of a run in float32, or of a model with another head.
TEST(Oss, OSS04_loaded_state_takes_the_dtype_of_the_parameters_and_must_have_their_shape) {
  auto model = seeded(1);
  OSS<FusedAdamW> sharded(model->parameters(), torch::optim::AdamWOptions(0.1), group());
  set_mean_gradients(model, 0);
  sharded.step();
  auto state = sharded.state_dict(*model);
  auto rounded = state;
  for (auto& [name, entry] : rounded) {
    for (auto& [field, tensor] : entry.tensors) tensor = tensor.to(at::kFloat);
  }
  sharded.load_state_dict(*model, rounded);
  for (const auto& [name, entry] : sharded.state_dict(*model)) {
    for (const auto& [field, tensor] : entry.tensors) {
      EXPECT_EQ(tensor.scalar_type(), at::kDouble) << name << " " << field;
      EXPECT_TRUE(at::equal(tensor.to(at::kFloat), rounded.at(name).tensors.at(field))) << name << " " << field;
    }
  }
  for (auto& [name, entry] : state) entry.tensors.at("exp_avg") = at::zeros({1});
  EXPECT_THROW(sharded.load_state_dict(*model, state), UsageError);
  set_mean_gradients(model, 1);
  sharded.step();
}

TEST(Oss, OSS01_param_groups_keep_their_own_options) {
  auto model = seeded(1);
  auto reference = seeded(1);
  const auto groups = [](Mlp& of) {
    std::vector<OptimizerParamGroup> list;
    const auto all = of->parameters();
    list.emplace_back(std::vector<at::Tensor>(all.begin(), all.begin() + 2),
                      std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(1e-1).weight_decay(0.5)));
    list.emplace_back(std::vector<at::Tensor>(all.begin() + 2, all.end()));
    return list;
  };
  const torch::optim::AdamWOptions defaults(1e-2);
  OSS<torch::optim::AdamW> sharded(groups(model), defaults, group());
  torch::optim::AdamW whole(groups(reference), defaults);
  for (int64_t step = 0; step < 3; ++step) {
    set_mean_gradients(model, step);
    set_mean_gradients(reference, step);
    sharded.step();
    whole.step();
  }
  EXPECT_EQ(difference(model->parameters(), reference->parameters()), 0);
}

TEST(Oss, OSS02_shares_cover_all_parameters_once_and_are_balanced_within_the_largest) {
  auto model = seeded(1);
  OSS<torch::optim::SGD> optimizer(model->parameters(), torch::optim::SGDOptions(0.1), group());
  const auto shares = optimizer.partition();
  ASSERT_EQ(shares.size(), static_cast<size_t>(group().size()));
  int64_t most = 0;
  int64_t least = INT64_MAX;
  int64_t total = 0;
  for (size_t rank = 0; rank < shares.size(); ++rank) {
    const auto numel = numel_of(shares[rank]);
    most = std::max(most, numel);
    least = std::min(least, numel);
    total += numel;
    for (const auto& parameter : shares[rank]) EXPECT_EQ(optimizer.param_to_rank(parameter), static_cast<int>(rank));
  }
  EXPECT_EQ(total, numel_of(model->parameters()));
  EXPECT_LE(most - least, 16 * 16) << "the largest parameter";
  EXPECT_EQ(numel_of(optimizer.local_params()), numel_of(shares[group().rank()]));
  for (size_t i = 0; i < model->parameters().size(); ++i) {
    EXPECT_EQ(optimizer.param_to_index(model->parameters()[i]), i);
  }
  // The same on every rank.
  auto owners = at::empty({static_cast<int64_t>(model->parameters().size())}, at::kLong);
  for (size_t i = 0; i < model->parameters().size(); ++i) {
    owners[static_cast<int64_t>(i)] = optimizer.param_to_rank(model->parameters()[i]);
  }
  auto first = owners.clone();
  group().broadcast(first, 0).wait();
  EXPECT_TRUE(at::equal(owners, first));
  EXPECT_THROW(optimizer.param_to_rank(at::ones({2})), UsageError);
}

TEST(Oss, OSS03_owners_send_their_shares_where_memory_is_not_shared_and_nothing_where_it_is) {
  for (const int64_t cap : {-1, 64}) {
    auto log = std::make_shared<CallLog>();
    auto model = seeded(1);
    OSS<torch::optim::SGD> optimizer(model->parameters(), torch::optim::SGDOptions(0.1), group().recorded(log),
                                     {.broadcast_buffer_size = cap});
    set_mean_gradients(model, 0);
    log->clear();
    optimizer.step();
    const bool shared = group().transport() == "host";
    if (shared || group().size() == 1) {
      EXPECT_EQ(log->count(Op::broadcast), 0);
      EXPECT_EQ(log->count(Op::barrier), shared ? 1 : 0);
    } else {
      EXPECT_GE(log->bytes(Op::broadcast), numel_of(model->parameters()) * 8);
      EXPECT_LE(log->bytes(Op::broadcast), numel_of(model->parameters()) * 8 + 128 * 6) << "alignment";
      if (cap < 0) {
        EXPECT_EQ(log->count(Op::broadcast), group().size()) << "a rank's whole share in one";
      }
      for (const auto& record : log->records()) {
        if (cap > 0 && record.op == Op::broadcast) {
          EXPECT_LE(record.bytes, cap * 8);
        }
      }
    }
    for (const auto& parameter : model->parameters()) {
      auto first = parameter.detach().clone();
      group().broadcast(first, 0).wait();
      EXPECT_TRUE(at::equal(first, parameter));
    }
  }
}

TEST(Oss, OSS04_broadcast_fp16_halves_the_bytes_and_rounds_every_rank_alike) {
  auto log = std::make_shared<CallLog>();
  const auto make = [] {
    torch::manual_seed(1);
    auto model = Mlp(12, 16, 5, at::kFloat);
    for (const auto& parameter : model->parameters()) parameter.mutable_grad() = at::full_like(parameter, 1e-3);
    return model;
  };
  auto model = make();
  auto reference = make();
  OSS<torch::optim::SGD> optimizer(model->parameters(), torch::optim::SGDOptions(0.1), group().recorded(log),
                                   {.broadcast_fp16 = true});
  torch::optim::SGD whole(reference->parameters(), torch::optim::SGDOptions(0.1));
  const torch::NoGradGuard no_grad;
  const bool alone = group().size() == 1;  // nothing travels
  if (!alone) {
    for (const auto& parameter : reference->parameters()) parameter.copy_(parameter.to(at::kHalf));
  }
  log->clear();
  optimizer.step();
  whole.step();
  for (size_t i = 0; i < model->parameters().size(); ++i) {
    const auto want = reference->parameters()[i];
    EXPECT_TRUE(at::equal(model->parameters()[i], alone ? want : want.to(at::kHalf).to(at::kFloat))) << i;
  }
  if (group().transport() == "gloo") {
    EXPECT_LE(log->bytes(Op::broadcast), numel_of(model->parameters()) * 2 + 128 * 6);
  }
}

TEST(Oss, OSS06_a_param_group_may_be_added_later) {
  auto model = seeded(1);
  auto reference = seeded(1);
  const auto defaults = torch::optim::AdamOptions(1e-2);
  const auto first = [](Mlp& of) { return of->first->parameters(); };
  const auto rest = [](Mlp& of) {
    auto list = of->second->parameters();
    for (const auto& parameter : of->third->parameters()) list.push_back(parameter);
    return OptimizerParamGroup(list, std::make_unique<torch::optim::AdamOptions>(torch::optim::AdamOptions(1e-1)));
  };
  OSS<torch::optim::Adam> sharded(first(model), defaults, group());
  torch::optim::Adam whole(first(reference), defaults);
  for (int64_t step = 0; step < 4; ++step) {
    if (step == 2) {
      sharded.add_param_group(rest(model));
      whole.add_param_group(rest(reference));
    }
    set_mean_gradients(model, step);
    set_mean_gradients(reference, step);
    sharded.step();
    whole.step();
  }
  EXPECT_EQ(difference(model->parameters(), reference->parameters()), 0);
}

TEST(Oss, OSS08_a_group_may_be_a_part_of_the_world) {
  if (group().size() < 3) GTEST_SKIP() << "needs 3 ranks";
  if (group().rank() == 0 || group().rank() > 2) return;
  const auto part = group().subgroup({2, 1});
  auto model = seeded(1);
  OSS<torch::optim::SGD> optimizer(model->parameters(), torch::optim::SGDOptions(0.1), part);
  EXPECT_EQ(optimizer.partition().size(), 2U);
  EXPECT_EQ(optimizer.group().rank(), group().rank() == 2 ? 0 : 1);
  EXPECT_EQ(optimizer.group().world_rank(0), 2);
  auto reference = seeded(1);
  torch::optim::SGD whole(reference->parameters(), torch::optim::SGDOptions(0.1));
  set_mean_gradients(model, 0);
  set_mean_gradients(reference, 0);
  optimizer.step();
  whole.step();
  EXPECT_EQ(difference(model->parameters(), reference->parameters()), 0);
}

}  // namespace
}  // namespace shoal::test::oss_test
