// Named access to optimizer state: names as in Python's state dicts, shared tensors, training on from it.

#include "optim/state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adam.h>
#include <torch/optim/rmsprop.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "optim/named_options.h"
#include "shoal/error.h"
#include "shoal/optim.h"
#include "tests/support/refusal.h"

namespace shoal::state_test {
namespace {

using test::refusal;
using namespace torch::optim;
using testing::AllOf;
using testing::HasSubstr;

void train(Optimizer& optimizer, std::vector<at::Tensor>& parameters, int first, int last) {
  for (int step = first; step < last; ++step) {
    for (size_t i = 0; i < parameters.size(); ++i) {
      torch::manual_seed(10 * step + i);
      parameters[i].mutable_grad() = at::randn_like(parameters[i]);
    }
    optimizer.step();
  }
}

std::vector<at::Tensor> fresh() {
  return {at::ones({4, 3}).requires_grad_(true), at::full({5}, 2.0).requires_grad_(true)};
}

std::string names(const NamedState& named) {
  std::string all;
  for (const auto& [name, number] : named.numbers) all += name + " ";
  for (const auto& [name, tensor] : named.tensors) all += name + " ";
  return all;
}

// `expected`: the fields of the first parameter's state and, if it differs, of the second's.
// Trains, moves the state by name into a second optimizer, trains on, and compares with uninterrupted training.
template <class Type, class Options>
void carry(const Options& options, const std::vector<std::string>& expected) {
  auto whole = fresh(), half = fresh(), rest = fresh();
  Type uninterrupted(whole, options), first(half, options), second(rest, options);
  train(uninterrupted, whole, 0, 6);
  train(first, half, 0, 3);
  for (size_t i = 0; i < half.size(); ++i) {
    const auto named = named_state(*first.state().at(half[i].unsafeGetTensorImpl()));
    EXPECT_EQ(names(named), expected[std::min(i, expected.size() - 1)]);
    auto made = make_state(second, 0, named);
    const auto again = named_state(*made);
    EXPECT_EQ(again.numbers, named.numbers);
    for (const auto& [name, tensor] : named.tensors) EXPECT_TRUE(again.tensors.at(name).is_same(tensor)) << name;
    second.state()[rest[i].unsafeGetTensorImpl()] = std::move(made);
    at::NoGradGuard no_grad;
    rest[i].copy_(half[i]);
  }
  train(second, rest, 3, 6);
  for (size_t i = 0; i < rest.size(); ++i) EXPECT_TRUE(rest[i].equal(whole[i])) << i;
}

TEST(NamedState, OSS07_carries_libtorchs_optimizers) {
  carry<SGD>(SGDOptions(0.1).momentum(0.9), {"momentum_buffer "});
  carry<Adam>(AdamOptions(0.1), {"step exp_avg exp_avg_sq "});
  carry<Adam>(AdamOptions(0.1).amsgrad(true), {"step exp_avg exp_avg_sq max_exp_avg_sq "});
  carry<AdamW>(AdamWOptions(0.1), {"step exp_avg exp_avg_sq "});
  carry<RMSprop>(RMSpropOptions(0.1), {"step square_avg "});
  carry<RMSprop>(RMSpropOptions(0.1).momentum(0.9).centered(true), {"step grad_avg momentum_buffer square_avg "});
  carry<Adagrad>(AdagradOptions(0.1), {"step sum "});
}

TEST(NamedState, OSS07_carries_fused_optimizers) {
  carry<FusedSGD>(SGDOptions(0.1).momentum(0.9), {"momentum_buffer "});
  carry<FusedAdam>(AdamOptions(0.1).amsgrad(true), {"step exp_avg exp_avg_sq max_exp_avg_sq "});
  carry<FusedAdamW>(AdamWOptions(0.1), {"step exp_avg exp_avg_sq "});
  carry<FusedAdagrad>(AdagradOptions(0.1), {"step sum "});
}

TEST(NamedState, OSS07_carries_shoals_optimizers) {
  // Saved within a round of two steps, and of four.
  carry<AccumAdam>(AccumAdamOptions(0.1).accum_iter(2), {"step accum_grad exp_avg exp_avg_sq "});
  carry<AccumAdamW>(AccumAdamOptions(0.1), {"step accum_grad exp_avg exp_avg_sq "});
  carry<Lamb>(LambOptions(0.1), {"step exp_avg exp_avg_sq "});
  carry<Adafactor>(AdafactorOptions(0.1), {"step col_var row_var ", "step variance "});
  carry<Adafactor>(AdafactorOptions(0.1).beta1(0.9), {"step col_var exp_avg row_var ", "step exp_avg variance "});
  const Muon muon({at::ones({2, 2})});
  const auto named = named_state(MuonParamState().momentum_buffer(at::ones({2, 2})));
  EXPECT_EQ(names(named), "momentum_buffer ");
  EXPECT_EQ(names(named_state(*make_state(muon, 0, named))), "momentum_buffer ");
}

// SGD's state has a field of the same name as Muon's.
TEST(NamedState, the_param_group_says_whether_muon_or_adamw_keeps_a_state) {
  const auto matrix = at::ones({2, 2}), bias = at::ones({3});
  const MuonWithAdamW optimizer({OptimizerParamGroup({matrix}), OptimizerParamGroup({bias})});
  const NamedState momentum{.tensors = {{"momentum_buffer", at::ones({3})}}, .numbers = {}};
  const auto kept_of = [&](const at::Tensor& parameter) {
    return make_state(optimizer, param_group_of(optimizer, parameter.unsafeGetTensorImpl()), momentum);
  };
  EXPECT_NE(dynamic_cast<MuonParamState*>(kept_of(matrix).get()), nullptr);
  EXPECT_THAT(refusal([&] { kept_of(bias); }), HasSubstr("the state for shoal::FusedAdamW has no 'step'"));
}

TEST(NamedState, tensors_are_shared_not_copied) {
  auto parameters = fresh();
  FusedAdamW optimizer(parameters, AdamWOptions(0.1));
  train(optimizer, parameters, 0, 1);
  const auto& state = static_cast<AdamWParamState&>(*optimizer.state().at(parameters[0].unsafeGetTensorImpl()));
  named_state(state).tensors.at("exp_avg").fill_(7);
  EXPECT_TRUE(state.exp_avg().equal(at::full({4, 3}, 7.0)));
}

TEST(NamedState, missing_and_foreign_fields_are_named) {
  auto parameters = fresh();
  const Adam optimizer(parameters, AdamOptions(0.1));
  NamedState named{{{"exp_avg", at::ones(3)}, {"exp_avg_sq", at::ones(3)}}, {{"step", 4}}};
  EXPECT_EQ(refusal([&] { make_state(optimizer, 0, named); }), "nothing was refused");
  auto foreign = named;
  foreign.tensors["sum"] = at::ones(3);
  EXPECT_THAT(refusal([&] { make_state(optimizer, 0, foreign); }),
              AllOf(HasSubstr("'sum'"), HasSubstr("optim::Adam"), HasSubstr("or with other options")));
  foreign = named;
  foreign.numbers["epoch"] = 1;
  EXPECT_THAT(refusal([&] { make_state(optimizer, 0, foreign); }), HasSubstr("'epoch'"));
  auto lacking = named;
  lacking.tensors.erase("exp_avg");
  EXPECT_THAT(refusal([&] { make_state(optimizer, 0, lacking); }), HasSubstr("has no 'exp_avg'"));
  lacking = named;
  lacking.numbers.clear();
  EXPECT_THAT(refusal([&] { make_state(optimizer, 0, lacking); }), HasSubstr("has no 'step'"));
}

struct SignOptions : OptimizerCloneableOptions<SignOptions> {
  explicit SignOptions(double lr = 0.1) : lr_(lr) {}
  TORCH_ARG(double, lr);
};
struct SignParamState : OptimizerCloneableParamState<SignParamState> {
  TORCH_ARG(at::Tensor, mean);
  TORCH_ARG(double, factor) = 0.5;
};
// Optimizer that shoal does not know.
class Sign : public Optimizer {
 public:
  explicit Sign(std::vector<at::Tensor> parameters)
      : Optimizer(std::move(parameters), std::make_unique<SignOptions>()) {}
  at::Tensor step(LossClosure) override { return {}; }
};
class DerivedSign : public Sign {
 public:
  using Sign::Sign;
};

TEST(NamedState, unknown_optimizers_are_refused_until_registered) {
  const DerivedSign optimizer(fresh());
  SignParamState state;
  state.mean(at::ones(2));
  const NamedState named{{{"mean", state.mean()}}, {{"factor", 0.25}}};
  EXPECT_THAT(refusal([&] { named_state(state); }), AllOf(HasSubstr("SignParamState"), HasSubstr("register_state")));
  EXPECT_THAT(refusal([&] { make_state(optimizer, 0, named); }), AllOf(HasSubstr("Sign"), HasSubstr("register_state")));
  register_state<Sign, SignParamState>([](auto& of, auto& field) {
    field("mean", of.mean());
    field("factor", of.factor());
  });
  EXPECT_EQ(names(named_state(state)), "factor mean ");
  EXPECT_EQ(static_cast<SignParamState&>(*make_state(optimizer, 0, named)).factor(), 0.25);
}

struct CountedParamState : AdamParamState {
  TORCH_ARG(int64_t, count) = 0;
};
class CountedAdam : public Adam {
 public:
  using Adam::Adam;
};

TEST(NamedState, registered_classes_go_before_those_they_derive_from) {
  register_state<CountedAdam, CountedParamState>([](auto& state, auto& field) { field("count", state.count()); });
  const CountedAdam counted(fresh());
  const Adam adam(fresh());
  EXPECT_EQ(names(named_state(CountedParamState())), "count ");
  EXPECT_EQ(names(named_state(AdamParamState())), "step ");
  EXPECT_NO_THROW(make_state(counted, 0, {{}, {{"count", 1}}}));
  EXPECT_THROW(make_state(adam, 0, {{}, {{"count", 1}}}), UsageError);
}

// An optimizer of a program's own: values that TorchScript gives a type of their own, and an archive within.
struct ListsAndArchives : OptimizerCloneableOptions<ListsAndArchives> {
  double rate = 0.1;
  double inner = 7;
  std::vector<std::string> layers{"first", "second"};

  void serialize(torch::serialize::OutputArchive& archive) const override {
    archive.write("lr", c10::IValue(rate));
    archive.write("layers", c10::IValue(layers));
    torch::serialize::OutputArchive more(archive.compilation_unit());
    more.write("inner", c10::IValue(inner));
    archive.write("more", more);
  }
  void serialize(torch::serialize::InputArchive& archive) override {
    c10::IValue value;
    archive.read("lr", value);
    rate = value.toDouble();
    archive.read("layers", value);
    layers.clear();
    for (const auto& layer : value.toListRef()) layers.push_back(layer.toStringRef());
    torch::serialize::InputArchive more;
    archive.read("more", more);
    more.read("inner", value);
    inner = value.toDouble();
  }
};

TEST(NamedOptions, lists_and_archives_among_them_are_read_and_stay) {
  ListsAndArchives options;
  EXPECT_EQ(named_options(options)["lr"], 0.1);
  EXPECT_TRUE(named_options(options).contains("layers"));
  options.inner = 8;
  set_options(options, {{"lr", 0.2}});
  EXPECT_EQ(options.rate, 0.2);
  EXPECT_EQ(options.inner, 8);
  EXPECT_EQ(options.layers, (std::vector<std::string>{"first", "second"}));
}

}  // namespace
}  // namespace shoal::state_test
