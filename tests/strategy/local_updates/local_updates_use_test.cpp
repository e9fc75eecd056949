// LocalUpdates: kinds of parameters and buffers, checkpoints, wrong use (row BEY22).

#include <gmock/gmock.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "shoal/error.h"
#include "shoal/local_updates.h"
#include "tests/strategy/local_updates/local_updates_simulation.h"
#include "tests/support/refusal.h"
#include "tests/support/world.h"

namespace shoal::local_updates_use_test {
namespace {

using test::batch;
using test::difference;
using test::group;
using test::mean_loss;
using test::refusal;
using test::seeded;
using testing::HasSubstr;
using Options = LocalUpdatesOptions;

// Model with two names for one weight.
struct TiedImpl : torch::nn::Module {
  explicit TiedImpl(const at::Tensor& weight) { register_parameter("weight", weight); }
};

struct OddImpl : torch::nn::Module {
  OddImpl() {
    torch::manual_seed(11);
    tied = register_module("tied", torch::nn::Linear(torch::nn::LinearOptions(12, 12).bias(false)));
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 5, 2)));
    frozen = register_module("frozen", torch::nn::Linear(5, 5));
    scalar = register_parameter("scalar", at::full({}, 0.7));
    empty = register_parameter("empty", at::empty({0, 4}));
    never = register_parameter("never", at::ones({5}));
    own = register_parameter("own", at::ones({5}));
    to(at::kDouble);
    coarse = register_parameter("coarse", at::ones({5}, at::kFloat));
    coarsest = register_parameter("coarsest", at::ones({5}, at::kBFloat16));
    register_module("head", std::make_shared<TiedImpl>(tied->weight));
    for (auto& parameter : frozen->parameters()) parameter.requires_grad_(false);
    conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
    running = register_buffer("running", at::zeros({3}, at::kDouble));
    count = register_buffer("count", at::zeros({1}, at::kLong));
  }
  // Each dtype has its own term, so that their rounding is independent.
  at::Tensor forward(at::Tensor x) {
    const auto level = x.mean();
    x = torch::tanh(at::linear(torch::tanh(tied(x)), tied->weight.t()));
    x = torch::tanh(conv(x.view({-1, 3, 2, 2})).flatten(1));
    x = frozen(x) * scalar + own;
    return x.pow(2).mean() + empty.sum() + (coarse.to(at::kDouble) * level).pow(2).sum() +
           (coarsest.to(at::kDouble) * level).pow(2).sum();
  }
  std::vector<at::Tensor> trainable() const {
    std::vector<at::Tensor> list{tied->weight};
    for (const auto& item : named_parameters()) {
      const bool again = item.key() == "tied.weight" || item.key() == "head.weight";
      if (!again && item.value().requires_grad()) list.push_back(item.value());
    }
    return list;
  }

  torch::nn::Linear tied{nullptr}, frozen{nullptr};
  torch::nn::Conv2d conv{nullptr};
  at::Tensor scalar, empty, never, own, coarse, coarsest, running, count;
};

TEST(LocalUpdatesUse, BEY22_every_kind_of_parameter) {
  constexpr int64_t every = 3;
  const auto defaults = torch::optim::SGDOptions(0.05).momentum(0.9);
  for (const bool with_anchor : {false, true}) {
    const auto model = std::make_shared<OddImpl>();
    torch::optim::SGD optimizer(model->trainable(), defaults);
    Options options{.every = every, .fragments = 2, .ignored = {"own"}};
    if (with_anchor) options.outer = SlowMo{.slow_lr = 1, .slow_momentum = 0};
    LocalUpdates local(model, optimizer, group(), options);
    const auto fragments = local.fragments();
    std::vector<std::shared_ptr<OddImpl>> all;
    std::vector<std::unique_ptr<torch::optim::SGD>> optimizers;
    for (int rank = 0; rank < group().size(); ++rank) {
      all.push_back(std::make_shared<OddImpl>());
      optimizers.push_back(std::make_unique<torch::optim::SGD>(all.back()->trainable(), defaults));
    }
    for (int64_t step = 1; step <= 3 * every; ++step) {
      model->forward(batch(group().rank(), step)).backward();
      local.step();
      local.zero_grad();
      for (int rank = 0; rank < group().size(); ++rank) {
        all[rank]->forward(batch(rank, step)).backward();
        optimizers[rank]->step();
        optimizers[rank]->zero_grad();
      }
      const torch::NoGradGuard no_grad;
      for (size_t p = 0; p < fragments.size(); ++p) {
        if (step % every != (p == 0 ? 1 : 0)) continue;  // 3 / 2 and 3
        for (const auto& name : fragments[p]) {
          std::vector<at::Tensor> values;
          for (const auto& one : all) values.push_back(one->named_parameters()[name].to(at::kDouble));
          const auto mean = at::stack(values).mean(0);
          for (const auto& one : all) one->named_parameters()[name].copy_(mean);
        }
      }
    }
    const auto& want = all[group().rank()]->named_parameters();
    for (const auto& got : model->named_parameters()) {
      const auto dtype = got.value().scalar_type();
      const double allowed = dtype == at::kBFloat16 ? 2e-2 : dtype == at::kFloat ? 3e-6 : 1e-11;
      EXPECT_LE(difference({got.value()}, {want[got.key()]}), allowed) << got.key();
    }
    EXPECT_TRUE(model->conv->weight.is_contiguous(at::MemoryFormat::ChannelsLast));
    EXPECT_TRUE(model->tied->weight.is_same(model->named_parameters()["head.weight"]));
    size_t exchanged = 0;
    for (const auto& names : fragments) exchanged += names.size();
    EXPECT_EQ(exchanged, model->trainable().size() - 1) << "all but the ignored one, tied ones once";
  }
}

TEST(LocalUpdatesUse, BEY22_buffers_and_mean_parameters) {
  const auto model = std::make_shared<OddImpl>();
  torch::optim::SGD optimizer(model->trainable(), torch::optim::SGDOptions(0.05));
  LocalUpdates local(model, optimizer, group(), {.every = 3, .average_buffers = true});
  const double mean = 0.5 * (group().size() - 1);
  const torch::NoGradGuard no_grad;
  const auto differ = [&] {
    model->running.fill_(group().rank());
    model->count.fill_(group().rank());
    model->never.fill_(group().rank());
  };
  differ();
  {
    const auto scope = local.mean_parameters();
    EXPECT_NEAR(model->running[0].item<double>(), mean, 1e-12);
    EXPECT_NEAR(model->never[0].item<double>(), mean, 1e-12);
    EXPECT_EQ(model->count.item<int64_t>(), group().rank());
  }
  EXPECT_EQ(model->running[0].item<double>(), group().rank());
  EXPECT_EQ(model->never[0].item<double>(), group().rank());
  for (int step = 0; step < 3; ++step) {
    EXPECT_EQ(model->running[0].item<double>(), group().rank());
    local.step(/*update=*/false);
  }
  EXPECT_NEAR(model->running[0].item<double>(), mean, 1e-12);
  EXPECT_NEAR(model->never[0].item<double>(), mean, 1e-12);
  EXPECT_EQ(model->count.item<int64_t>(), group().rank()) << "integers stay";
}

TEST(LocalUpdatesUse, BEY22_masks_of_the_lowest_number_keep_their_bits) {
  const double lowest = std::numeric_limits<double>::lowest();
  for (const auto& outer : std::vector<decltype(Options::outer)>{Averaging{}, SlowMo{}, OuterNesterov{}}) {
    const auto model = std::make_shared<OddImpl>();
    torch::optim::SGD optimizer(model->trainable(), torch::optim::SGDOptions(0.05));
    LocalUpdates local(model, optimizer, group(), {.every = 1, .outer = outer, .average_buffers = true});
    const torch::NoGradGuard no_grad;
    model->running.fill_(lowest);
    model->never.fill_(0.1);
    const auto scale = model->never.clone();
    {
      const auto scope = local.mean_parameters();
      EXPECT_EQ(model->running.min().item<double>(), lowest);
    }
    local.step(/*update=*/false);
    EXPECT_EQ(model->running.min().item<double>(), lowest) << outer.index();
    EXPECT_EQ(model->running.max().item<double>(), lowest) << outer.index();
    if (group().transport() != "gloo") {
      EXPECT_TRUE(at::equal(model->never, scale)) << outer.index();
    }
  }
}

TEST(LocalUpdatesUse, BEY22_a_scope_of_the_mean_may_outlive_its_training) {
  auto model = seeded(1);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05));
  std::optional<LocalUpdates> local(std::in_place, model, optimizer, group(), Options{.every = 2});
  mean_loss(model->forward(batch(group().rank(), 0))).backward();
  local->step();
  const auto own = model->first->weight.detach().clone();
  {
    const auto scope = local->mean_parameters();
    local.reset();
  }
  EXPECT_TRUE(at::equal(model->first->weight, own));
}

TEST(LocalUpdatesUse, BEY22_an_exchange_may_drop_the_inner_state) {
  for (const bool reset : {false, true}) {
    auto model = seeded(1);
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
    LocalUpdates local(model, optimizer, group(), {.every = 2, .reset_optimizer = reset});
    for (int64_t step = 0; step < 2; ++step) {
      EXPECT_EQ(optimizer.state().size(), step * model->parameters().size());
      mean_loss(model->forward(batch(group().rank(), step))).backward();
      local.step();
    }
    EXPECT_EQ(optimizer.state().empty(), reset);
  }
}

// All methods, with an exchange in flight at every step.
std::vector<Options> resumed() {
  std::vector<Options> list;
  for (const auto& outer : std::vector<decltype(Options::outer)>{Averaging{}, SlowMo{}, OuterNesterov{}}) {
    list.push_back({.every = 4, .outer = outer, .fragments = 2, .delay = 3, .warmup_steps = 2});
  }
  return list;
}

TEST(LocalUpdatesUse, BEY22_goes_on_from_its_state_to_the_last_bit) {
  for (const auto& options : resumed()) {
    SCOPED_TRACE(options.outer.index());
    auto model = seeded(1);
    auto optimizer = test::two_rates(model);
    auto local = std::make_unique<LocalUpdates>(model, *optimizer, group(), options);
    auto other = seeded(1);
    const auto other_optimizer = test::two_rates(other);
    LocalUpdates uninterrupted(other, *other_optimizer, group(), options);
    for (int64_t step = 0; step < 20; ++step) {
      if (step == 1 || step == 9 || step == 12) {
        const auto state = local->state_dict();
        const bool in_flight = std::any_of(
            state.begin(), state.end(), [](const auto& entry) { return entry.second.tensors.count("in_flight") > 0; });
        EXPECT_EQ(in_flight, step > 1);
        const auto own = optimizer_state(*optimizer, *model);
        const auto old = model;
        model = seeded(99);
        auto fresh = test::two_rates(model);
        local = std::make_unique<LocalUpdates>(model, *fresh, group(), options);
        optimizer = std::move(fresh);
        const torch::NoGradGuard no_grad;
        for (size_t i = 0; i < old->parameters().size(); ++i) model->parameters()[i].copy_(old->parameters()[i]);
        load_optimizer_state(*optimizer, *model, own);
        local->load_state_dict(state);
        EXPECT_EQ(local->steps(), step);
      }
      for (auto* each : {&model, &other}) mean_loss((*each)->forward(batch(group().rank(), step))).backward();
      local->step();
      local->zero_grad();
      uninterrupted.step();
      uninterrupted.zero_grad();
      // Gloo's sums depend on a gradient's place in a bucket of the warm-up.
      ASSERT_LE(difference(model->parameters(), other->parameters()), group().transport() == "gloo" ? 1e-12 : 0)
          << step;
    }
  }
}

// Values that were loaded while an exchange is on its way are not mixed with it, also after a restart.
TEST(LocalUpdatesUse, BEY22_an_exchange_that_was_overtaken_stays_so_in_a_state) {
  auto model = seeded(1);
  const auto optimizer = test::two_rates(model);
  const Options options{.every = 4, .outer = OuterNesterov{}, .delay = 2};
  auto local = std::make_unique<LocalUpdates>(model, *optimizer, group(), options);
  const auto step = [&] {
    mean_loss(model->forward(batch(group().rank(), 0))).backward();
    local->step(/*update=*/false);
    local->zero_grad();
  };
  for (int i = 0; i < 4; ++i) step();
  local->before_loading();
  {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : model->parameters()) parameter.fill_(3);
  }
  local->parameters_loaded();
  step();
  const auto state = local->state_dict();
  local = std::make_unique<LocalUpdates>(model, *optimizer, group(), options);
  local->load_state_dict(state);
  for (int i = 0; i < 2; ++i) step();
  for (const auto& parameter : model->parameters()) EXPECT_TRUE((parameter == 3).all().item<bool>());
}

TEST(LocalUpdatesUse, BEY22_refuses_another_ones_state) {
  auto model = seeded(1);
  const auto optimizer = test::two_rates(model);
  const Options options{.every = 4, .outer = OuterNesterov{}, .delay = 2};
  LocalUpdates local(model, *optimizer, group(), options);
  for (int step = 0; step < 5; ++step) local.step(/*update=*/false);
  const auto state = local.state_dict();
  LocalUpdates fresh(model, *optimizer, group(), options);
  const auto refused = [&](const std::function<void(OptimizerState&)>& change) {
    auto wrong = state;
    change(wrong);
    const auto text = refusal([&] { fresh.load_state_dict(wrong); });
    EXPECT_EQ(fresh.steps(), 0);
    return text;
  };
  const std::string name = "second.weight";
  EXPECT_THAT(refused([&](auto& all) { all.erase(name); }), HasSubstr("no entry for parameter " + name));
  EXPECT_THAT(refused([&](auto& all) { all["fourth"] = all[name]; }), HasSubstr("fourth"));
  EXPECT_THAT(refused([&](auto& all) { all[name].tensors["anchor"] = at::zeros({2}); }), HasSubstr(name));
  EXPECT_THAT(refused([&](auto& all) { all[name].tensors.erase("in_flight"); }), HasSubstr("in_flight"));
  EXPECT_THAT(refused([&](auto& all) { all[name].numbers["step"] = 6; }), HasSubstr("step"));
  LocalUpdates at_once(model, *optimizer, group(), {.every = 4, .outer = OuterNesterov{}});
  EXPECT_THAT(refusal([&] { at_once.load_state_dict(state); }), HasSubstr("in_flight"));
  LocalUpdates averaging(model, *optimizer, group(), {.every = 4, .delay = 2});
  EXPECT_THAT(refusal([&] { averaging.load_state_dict(state); }), HasSubstr("anchor"));
  fresh.load_state_dict(state);
  EXPECT_EQ(fresh.steps(), 5);
}

TEST(LocalUpdatesUse, BEY22_wrong_options_are_listed_together) {
  auto model = seeded(1);
  const auto optimizer = test::two_rates(model);
  const auto error = [&](const Options& options) {
    return refusal([&] { LocalUpdates(model, *optimizer, group(), options); });
  };
  const auto all = error({.every = 0,
                          .outer = SlowMo{.slow_lr = 0, .slow_momentum = 1},
                          .fragments = 0,
                          .delay = -1,
                          .alpha = 1,
                          .warmup_steps = -1,
                          .reduce_dtype = at::kHalf});
  for (const auto* part : {"every is 0", "slow_lr is 0", "slow_momentum is 1", "fragments is 0", "delay is -1",
                           "alpha is 1", "warmup_steps is -1", "reduce_dtype is Half"}) {
    EXPECT_THAT(all, HasSubstr(part));
  }
  EXPECT_THAT(error({.outer = OuterNesterov{.lr = NAN, .momentum = -1}}), HasSubstr("momentum of OuterNesterov is -1"));
  EXPECT_THAT(error({.every = 4, .fragments = 5}), HasSubstr("fragments is 5"));
  EXPECT_THAT(error({.every = 4, .delay = 4}), HasSubstr("delay is 4"));
  EXPECT_THAT(error({.fragments = 7}), HasSubstr("6 trainable parameters"));
}

TEST(LocalUpdatesUse, BEY22_parameters_that_would_never_be_exchanged_are_refused) {
  auto model = seeded(1);
  torch::optim::SGD some(model->first->parameters(), torch::optim::SGDOptions(0.1));
  EXPECT_THAT(refusal([&] { LocalUpdates(model, some, group(), {}); }),
              HasSubstr("does not have parameter second.weight"));
  auto parameters = model->parameters();
  parameters.push_back(at::zeros({2}).requires_grad_());
  torch::optim::SGD more(parameters, torch::optim::SGDOptions(0.1));
  EXPECT_THAT(refusal([&] { LocalUpdates(model, more, group(), {}); }), HasSubstr("do not belong to the module"));
  model->third->bias.requires_grad_(false);
  const auto optimizer = test::two_rates(model);
  LocalUpdates local(model, *optimizer, group(), {});
  model->third->bias.requires_grad_(true);
  EXPECT_THAT(refusal([&] { local.step(); }), HasSubstr("third.bias"));
}

TEST(LocalUpdatesUse, BEY22_ranks_with_different_options_are_named) {
  if (group().size() == 1) GTEST_SKIP() << "one rank agrees with itself";
  auto model = seeded(1);
  const auto optimizer = test::two_rates(model);
  const bool odd = group().rank() == 1;
  const auto construct = [&](const Options& options) { LocalUpdates(model, *optimizer, group(), options); };
  EXPECT_THROW(construct({.every = odd ? 5 : 4}), DisagreeError);
  EXPECT_THROW(construct({.outer = OuterNesterov{.lr = odd ? 0.7 : 0.8}}), DisagreeError);
  EXPECT_THROW(construct(odd ? Options{.outer = SlowMo{}} : Options{}), DisagreeError);
  if (odd) test::lower_rates(*optimizer);
  EXPECT_THROW(construct({.outer = SlowMo{}}), DisagreeError);
  construct({});
}

// As by a schedule that reads each rank's own loss. Slow momentum would move theta on each rank in its own way.
TEST(LocalUpdatesUse, BEY22_rates_that_ranks_change_apart_are_named_where_slow_momentum_uses_them) {
  if (group().size() == 1) GTEST_SKIP() << "one rank agrees with itself";
  auto model = seeded(1);
  const auto optimizer = test::two_rates(model);
  LocalUpdates local(model, *optimizer, group(), {.every = 2, .outer = SlowMo{}});
  const auto step = [&](int64_t number) {
    local.zero_grad();
    mean_loss(model->forward(batch(group().rank(), number))).backward();
    local.step();
  };
  step(0);
  test::lower_rates(*optimizer);
  step(1);  // alike
  const auto set = [&](double rate) { optimizer->param_groups()[0].options().set_lr(rate); };
  constexpr double halfway = 0.1234567890125;  // of 12 digits
  set(group().rank() == 1 ? std::nextafter(halfway, 1) : std::nextafter(halfway, 0));
  step(2);
  step(3);  // but for the last bits
  if (group().rank() == 1) test::lower_rates(*optimizer);
  step(4);
  EXPECT_THAT(refusal<DisagreeError>([&] { step(5); }),
              testing::AllOf(HasSubstr("learning rates of LocalUpdates with SlowMo"), HasSubstr("rank 1 has")));
}

}  // namespace
}  // namespace shoal::local_updates_use_test
