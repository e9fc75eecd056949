// Hooks that run when a parameter's gradient arrives, whatever becomes of the parameter.

#include "engine/gradients/gradient_hooks.h"

#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/serialize.h>

#include <sstream>
#include <string>
#include <vector>

#include "engine/gradients/graph_walk.h"

namespace shoal {
namespace {

// Record of the hooks' calls for a module's parameters, as "before 0", "after 0", with the value of grad() at that
// time.
class Teller {
 public:
  explicit Teller(const torch::nn::Module& module)
      : parameters_(module.parameters()),
        hooks_(
            parameters_, [this](size_t i) { note("after", i); }, [this](size_t i) { note("before", i); }) {}

  std::vector<std::string> told() { return std::exchange(told_, {}); }
  GradientHooks& hooks() { return hooks_; }

 private:
  void note(const char* when, size_t i) {
    told_.push_back(std::string(when) + " " + std::to_string(i) +
                    (parameters_[i].grad().defined() ? "" : " undefined"));
  }

  std::vector<at::Tensor> parameters_;
  std::vector<std::string> told_;
  GradientHooks hooks_;
};

torch::nn::Linear linear() {
  return torch::nn::Linear(torch::nn::LinearOptions(3, 2).bias(false));
}

at::Tensor loss(torch::nn::Linear& module) {
  const auto& weight = module->weight;
  return module(at::ones({1, 3}, weight.options().requires_grad(false))).sum();
}

const std::vector<std::string> first{"before 0 undefined", "after 0"};
const std::vector<std::string> further{"before 0", "after 0"};

TEST(GradientHooks, before_and_after_each_accumulation) {
  auto module = linear();
  Teller teller(*module);
  loss(module).backward();
  EXPECT_EQ(teller.told(), first);
  loss(module).backward();
  EXPECT_EQ(teller.told(), further);
}

TEST(GradientHooks, hold_when_a_parameter_is_replaced) {
  auto module = linear();
  Teller teller(*module);
  const auto replace_all_ways = [&](const std::function<void()>& replace) {
    loss(module).backward();
    module->zero_grad();
    teller.told();
    replace();
    loss(module).backward();
    EXPECT_EQ(teller.told(), first);
    loss(module).backward();
    EXPECT_EQ(teller.told(), further) << "and once each";
    module->zero_grad();
  };
  replace_all_ways([&] { module->to(at::kDouble); });
  replace_all_ways([&] {
    module->to(at::kFloat);
    loss(module);
    module->to(at::kDouble);
    module->to(at::kFloat);
  });
  replace_all_ways([&] { module->weight.set_data(at::ones({2, 3}, at::kDouble)); });
  replace_all_ways([&] {
    std::stringstream file;
    module->to(at::kFloat);
    torch::save(linear(), file);
    torch::load(module, file);
  });
}

// As PyTorch does where a program in Python registers its first hook of a tensor.
void register_as_python_does(const at::Tensor& parameter, const std::function<void()>& hook) {
  torch::autograd::impl::clear_hooks(parameter);
  torch::autograd::impl::add_hook(parameter, std::make_unique<BeforeNode>(hook));
}

TEST(GradientHooks, hold_when_a_hook_of_python_has_removed_them_and_the_parameter_is_replaced) {
  for (const bool before : {true, false}) {
    auto module = linear();
    int calls = 0;
    const auto count = [&] { ++calls; };
    if (before) register_as_python_does(module->weight, count);
    {
      Teller teller(*module), second(*module);
      const auto tells_after = [&](const std::function<void()>& restore) {
        register_as_python_does(module->weight, count);
        restore();
        module->to(at::kDouble);
        module->to(at::kFloat);
        for (int twice = 0; twice < 2; ++twice) {
          loss(module).backward();
          EXPECT_EQ(teller.told(), first);
          EXPECT_EQ(second.told(), first);
          module->zero_grad();
        }
      };
      tells_after([&] {
        teller.hooks().put_back();
        second.hooks().put_back();
      });
      register_as_python_does(module->weight, count);
      module->to(at::kDouble);
      teller.hooks().renew();
      second.hooks().renew();
      loss(module).backward();
      EXPECT_EQ(teller.told(), first);
      EXPECT_EQ(second.told(), first);
      module->zero_grad();
    }
    EXPECT_EQ(calls, 3);
    loss(module).backward();
    EXPECT_EQ(calls, 4) << "the program's hook stays";
    EXPECT_EQ(torch::autograd::impl::hooks(module->weight).size(), 1);
  }
}

TEST(GradientHooks, graphs_from_before_and_after_a_replacement_both_tell) {
  auto module = linear();
  Teller teller(*module);
  const auto before = loss(module);
  module->weight.set_data(at::ones({2, 3}, at::kDouble));
  const auto after = loss(module);
  after.backward();
  EXPECT_EQ(teller.told(), first);
  module->zero_grad();
  before.backward();
  EXPECT_EQ(teller.told(), first);
  module->zero_grad();
  loss(module).backward();
  EXPECT_EQ(teller.told(), first);
}

TEST(GradientHooks, autograd_grad_tells_nobody) {
  auto module = linear();
  Teller teller(*module);
  const auto gradients = torch::autograd::grad({loss(module)}, {module->weight});
  EXPECT_TRUE(gradients.front().defined());
  EXPECT_TRUE(teller.told().empty());
  EXPECT_FALSE(module->weight.grad().defined());
}

TEST(GradientHooks, hooks_of_others_work_and_stay_when_these_go) {
  auto module = linear();
  int tensor_hooks = 0, node_hooks = 0;
  module->weight.register_hook([&](const at::Tensor& gradient) {
    ++tensor_hooks;
    return gradient * 2;
  });
  {
    Teller teller(*module);
    const auto later = module->weight.register_hook([&](const at::Tensor&) { ++node_hooks; });
    loss(module).backward();
    EXPECT_EQ(teller.told(), first);
    EXPECT_EQ(module->weight.grad().sum().item<float>(), 12) << "a hook's changed gradient is what is accumulated";
    module->weight.remove_hook(later);
    loss(module).backward();
    EXPECT_EQ(teller.told(), further);
  }
  EXPECT_EQ(tensor_hooks, 2);
  EXPECT_EQ(node_hooks, 1);
  loss(module).backward();
  EXPECT_EQ(tensor_hooks, 3);
  EXPECT_EQ(module->weight.grad().sum().item<float>(), 36);
}

TEST(GradientHooks, many_wrappers_leave_nothing_behind) {
  auto module = linear();
  for (int i = 0; i < 100; ++i) const Teller gone(*module);
  const auto& list = torch::autograd::impl::materialize_autograd_meta(module->weight)->cpp_hooks_list_;
  EXPECT_TRUE(list->empty());
  const auto accumulator = torch::autograd::impl::grad_accumulator(module->weight);
  EXPECT_TRUE(accumulator->pre_hooks().empty());
  EXPECT_TRUE(accumulator->post_hooks().empty());
}

TEST(GraphWalk, finds_replaced_parameters) {
  auto module = linear();
  auto other = linear();
  Teller teller(*module), others(*other);
  module->to(at::kDouble);
  std::vector<bool> reached(1);
  mark_reachable({loss(module)}, teller.hooks().numbers(), reached);
  EXPECT_TRUE(reached[0]);
  reached[0] = false;
  mark_reachable({loss(module)}, others.hooks().numbers(), reached);
  EXPECT_FALSE(reached[0]);
}

}  // namespace
}  // namespace shoal
