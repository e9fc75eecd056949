// OSS: rows OSS01 to OSS10.

#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <numeric>

#include "shoal/base/error.h"
#include "shoal/optim/element_wise.h"
#include "shoal/optim/lamb.h"
#include "shoal/strategy/ddp.h"
#include "shoal/strategy/zero/oss.h"
#include "tests/support/models.h"
#include "tests/support/world.h"

namespace shoal {
namespace {

using test::batch;
using test::difference;
using test::mean_loss;
using test::Mlp;
using test::seeded;
using test::world;
using torch::optim::OptimizerParamGroup;

const Group& group() {
  return world().group();
}

int64_t numel_of(const std::vector<at::Tensor>& tensors) {
  return std::accumulate(tensors.begin(), tensors.end(), int64_t{0},
                         [](int64_t sum, const at::Tensor& tensor) { return sum + tensor.numel(); });
}

// The mean over ranks of the gradients of one step, on every rank, without communication.
void set_mean_gradients(Mlp& model, int64_t step) {
  auto copy = seeded(1);
  const torch::NoGradGuard no_grad;
  for (size_t i = 0; i < model->parameters().size(); ++i) copy->parameters()[i].copy_(model->parameters()[i]);
  {
    const at::AutoGradMode grad(true);
    for (int rank = 0; rank < group().size(); ++rank) {
      (mean_loss(copy->forward(batch(rank, step))) / group().size()).backward();
    }
  }
  for (size_t i = 0; i < model->parameters().size(); ++i) {
    model->parameters()[i].mutable_grad() = copy->parameters()[i].grad().clone();
  }
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

TEST(Oss, OSS05_unfreezing_in_mid_run_keeps_the_state_of_the_others) {
  auto model = seeded(1);
  auto reference = seeded(1);
  const auto freeze = [](Mlp& of, bool frozen) {
    for (auto& parameter : of->second->parameters()) parameter.requires_grad_(!frozen);
  };
  freeze(model, true);
  freeze(reference, true);
  const auto defaults = torch::optim::AdamOptions(1e-2);
  OSS<torch::optim::Adam> sharded(model->parameters(), defaults, group());
  torch::optim::Adam whole(reference->parameters(), defaults);
  const auto train = [&](int64_t begin, int64_t end) {
    for (int64_t step = begin; step < end; ++step) {
      set_mean_gradients(model, step);
      set_mean_gradients(reference, step);
      for (auto* of : {&model, &reference}) {
        for (const auto& parameter : (*of)->second->parameters()) {
          if (!parameter.requires_grad()) parameter.mutable_grad().reset();
        }
      }
      sharded.step();
      whole.step();
    }
  };
  train(0, 3);
  EXPECT_THROW(sharded.param_to_rank(model->second->weight), UsageError) << "frozen";
  freeze(model, false);
  freeze(reference, false);
  sharded.refresh_trainable();
  train(3, 6);
  EXPECT_EQ(difference(model->parameters(), reference->parameters()), 0);
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

TEST(Oss, OSS07_state_taken_at_one_number_of_ranks_goes_on_at_another) {
  const auto defaults = torch::optim::AdamWOptions(1e-2);
  auto model = seeded(1);
  auto reference = seeded(1);
  OSS<torch::optim::AdamW> sharded(model->parameters(), defaults, group());
  torch::optim::AdamW whole(reference->parameters(), defaults);
  for (int64_t step = 0; step < 3; ++step) {
    set_mean_gradients(model, step);
    set_mean_gradients(reference, step);
    sharded.step();
    whole.step();
  }
  const auto on_last = sharded.state_dict(*model, group().size() - 1);
  EXPECT_EQ(on_last.empty(), group().rank() + 1 != group().size());
  const auto state = sharded.state_dict(*model);
  const auto want = optimizer_state(whole, *reference);
  ASSERT_EQ(state.size(), want.size());
  for (const auto& [name, entry] : want) {
    for (const auto& [key, tensor] : entry.tensors) EXPECT_TRUE(at::equal(state.at(name).tensors.at(key), tensor));
    EXPECT_EQ(state.at(name).numbers, entry.numbers);
  }
  // On fewer ranks, and on one without OSS.
  const int fewer = std::max(1, group().size() / 2);
  set_mean_gradients(reference, 3);
  whole.step();
  auto values = model->parameters();
  const auto go_on = [&](auto& optimizer, Mlp& next) {
    set_mean_gradients(next, 3);
    optimizer.step();
    EXPECT_EQ(difference(next->parameters(), reference->parameters()), 0);
  };
  const auto copy = [&] {
    auto next = seeded(1);
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < values.size(); ++i) next->parameters()[i].copy_(values[i]);
    return next;
  };
  if (group().rank() < fewer) {
    std::vector<int> ranks(fewer);
    std::iota(ranks.begin(), ranks.end(), 0);
    const auto part = group().subgroup(ranks);
    auto next = copy();
    OSS<torch::optim::AdamW> again(next->parameters(), defaults, part);
    again.load_state_dict(*next, state);
    go_on(again, next);
  }
  auto next = copy();
  torch::optim::AdamW alone(next->parameters(), defaults);
  load_optimizer_state(alone, *next, state);
  go_on(alone, next);
}

TEST(Oss, OSS07_state_that_does_not_fit_is_refused_by_name) {
  auto model = seeded(1);
  OSS<torch::optim::Adam> optimizer(model->parameters(), torch::optim::AdamOptions(1e-2), group());
  set_mean_gradients(model, 0);
  optimizer.step();
  const auto good = optimizer.state_dict(*model);
  const auto expect_refused = [&](const OptimizerState& state, const std::string& because) {
    try {
      optimizer.load_state_dict(*model, state);
      ADD_FAILURE() << because;
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find(because), std::string::npos) << error.what();
    }
  };
  auto missing = good;
  missing.erase("second.bias");
  expect_refused(missing, "second.bias");
  auto extra = good;
  extra["fourth.weight"] = {};
  expect_refused(extra, "fourth.weight");
  auto shaped = good;
  shaped.at("third.weight").tensors.at("exp_avg") = at::zeros({16, 5}, at::kDouble);
  expect_refused(shaped, "third.weight");
  optimizer.load_state_dict(*model, good);
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

TEST(Oss, OSS09_clip_equals_the_unsharded_clip_for_every_norm) {
  for (const double norm_type : {1.0, 2.0, 3.5, std::numeric_limits<double>::infinity()}) {
    for (const double max_norm : {0.01, 100.0}) {
      auto model = seeded(1);
      auto reference = seeded(1);
      OSS<torch::optim::SGD> optimizer(model->parameters(), torch::optim::SGDOptions(0.1), group());
      set_mean_gradients(model, 0);
      set_mean_gradients(reference, 0);
      const double norm = optimizer.clip_grad_norm(max_norm, norm_type);
      EXPECT_NEAR(norm, torch::nn::utils::clip_grad_norm_(reference->parameters(), max_norm, norm_type), 1e-12 * norm);
      for (const auto& parameter : optimizer.local_params()) {
        const auto& all = model->parameters();
        const auto place =
            std::find_if(all.begin(), all.end(), [&](const at::Tensor& t) { return t.is_same(parameter); });
        EXPECT_LT(difference({parameter.grad()}, {reference->parameters()[place - all.begin()].grad()}), 1e-12);
      }
    }
  }
  auto model = seeded(1);
  OSS<torch::optim::SGD> optimizer(model->parameters(), torch::optim::SGDOptions(0.1), group());
  EXPECT_THROW(optimizer.clip_grad_norm(1, 0), UsageError);
}

TEST(Oss, OSS10_closures_and_schedulers_reach_the_shares) {
  auto model = seeded(1);
  auto reference = seeded(1);
  OSS<torch::optim::SGD> sharded(model->parameters(), torch::optim::SGDOptions(0.1), group());
  torch::optim::SGD whole(reference->parameters(), torch::optim::SGDOptions(0.1));
  torch::optim::StepLR schedule(sharded, 1, 0.5);
  torch::optim::StepLR reference_schedule(whole, 1, 0.5);
  for (int64_t step = 0; step < 4; ++step) {
    const auto loss = sharded.step([&] {
      EXPECT_TRUE(at::GradMode::is_enabled());
      set_mean_gradients(model, step);
      return at::scalar_tensor(static_cast<double>(step));
    });
    EXPECT_EQ(loss.item<double>(), static_cast<double>(step));
    set_mean_gradients(reference, step);
    whole.step();
    schedule.step();
    reference_schedule.step();
  }
  EXPECT_EQ(difference(model->parameters(), reference->parameters()), 0);
}

TEST(Oss, OSS10_inf_on_one_rank_only_is_skipped_by_all) {
  auto model = seeded(1);
  OSS<torch::optim::SGD> optimizer(model->parameters(), torch::optim::SGDOptions(0.1), group());
  GradScaler scaler({.initial_scale = 1024, .hysteresis = 1});
  const auto before = model->first->weight.detach().clone();
  set_mean_gradients(model, 0);
  const auto owner = optimizer.param_to_rank(model->first->weight);
  if (group().rank() == owner) model->first->weight.mutable_grad().fill_(std::numeric_limits<double>::infinity());
  EXPECT_FALSE(optimizer.step(scaler));
  EXPECT_EQ(scaler.value(), 512);
  EXPECT_TRUE(at::equal(model->first->weight, before));
  set_mean_gradients(model, 0);
  for (const auto& parameter : model->parameters()) parameter.mutable_grad().mul_(scaler.value());
  EXPECT_TRUE(optimizer.step(scaler));
  auto reference = seeded(1);
  torch::optim::SGD whole(reference->parameters(), torch::optim::SGDOptions(0.1));
  set_mean_gradients(reference, 0);
  whole.step();
  EXPECT_LT(difference(model->parameters(), reference->parameters()), 1e-12);
}

TEST(Oss, BadInputIsRefused) {
  auto model = seeded(1);
  const torch::optim::SGDOptions sgd(0.1);
  EXPECT_THROW((OSS<torch::optim::SGD>(model->parameters(), sgd, group(), {.broadcast_buffer_size = 0})), UsageError);
  std::vector<OptimizerParamGroup> twice;
  twice.emplace_back(model->parameters());
  twice.emplace_back(std::vector<at::Tensor>{model->first->weight});
  EXPECT_THROW((OSS<torch::optim::SGD>(twice, sgd, group())), std::exception);
  if (group().size() == 1) return;
  try {
    OSS<torch::optim::SGD> differs(model->parameters(), torch::optim::SGDOptions(0.1 * (1 + group().rank())), group());
    ADD_FAILURE() << "options that differ between ranks";
  } catch (const DisagreeError& error) {
    EXPECT_NE(std::string(error.what()).find("lr 0.1"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("lr 0.2"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace shoal
