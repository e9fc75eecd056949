// Sharded optimizers update float32 copies of 16-bit parameters, which follow what programs load and write.

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>

#include "shoal/fsdp.h"
#include "shoal/megatron.h"
#include "tests/strategy/all/replaced_tensors.h"

namespace shoal::test::replaced_copies_test {
namespace {

using namespace replaced_tensors;

template <class Make, class Parameters>
void expect_copies_follow(const Make& make, const Parameters& parameters_of, at::ScalarType file, double tolerance) {
  for (const bool in_place : {false, true}) {
    for (const int64_t step : {0, 2}) {
      SCOPED_TRACE((in_place ? "in place, step " : "loaded, step ") + std::to_string(step));
      const auto loaded = std::make_shared<NetImpl>(5, file);
      for (auto& parameter : loaded->parameters()) {  // no copy rounds to any of them by chance, and would stay
        parameter.data().add_(parameter.data().sign(), 0.75);
      }
      auto one = make(std::make_shared<NetImpl>(1, file));
      for (int64_t i = 0; i < step; ++i) one->train(i);
      auto& net = *one->model();
      for (size_t i = 0; i < net.parameters().size(); ++i) {
        auto parameter = net.parameters()[i];
        const auto values = loaded->parameters()[i].detach();
        if (in_place) {
          parameter.data().copy_(values);
        } else {
          parameter.set_data(values.clone());
        }
      }
      auto fresh_net = std::make_shared<NetImpl>(1, file);
      const torch::NoGradGuard no_grad;
      for (size_t i = 0; i < net.parameters().size(); ++i) {
        auto parameter = fresh_net->parameters()[i];
        // Values written to 16 bits are rounded.
        const auto values = loaded->parameters()[i].detach();
        parameter.copy_(in_place ? values.to(at::kBFloat16) : values);
      }
      auto fresh = make(fresh_net);
      const at::AutoGradMode grad(true);
      for (int64_t i = 5; i < 7; ++i) {
        one->train(i);
        fresh->train(i);
      }
      ASSERT_LE(difference(parameters_of(*one), parameters_of(*fresh)), tolerance);
    }
  }
}

// A write is noticed of a whole parameter or more.
template <class Training, class Parameters>
void expect_unwritten_copies_stay(Training& training, const Parameters& parameters_of) {
  for (int64_t step = 0; step < 2; ++step) training.train(step);
  const auto before = parameters_of(training);
  {
    const torch::NoGradGuard no_grad;
    training.model()->second->weight.data().view({-1}).narrow(0, 3, 1).fill_(2);
  }
  const auto after = parameters_of(training);
  int64_t changed = 0;
  for (size_t i = 0; i < before.size(); ++i) changed += (before[i] != after[i]).sum().template item<int64_t>();
  EXPECT_EQ(changed, 1);
}

struct Megatron16 {
  Megatron16(std::shared_ptr<NetImpl> net, bool in_grads, bool overlap)
      : net_(std::move(net)),
        optimizer_(net_, SGDOptions(0.05), group(),
                   {.overlap_param_gather = overlap,
                    .reuse_grad_buf_for_param_gather = in_grads,
                    .grad_reduce_in_fp32 = true}) {}
  NetImpl* model() { return net_.get(); }
  void train(int64_t step) {
    optimizer_.zero_grad();
    net_->forward(batch(group().rank(), step).to(at::kBFloat16)).pow(2).mean().backward();
    optimizer_.step();
  }
  OptimizerState state() { return optimizer_.state_dict(); }
  void load(const OptimizerState& state) { optimizer_.load_state_dict(state); }

 private:
  std::shared_ptr<NetImpl> net_;
  DistributedOptimizer<SGD> optimizer_;
};

std::vector<at::Tensor> mains(Megatron16& training) {
  std::vector<at::Tensor> list;
  for (auto& [name, state] : training.state()) list.push_back(state.tensors.at("main_param"));
  return list;
}

TEST(ReplacedTensors16, megatron_copies_follow) {
  for (const bool in_grads : {false, true}) {
    for (const bool overlap : {false, true}) {
      SCOPED_TRACE(std::string(in_grads ? "in gradients" : "in parameters") + (overlap ? ", late" : ""));
      expect_copies_follow(
          [&](std::shared_ptr<NetImpl> net) { return std::make_unique<Megatron16>(std::move(net), in_grads, overlap); },
          &mains, at::kBFloat16, 0);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(ReplacedTensors16, megatron_copies_of_what_was_not_written_stay_exact) {
  for (const bool in_grads : {false, true}) {
    SCOPED_TRACE(in_grads ? "in gradients" : "in parameters");
    Megatron16 training(std::make_shared<NetImpl>(1, at::kBFloat16), in_grads, /*overlap=*/false);
    expect_unwritten_copies_stay(training, &mains);
  }
}

TEST(ReplacedTensors16, megatron_copies_are_restored_whether_the_model_is_loaded_before_or_after) {
  for (const bool in_grads : {false, true}) {
    for (const bool model_first : {false, true}) {
      SCOPED_TRACE(std::string(in_grads ? "in gradients" : "in parameters") + (model_first ? ", model first" : ""));
      Megatron16 training(std::make_shared<NetImpl>(1, at::kBFloat16), in_grads, /*overlap=*/false);
      for (int64_t step = 0; step < 2; ++step) training.train(step);
      const auto state = training.state();
      const auto expected = mains(training);
      std::vector<at::Tensor> values;
      for (const auto& parameter : training.model()->parameters()) values.push_back(parameter.detach().clone());
      for (int64_t step = 2; step < 4; ++step) training.train(step);
      if (!model_first) training.load(state);
      for (size_t i = 0; i < values.size(); ++i) training.model()->parameters()[i].set_data(values[i].clone());
      if (model_first) training.load(state);
      EXPECT_EQ(difference(mains(training), expected), 0);
    }
  }
}

struct Fsdp16 {
  explicit Fsdp16(const std::shared_ptr<NetImpl>& net)
      : parallel_(net, group(), {.auto_wrap_policy = wrap_type<torch::nn::LinearImpl>(), .param_dtype = at::kBFloat16}),
        optimizer_(parallel_, SGDOptions(0.05)) {}
  NetImpl* model() { return parallel_.module().get(); }
  void train(int64_t step) {
    optimizer_.zero_grad();
    parallel_.forward(batch(group().rank(), step)).pow(2).mean().backward();
    optimizer_.step();
  }
  std::map<std::string, at::Tensor> state() { return parallel_.full_state_dict(); }

 private:
  FullyShardedDataParallel<NetImpl> parallel_;
  FullyShardedOptimizer<SGD> optimizer_;
};

std::vector<at::Tensor> whole_values(Fsdp16& training) {
  std::vector<at::Tensor> list;
  for (auto& [name, value] : training.state()) list.push_back(value);
  return list;
}

// A float32 file gives the copies full precision.
TEST(ReplacedTensors16, fsdp_copies_follow) {
  expect_copies_follow([](const std::shared_ptr<NetImpl>& net) { return std::make_unique<Fsdp16>(net); }, &whole_values,
                       at::kFloat, 0);
}

TEST(ReplacedTensors16, fsdp_copies_of_what_was_not_written_stay_exact) {
  Fsdp16 training(std::make_shared<NetImpl>(1, at::kFloat));
  expect_unwritten_copies_stay(training, &whole_values);
}

}  // namespace
}  // namespace shoal::test::replaced_copies_test
