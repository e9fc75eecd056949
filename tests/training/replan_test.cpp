// Change of strategy, precision and ranks between two steps, in memory (BEY15, ELA07).

#include <gmock/gmock.h>
#include <torch/nn/modules/batchnorm.h>

#include <numeric>
#include <set>

#include "shoal/schedules.h"
#include "shoal/training.h"
#include "tests/support/memory_meter.h"
#include "tests/support/models.h"
#include "tests/support/refusal.h"
#include "tests/support/shared_folder.h"
#include "tests/support/variants.h"
#include "tests/support/world.h"

namespace shoal::replan_test {
namespace {

using test::group;
using testing::HasSubstr;

// Tied and frozen weights, a buffer that training changes, and a parameter of a single element, which some ranks hold
// nothing of.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(at::ScalarType dtype = at::kFloat) {
    first = register_module("first", torch::nn::Linear(12, 16));
    norm = register_module("norm", torch::nn::BatchNorm1d(16));
    frozen = register_module("frozen", torch::nn::Linear(16, 16));
    tied = register_parameter("tied", first->weight);
    gain = register_parameter("gain", at::ones({1}));
    frozen->weight.set_requires_grad(false);
    to(dtype);
  }
  at::Tensor forward(at::Tensor x) { return gain * at::matmul(torch::tanh(frozen(norm(first(x)))), tied); }

  torch::nn::Linear first{nullptr}, frozen{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  at::Tensor tied, gain;
};

std::shared_ptr<NetImpl> net(int seed, at::ScalarType dtype = at::kFloat) {
  torch::manual_seed(seed);
  return std::make_shared<NetImpl>(dtype);
}

const StrategyOptions small{{"bucket_cap_mb", "0.0005"},   {"first_bucket_mb", "0.0005"}, {"bucket_size", "100"},
                            {"reduce_buffer_size", "100"}, {"unit_numel", "100"},         {"sync_every", "2"}};

OptimizerRecipe adamw() {
  return optimizer_recipe<FusedAdamW>(torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
}
OptimizerRecipe sgd() {
  return optimizer_recipe<FusedSGD>(torch::optim::SGDOptions(0.1).momentum(0.9));
}

TrainingOptions options_of(const std::string& strategy) {
  test::Variant chosen{strategy, {}};
  test::add_known(chosen, small);
  return {.options = chosen.options};
}

template <class Module>
void step(Training<Module>& training, int64_t number) {
  const auto x =
      test::batch(training->group().rank(), number).to(training.module()->parameters().front().scalar_type());
  training->backward(training.forward(x).to(at::kDouble).pow(2).mean());
  training->step();
  training->zero_grad();
}

template <class Module>
void steps(Training<Module>& training, int64_t from, int64_t to) {
  for (auto number = from; number < to; ++number) step(training, number);
}

// Parameters and buffers. Collective.
template <class Module>
std::vector<at::Tensor> whole(Training<Module>& training) {
  const auto scope = training->full_parameters();
  std::vector<at::Tensor> list;
  for (const auto& parameter : training.module()->parameters()) list.push_back(parameter.detach().clone());
  for (const auto& buffer : training.module()->buffers()) list.push_back(buffer.detach().clone());
  return list;
}

// Without the buffers. Collective.
std::vector<at::Tensor> parameters_of(Training<NetImpl>& training) {
  auto list = whole(training);
  list.resize(training.module()->parameters().size());
  return list;
}

void expect_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << "tensor " << i;
}

void expect_equal(const OptimizerState& a, const OptimizerState& b) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, entry] : a) {
    SCOPED_TRACE(name);
    ASSERT_TRUE(b.contains(name));
    EXPECT_EQ(entry.numbers, b.at(name).numbers);
    ASSERT_EQ(entry.tensors.size(), b.at(name).tensors.size());
    for (const auto& [field, tensor] : entry.tensors)
      EXPECT_TRUE(at::equal(tensor, b.at(name).tensors.at(field))) << field;
  }
}

// Over Gloo, sums of more than two ranks depend on the borders of buckets.
bool sums_in_rank_order() {
  return group().transport() != "gloo" || group().size() <= 2;
}

std::vector<at::Tensor> tensors_of(const OptimizerState& state) {
  std::vector<at::Tensor> list;
  for (const auto& [name, entry] : state) {
    for (const auto& [field, tensor] : entry.tensors) list.push_back(tensor);
  }
  return list;
}

// Parameters, buffers and the optimizer's state. Collective.
void expect_same_position(Training<test::MlpImpl>& a, Training<test::MlpImpl>& b) {
  const auto values = whole(a);
  const auto state = a->optimizer_state();
  EXPECT_FALSE(state.empty());
  if (sums_in_rank_order()) {
    expect_equal(values, whole(b));
    expect_equal(state, b->optimizer_state());
  } else {
    EXPECT_LT(test::difference(values, whole(b)), 1e-5);
    EXPECT_LT(test::difference(tensors_of(state), tensors_of(b->optimizer_state())), 1e-5);
  }
}

bool has_state(const Strategy& strategy) {
  if (strategy.pace == Pace::single) return group().size() == 1;
  return strategy.pace != Pace::alone;
}

class Chain : public testing::TestWithParam<bool> {};

// Before and after each switch, and at the end.
TEST_P(Chain, ELA07_ddp_zero1_fsdp_megatron_ddp_equals_the_uninterrupted_run) {
  const auto recipe = GetParam() ? adamw() : sgd();
  // Without batch norm, whose running means each rank has for itself where nobody broadcasts them.
  const auto start = [&] {
    torch::manual_seed(3);
    return make_training("ddp", test::Mlp(12, 16, 5, at::kFloat), recipe, group(), options_of("ddp"));
  };
  auto training = start();
  const auto parameters = training.module()->parameters();
  auto uninterrupted = start();
  const std::vector<std::string> strategies{"zero1", "fsdp", "megatron", "ddp"};
  for (size_t i = 0; i < strategies.size(); ++i) {
    SCOPED_TRACE(training->strategy().name + " -> " + strategies[i]);
    steps(training, 2 * i, 2 * i + 2);
    steps(uninterrupted, 2 * i, 2 * i + 2);
    expect_same_position(training, uninterrupted);
    const auto done = training.replan(strategies[i], options_of(strategies[i]));
    EXPECT_EQ(done.to, strategies[i]);
    EXPECT_EQ(done.ranks, group().size());
    EXPECT_TRUE(done.differences.empty()) << done.differences.front();
    EXPECT_EQ(training->strategy().name, strategies[i]);
    for (size_t p = 0; p < parameters.size(); ++p) {
      EXPECT_TRUE(parameters[p].is_same(training.module()->parameters()[p])) << "identity";
    }
    expect_same_position(training, uninterrupted);
  }
  steps(training, 8, 10);
  steps(uninterrupted, 8, 10);
  expect_same_position(training, uninterrupted);
}

INSTANTIATE_TEST_SUITE_P(Replan, Chain, testing::Bool(),
                         [](const auto& it) { return std::string(it.param ? "adamw" : "sgd_momentum"); });

class Pairs : public testing::TestWithParam<std::string> {};

// Over Gloo, where steps are slow, one of each kind.
bool is_looked_at(const std::string& strategy) {
  const std::set<std::string> kinds{"ddp", "zero2", "megatron", "fsdp", "hybrid", "diloco", "decentralized"};
  return group().transport() != "gloo" || kinds.contains(strategy);
}

TEST_P(Pairs, BEY15_equals_a_save_and_a_load) {
  if (group().size() > 2) return;
  if (!is_looked_at(GetParam())) return;
  if (!has_state(find_strategy(GetParam()))) return;  // local: see the refusals
  const test::SharedFolder folder;
  {
    auto training = make_training(GetParam(), net(3), adamw(), group(), options_of(GetParam()));
    steps(training, 0, 3);
    auto state = training->state();
    save(folder / "run", *state, {.step = 3});
  }
  const auto resumed = [&](const std::string& name) {
    auto training = make_training(name, net(4), adamw(), group(), options_of(name));
    auto state = training->state();
    load(folder / "run", *state);
    return training;
  };
  for (const auto& name : strategy_names()) {
    if (!has_state(find_strategy(name)) || !is_looked_at(name)) continue;
    if (group().size() == 1 && name != "none" && GetParam() != "none") continue;  // at 2 ranks
    SCOPED_TRACE(GetParam() + " -> " + name);
    auto training = resumed(GetParam());
    auto loaded = resumed(name);
    const auto done = training.replan(name, options_of(name));
    EXPECT_EQ(done.ranks_before, group().size());
    expect_equal(whole(training), whole(loaded));
    expect_equal(training->optimizer_state(), loaded->optimizer_state());
    EXPECT_EQ(training->optimizer().param_groups().front().options().get_lr(), 1e-2);
    steps(training, 3, 5);
    steps(loaded, 3, 5);
    expect_equal(whole(training), whole(loaded));
  }
}

INSTANTIATE_TEST_SUITE_P(Replan, Pairs, testing::ValuesIn(strategy_names()), [](const auto& it) { return it.param; });

// The group of these ranks, where this one is among them.
std::optional<Group> ranks_below(int size) {
  if (group().rank() >= size) return std::nullopt;
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return group().subgroup(ranks);
}

TEST(Replan, ELA07_the_number_of_ranks_changes_in_one_run) {
  if (group().size() < 3) return;
  const int most = group().size();
  using Names = std::vector<std::string>;
  for (const auto& names :
       {Names{"fsdp", "megatron", "zero1", "ddp"}, Names{"zero2", "fsdp", "decentralized", "fsdp_no_shard"},
        Names{"fsdp", "fsdp", "fsdp", "fsdp"}}) {
    const auto module = net(group().rank() < most ? 3 : 4);
    std::optional<Training<NetImpl>> training = make_training(names[0], module, adamw(), group(), options_of(names[0]));
    const std::vector<int> sizes{most, most - 1, most, most - 2};
    for (size_t i = 0; i < sizes.size(); ++i) {
      SCOPED_TRACE(names[i] + " at " + std::to_string(sizes[i]));
      if (i > 0) {
        std::vector<at::Tensor> before;
        OptimizerState state;
        if (training) {
          before = whole(*training);
          state = (*training)->optimizer_state();
        }
        const auto ranks = ranks_below(sizes[i]);
        const auto done = replan(training, names[i], module, adamw(), ranks, group(), options_of(names[i]));
        EXPECT_EQ(done.ranks_before, sizes[i - 1]);
        EXPECT_EQ(done.ranks, sizes[i]);
        ASSERT_EQ(training.has_value(), ranks.has_value());
        if (training) {
          const auto after = whole(*training);
          std::vector<std::string> texts;
          for (const auto& tensor : after) texts.push_back(std::to_string(tensor.to(at::kDouble).sum().item<double>()));
          agree(*ranks, "parameters after the change", texts);
          const bool mean = names[i - 1] == "decentralized";  // ranks have other values
          if (group().rank() == 0 && !mean) {
            expect_equal(after, before);
          }
          const auto now = (*training)->optimizer_state();
          if (group().rank() == 0 && !mean) expect_equal(now, state);
        }
      }
      if (training) steps(*training, 3 * i, 3 * i + 3);
      group().barrier().wait();
    }
  }
}

TEST(Replan, BEY15_precision_changes_with_exact_main_copies) {
  torch::manual_seed(3);
  auto training = make_training("ddp", test::Mlp(12, 16, 5, at::kFloat), adamw(), group());
  steps(training, 0, 2);
  const auto before = whole(training);
  const auto state = training->optimizer_state();
  auto options = TrainingOptions{.precision = precision_of("megatron", "bf16_mixed")};
  training.replan("megatron", options);
  EXPECT_EQ(training.module()->first->weight.scalar_type(), at::kBFloat16);
  training.replan("fsdp");
  EXPECT_EQ(training.module()->first->weight.scalar_type(), at::kBFloat16) << "bf16_mixed is the same there";
  training.replan("ddp", {.precision = Precision::float32()});
  expect_equal(whole(training), before);
  expect_equal(training->optimizer_state(), state);
  training.replan("fsdp", {.precision = precision_of("fsdp", "bf16_mixed")});
  steps(training, 2, 4);
  training.replan("zero1");
  EXPECT_EQ(training->precision().compute, at::kBFloat16) << "bf16_mixed is autocast there";
  EXPECT_EQ(training.module()->first->weight.scalar_type(), at::kFloat);
  steps(training, 4, 5);
  training.replan("ddp", {.precision = precision_of("ddp", "bf16_pure")});
  training.replan("fsdp");
  EXPECT_EQ(training.module()->first->weight.scalar_type(), at::kBFloat16) << "FSDP has no bf16_pure";
}

TEST(Replan, BEY15_the_loss_scaler_goes_over) {
  torch::manual_seed(3);
  auto training = make_training("ddp", test::Mlp(12, 16, 5, at::kFloat), adamw(), group(),
                                {.clip_grad = 0.5, .precision = precision_of("ddp", "fp16_mixed")});
  const auto scale_of = [&] { return training->scale_loss(at::ones({})).item<double>(); };
  const auto first = scale_of();
  for (int i = 0; i < 3; ++i) {
    auto infinite = training.forward(test::batch(group().rank(), i).to(at::kFloat)).sum() * INFINITY;
    training->backward(infinite);
    EXPECT_FALSE(training->step());
    training->zero_grad();
  }
  const auto scale = scale_of();
  EXPECT_LT(scale, first);
  for (const auto* name : {"megatron", "fsdp", "zero2", "ddp"}) {
    training.replan(name);
    EXPECT_EQ(scale_of(), scale) << name;
    step(training, 5);
  }
}

TEST(Replan, BEY15_a_schedule_moves_to_the_new_optimizer) {
  auto training = make_training("ddp", net(3), adamw(), group());
  std::unique_ptr<LambdaLR> schedule = std::make_unique<CosineWithWarmup>(
      training->optimizer(), CosineWithWarmupOptions{.total_steps = 10, .warmup_steps = 3});
  const auto rate = [&] { return training->optimizer().param_groups().front().options().get_lr(); };
  auto other = make_training("ddp", net(3), adamw(), group());
  CosineWithWarmup expected(other->optimizer(), {.total_steps = 10, .warmup_steps = 3});
  const std::vector<std::string> names{"fsdp", "megatron", "zero2", "local_sgd", "ddp"};
  for (size_t i = 0; i < names.size(); ++i) {
    step(training, i);
    schedule->step();
    expected.step();
    const auto before = rate();
    training.replan(names[i]);
    EXPECT_EQ(rate(), before) << "learning rates go over";
    schedule = schedule->on(training->optimizer());
    EXPECT_EQ(rate(), before);
    EXPECT_EQ(schedule->position(), expected.position());
    EXPECT_EQ(rate(), other->optimizer().param_groups().front().options().get_lr());
  }
  torch::optim::SGD two({torch::optim::OptimizerParamGroup({at::ones({1}, at::requires_grad())}),
                         torch::optim::OptimizerParamGroup({at::ones({1}, at::requires_grad())})},
                        0.1);
  EXPECT_THROW(static_cast<void>(schedule->on(two)), UsageError);
}

TEST(Replan, BEY15_twice_in_a_row_and_before_the_first_step) {
  auto training = make_training("fsdp", net(3), adamw(), group(), options_of("fsdp"));
  const auto before = whole(training);
  training.replan("zero1", options_of("zero1"));
  training.replan("megatron", options_of("megatron"));
  training.replan("megatron", options_of("megatron"));
  expect_equal(whole(training), before);
  steps(training, 0, 2);
  auto straight = make_training("megatron", net(3), adamw(), group(), options_of("megatron"));
  steps(straight, 0, 2);
  if (sums_in_rank_order()) expect_equal(whole(training), whole(straight));
}

TEST(Replan, BEY15_param_groups_keep_their_options) {
  const auto groups = [](const torch::nn::Module& module) {
    OptimizerRecipe::ParamGroups list;
    list.emplace_back(std::vector{module.named_parameters()["first.weight"], module.named_parameters()["gain"]});
    std::vector<at::Tensor> rest;
    for (const auto& entry : module.named_parameters()) {
      const bool listed = entry.key() == "first.weight" || entry.key() == "gain" || entry.key() == "tied";
      if (!listed && entry.value().requires_grad()) rest.push_back(entry.value());
    }
    list.emplace_back(rest);
    list.back().set_options(
        std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(5e-3).weight_decay(0)));
    return list;
  };
  const auto recipe = optimizer_recipe<FusedAdamW>(torch::optim::AdamWOptions(1e-2), groups);
  auto training = make_training("zero1", net(3), recipe, group(), options_of("zero1"));
  steps(training, 0, 1);
  training->optimizer().param_groups()[1].options().set_lr(4e-3);
  for (const auto* name : {"fsdp", "ddp", "megatron", "zero2"}) {
    training.replan(name, options_of(name));
    const auto& now = training->optimizer().param_groups();
    ASSERT_EQ(now.size(), 2U);
    EXPECT_EQ(now[0].options().get_lr(), 1e-2) << name;
    EXPECT_EQ(now[1].options().get_lr(), 4e-3) << name;
    EXPECT_EQ(static_cast<const torch::optim::AdamWOptions&>(now[1].options()).weight_decay(), 0) << name;
    step(training, 1);
  }
}

TEST(Replan, BEY15_what_shoal_ignores_stays_as_it_is) {
  auto options = options_of("ddp");
  options.ignored = {"frozen.weight", "frozen.bias"};
  auto training = make_training("ddp", net(3), adamw(), group(), options);
  auto& own = training.module()->frozen->weight;
  own.mutable_grad() = at::ones_like(own);
  const auto value = own.detach().clone();
  const auto* data = own.const_data_ptr();
  for (const auto* name : {"fsdp", "megatron", "ddp"}) {
    auto next = options_of(name);
    next.ignored = options.ignored;
    steps(training, 0, 1);
    training.replan(name, next);
    EXPECT_EQ(own.const_data_ptr(), data);
    EXPECT_TRUE(at::equal(own, value));
    EXPECT_TRUE(own.grad().defined());
  }
}

TEST(Replan, BEY15_optimizers_of_whole_parameters_need_a_strategy_that_has_them) {
  const auto lamb = optimizer_recipe<Lamb>(LambOptions(1e-2));
  auto training = make_training("zero1", net(3), lamb, group(), options_of("zero1"));
  auto straight = make_training("fsdp", net(3), lamb, group(), options_of("fsdp"));
  steps(training, 0, 2);
  training.replan("fsdp", options_of("fsdp"));
  steps(straight, 0, 2);
  if (sums_in_rank_order()) expect_equal(training->optimizer_state(), straight->optimizer_state());
  training.replan("megatron", options_of("megatron"));
  steps(training, 2, 3);
  steps(straight, 2, 3);
  if (sums_in_rank_order()) expect_equal(parameters_of(training), parameters_of(straight));
}

// A refusal leaves the training as it is.
TEST(Replan, BEY15_refusals_are_on_every_rank_and_change_nothing) {
  auto training = make_training("zero2", net(3), adamw(), group(), options_of("zero2"));
  steps(training, 0, 2);
  const auto before = parameters_of(training);
  const auto state = training->optimizer_state();
  const auto x = test::batch(group().rank(), 2).to(at::kFloat);
  const auto refused = [&](const auto& act) {
    const auto text = test::refusal<Error>(act);
    expect_equal(parameters_of(training), before);
    expect_equal(training->optimizer_state(), state);
    return text;
  };
  const auto to = [&](const std::string& name, const TrainingOptions& options = {}) {
    return refused([&] { training.replan(name, options); });
  };
  EXPECT_THAT(to("zero9"), HasSubstr("unknown strategy 'zero9'"));
  EXPECT_THAT(to("local"), HasSubstr("strategy local know nothing of each other"));
  EXPECT_THAT(to("ddp", {.options = {{"unit_numel", "5"}}}), HasSubstr("ddp does not have it"));
  EXPECT_THAT(to("ddp", {.clip_grad = -1}), HasSubstr("clip_grad -1"));
  EXPECT_THAT(refused([&] { training.replan("fsdp", {}, sgd()); }), HasSubstr("momentum_buffer"))
      << "state of another optimizer";
  TrainingOptions ignoring;
  ignoring.ignored = {"gain"};
  EXPECT_THAT(to("ddp", ignoring), HasSubstr("gain"));
  {
    const auto scope = training->no_sync(true);
    EXPECT_THAT(to("fsdp"), HasSubstr("within no_sync()"));
    training->backward(training.forward(x).sum());
  }
  const auto gradient = test::refusal([&] { training.replan("fsdp"); });
  EXPECT_THAT(gradient, HasSubstr("has a gradient, which would be lost"));
  training->zero_grad();
  training->backward(training.forward(x).sum());
  EXPECT_EQ(test::refusal([&] { training.replan("fsdp"); }).find("nothing"), std::string::npos) << "before step()";
  training->zero_grad();
  if (group().size() > 1) {
    const auto own = group().rank() == 0 ? "fsdp" : "ddp";
    EXPECT_THAT(to(own), HasSubstr("the arguments of replan: ranks disagree"));
    EXPECT_THAT(to(group().rank() == 0 ? "fsdp" : "zero9"), HasSubstr("unknown strategy 'zero9'"))
        << "on one rank alone";
    EXPECT_THAT(refused([&] { training.replan(group().rank() == 0 ? "fsdp" : "zero9"); }),
                HasSubstr("unknown strategy 'zero9'"));
  }
  training.replan("fsdp", options_of("fsdp"));
  expect_equal(training->optimizer_state(), state);
  {
    const auto scope = training->full_parameters();
    EXPECT_THAT(test::refusal([&] { training.replan("ddp"); }), HasSubstr("within full_parameters()"));
  }
  auto mean = make_training("decentralized", net(3), adamw(), group());
  {
    const auto scope = mean->full_parameters();
    EXPECT_THAT(test::refusal([&] { mean.replan("ddp"); }), HasSubstr("within full_parameters()"));
  }
  auto alone = make_training("local", net(3), adamw(), group());
  EXPECT_THAT(test::refusal([&] { alone.replan("ddp"); }), HasSubstr("strategy local know nothing of each other"));
}

// Beyond what the training has before: a copy of the rank's share of the parameters and the new state, which is two
// shares; a unit of parameters is whole, and sent, while it is sharded. Pages and buckets of the old strategy are gone by
// then.
TEST(Replan, BEY15_memory_is_a_share_of_the_parameters_and_the_new_state) {
  constexpr int64_t hidden = 1024;
  constexpr double unit = hidden * hidden * sizeof(float);
  torch::manual_seed(3);
  const TrainingOptions options{.options = {{"unit_numel", "1000"}}};
  auto training = make_training("fsdp", test::Mlp(12, hidden, 5, at::kFloat), adamw(), group(), options);
  double bytes = 0;
  for (const auto& parameter : training.module()->parameters()) bytes += parameter.numel() * sizeof(float);
  const auto share = bytes / group().size();
  step(training, 0);
  auto& meter = test::MemoryMeter::instance();
  training.replan("fsdp", options);  // the meter knows blocks from now on
  step(training, 1);
  meter.reset_peak();
  const auto before = meter.live();
  const auto done = training.replan("fsdp_grad_op", options);
  const auto extra = static_cast<double>(meter.peak() - before);
  EXPECT_LT(extra, 3 * share + 2 * unit + (1 << 20)) << "share " << share << ", unit " << unit;
  EXPECT_GT(extra, share / 2) << "the meter measures";
  EXPECT_LE(done.bytes, 3 * bytes);
}

TEST(Replan, BEY15_after_an_exception_in_a_step) {
  if (group().size() < 2) return;
  for (const auto* name : {"ddp", "zero2", "fsdp", "megatron"}) {
    SCOPED_TRACE(name);
    auto training = make_training(name, net(3), adamw(), group(), options_of(name));
    steps(training, 0, 2);
    const auto before = parameters_of(training);
    const auto x = test::batch(group().rank(), 2).to(at::kFloat);
    if (group().rank() == 1) {
      const auto loss = training.forward(x).pow(2).mean();
      const auto& weight = training.module()->first->weight;  // its gradient comes last
      const auto fault = [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("a fault in a hook"); };
      const auto hook = weight.register_hook(fault);
      EXPECT_THROW(training->backward(loss), std::exception);
      weight.remove_hook(hook);
    } else {
      EXPECT_THROW(training->backward(training.forward(x).pow(2).mean()), StepAbandoned);
    }
    for (const auto& parameter : training.module()->parameters()) EXPECT_FALSE(parameter.grad().defined());
    training.replan("zero1", options_of("zero1"));
    expect_equal(parameters_of(training), before);
    steps(training, 3, 4);
  }
}

}  // namespace
}  // namespace shoal::replan_test
