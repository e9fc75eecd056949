// Parameters that are loaded, replaced or written after their module was wrapped: training continues as in one process
// that does the same, or is refused.

#include <gmock/gmock.h>
#include <torch/nn/init.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <map>
#include <numeric>
#include <set>
#include <sstream>

#include "shoal/decentralized.h"
#include "shoal/error.h"
#include "shoal/local_sgd.h"
#include "tests/support/models.h"
#include "tests/support/refusal.h"
#include "tests/support/training.h"
#include "tests/support/world.h"

namespace shoal::test::replaced_tensors_test {
namespace {

using testing::HasSubstr;
using torch::optim::SGD;
using torch::optim::SGDOptions;

// Model with a frozen parameter and a callback in the middle of forward.
struct NetImpl : MlpImpl {
  explicit NetImpl(int seed, at::ScalarType dtype = at::kDouble) : MlpImpl(12, 16, 5, dtype) {
    torch::manual_seed(seed);
    for (auto& parameter : parameters()) torch::nn::init::uniform_(parameter, -0.5, 0.5);
    first->bias.requires_grad_(false);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto hidden = torch::tanh(first(x));
    if (meanwhile) meanwhile(*this);
    return third(torch::tanh(second(hidden)));
  }
  std::function<void(NetImpl&)> meanwhile;
};
TORCH_MODULE(Net);

enum class When { before_forward, in_forward, before_backward, before_step };
using Change = std::function<void(NetImpl&)>;
struct Case {
  std::string name;
  Change change;
  std::set<When> when{When::before_forward, When::before_backward, When::before_step};
};

void load(NetImpl& net, int seed) {
  std::stringstream stream;
  torch::save(Net(seed), stream);
  Net holder(std::dynamic_pointer_cast<NetImpl>(net.shared_from_this()));
  torch::load(holder, stream);
}

at::Tensor other_values(const at::Tensor& like) {
  return at::linspace(-0.4, 0.3, like.numel(), like.options().requires_grad(false)).view(like.sizes());
}

const std::vector<Case>& cases() {
  static const std::vector<Case> list{
      {"torch::load", [](NetImpl& net) { load(net, 7); }},
      {"Module::load",
       [](NetImpl& net) {
         std::stringstream stream;
         torch::save(Net(8), stream);
         torch::serialize::InputArchive archive;
         archive.load_from(stream);
         net.load(archive);
       }},
      {"set_data of one",
       [](NetImpl& net) { net.second->weight.set_data(other_values(net.second->weight)); },
       {When::before_forward, When::in_forward, When::before_backward, When::before_step}},
      {"set_data of a frozen one",
       [](NetImpl& net) { net.first->bias.set_data(other_values(net.first->bias)); },
       {When::before_forward, When::before_step}},
      {"to float and back",
       [](NetImpl& net) {
         net.to(at::kFloat);
         net.to(at::kDouble);
       },
       {When::before_forward, When::before_step}},
      {"copy_",
       [](NetImpl& net) {
         const torch::NoGradGuard no_grad;
         net.third->weight.copy_(other_values(net.third->weight));
       },
       {When::before_forward, When::before_step}},
      {"mul_",
       [](NetImpl& net) {
         const torch::NoGradGuard no_grad;
         for (auto& parameter : net.parameters()) parameter.mul_(0.75);
       },
       {When::before_forward, When::before_step}},
      {"data().mul_",
       [](NetImpl& net) {
         for (auto& parameter : net.parameters()) parameter.data().mul_(0.5);
       }},
      {"data().fill_ of one", [](NetImpl& net) { net.third->bias.data().fill_(0.25); }},
      {"detach() and a view",
       [](NetImpl& net) { net.second->weight.detach().view({-1}).narrow(0, 3, 20).add_(0.125); },
       {When::before_forward, When::before_step}},
      {"init",
       [](NetImpl& net) {
         torch::manual_seed(11);
         torch::nn::init::normal_(net.first->weight, 0, 0.2);
         torch::nn::init::constant_(net.first->bias, 0.1);
       },
       {When::before_forward, When::before_step}},
      {"clamp_ twice",
       [](NetImpl& net) {
         const torch::NoGradGuard no_grad;
         net.second->weight.clamp_(-0.3, 0.3);
         net.second->weight.clamp_min_(-0.2);
       },
       {When::before_forward, When::before_step}},
      {"load, then write",
       [](NetImpl& net) {
         load(net, 9);
         const torch::NoGradGuard no_grad;
         net.second->bias.mul_(0.5);
       },
       {When::before_forward, When::before_step}},
      {"write, then load",
       [](NetImpl& net) {
         {
           const torch::NoGradGuard no_grad;
           net.second->bias.mul_(0.5);
         }
         load(net, 9);
       },
       {When::before_forward, When::before_step}},
  };
  return list;
}

class ReplacedTensors : public testing::TestWithParam<std::string> {
 public:
  static Training<NetImpl> training_of(std::shared_ptr<NetImpl> net, double bucket_mb = 0.002,
                                       bool find_unused_parameters = false) {
    return Training<NetImpl>::make<SGD>(GetParam(), std::move(net), group(), SGDOptions(0.05).momentum(0.9),
                                        {.find_unused_parameters = find_unused_parameters, .bucket_mb = bucket_mb});
  }
};

// One process on all ranks' samples.
struct OneProcess {
  explicit OneProcess(int seed)
      : net(std::make_shared<NetImpl>(seed)), optimizer(trainable(), SGDOptions(0.05).momentum(0.9)) {}
  std::vector<at::Tensor> trainable() const { return distinct(net->parameters()); }

  std::shared_ptr<NetImpl> net;
  SGD optimizer;
};

// Changes both, once, in a step. Compares after every step and, right after the change, the results of an evaluation.
void expect_like_one_process(Training<NetImpl>& training, OneProcess& one, const Change& change, When when,
                             int64_t changed_step) {
  const auto at_point = [&](NetImpl& net, When point, int64_t step) {
    if (when == point && step == changed_step) change(net);
  };
  for (int64_t step = 0; step < 4; ++step) {
    training.optimizer().zero_grad();
    training.zero_grad();
    one.optimizer.zero_grad();
    at_point(*training.model, When::before_forward, step);
    at_point(*one.net, When::before_forward, step);
    {
      const torch::NoGradGuard no_grad;
      const auto x = batch(0, 100 + step);
      ASSERT_LT(difference({training.forward(x)}, {one.net->forward(x)}), 1e-10) << "evaluation, step " << step;
    }
    if (when == When::in_forward && step == changed_step) training.model->meanwhile = change;
    const auto loss = mean_loss(training.forward(batch(group().rank(), step)));
    training.model->meanwhile = nullptr;
    if (when == When::in_forward && step == changed_step) one.net->meanwhile = change;
    at::Tensor whole = at::zeros({}, at::kDouble);
    for (int rank = 0; rank < group().size(); ++rank) {
      whole = whole + mean_loss(one.net->forward(batch(rank, step))) / group().size();
      one.net->meanwhile = nullptr;
    }
    at_point(*training.model, When::before_backward, step);
    at_point(*one.net, When::before_backward, step);
    try {
      whole.backward();
    } catch (const c10::Error&) {  // autograd itself refuses to go on with what was replaced: the graph has kept it
      ASSERT_EQ(when, When::before_backward);
      return;
    }
    loss.backward();
    at_point(*training.model, When::before_step, step);
    at_point(*one.net, When::before_step, step);
    training.step();
    one.optimizer.step();
    ASSERT_LT(difference(training.model->parameters(), one.net->parameters()), 1e-10) << "step " << step;
  }
}

const char* name_of(When when) {
  const std::map<When, const char*> names{{When::before_forward, "before forward"},
                                          {When::in_forward, "in forward"},
                                          {When::before_backward, "before backward"},
                                          {When::before_step, "before step"}};
  return names.at(when);
}

// Each change in the first and in the third step on 4 ranks and over sockets, in one of them elsewhere.
TEST_P(ReplacedTensors, training_goes_on_as_in_one_process) {
  const bool both = group().size() == 4 || group().transport() != "host";
  int number = group().size();
  for (const auto& [name, change, when] : cases()) {
    for (const auto point : when) {
      ++number;
      for (const int64_t step : {0, 2}) {
        if (!both && step != number % 2 * 2) continue;
        SCOPED_TRACE(name + ", " + name_of(point) + ", step " + std::to_string(step));
        auto training = training_of(std::make_shared<NetImpl>(1));
        OneProcess one(1);
        expect_like_one_process(training, one, change, point, step);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(ReplacedTensors, loading_in_every_step) {
  auto training = training_of(std::make_shared<NetImpl>(1));
  OneProcess one(1);
  for (int64_t step = 0; step < 3; ++step) {
    expect_like_one_process(
        training, one, [&](NetImpl& net) { load(net, 20 + static_cast<int>(step)); }, When::before_forward, step);
    if (HasFatalFailure()) return;
  }
}

// All biases are trained.
std::shared_ptr<NetImpl> trained_net() {
  auto net = std::make_shared<NetImpl>(1);
  net->first->bias.requires_grad_(true);
  return net;
}

void exchange(NetImpl& net) {
  const auto former = net.first->bias.data();
  net.first->bias.set_data(net.second->bias.data());
  net.second->bias.set_data(former);
  net.second->weight.set_data(net.second->weight.data().t());
}

TEST_P(ReplacedTensors, parameters_may_exchange_their_memory) {
  for (const double bucket_mb : {0.0001, 0.002, 1.0}) {
    for (const int64_t step : {0, 2}) {
      SCOPED_TRACE(fmt::format("buckets of {} MiB, step {}", bucket_mb, step));
      auto training = training_of(trained_net(), bucket_mb);
      OneProcess one(1);
      one.net->first->bias.requires_grad_(true);
      expect_like_one_process(training, one, exchange, step == 0 ? When::before_step : When::before_forward, step);
      if (HasFatalFailure()) return;
    }
  }
}

// As programs whose rank 0 keeps the best values so far, and writes to parameters in place afterwards.
TEST_P(ReplacedTensors, one_rank_may_keep_the_memory_of_parameters_that_are_replaced_and_written) {
  auto training = training_of(trained_net(), 0.0001);
  OneProcess one(1);
  one.net->first->bias.requires_grad_(true);
  std::vector<at::Tensor> kept;
  if (group().rank() == 0) {
    for (const auto& parameter : training.model->parameters()) kept.push_back(parameter.data());
  }
  const auto replace = [](NetImpl& net) {
    for (auto& parameter : net.parameters()) parameter.set_data(other_values(parameter));
  };
  const auto write = [](NetImpl& net) {
    const torch::NoGradGuard no_grad;
    net.first->weight.clamp_(-0.1, 0.1);
  };
  for (const auto& change : {Change(replace), Change(write), Change(write)}) {
    expect_like_one_process(training, one, change, When::before_forward, 0);
    if (HasFatalFailure()) return;
  }
}

TEST_P(ReplacedTensors, a_parameter_that_gets_the_memory_of_another_is_refused_by_name) {
  const bool by_number = GetParam().starts_with("zero");
  if (GetParam() == "ddp" || (by_number && group().size() == 1)) return;  // nothing has moved: it follows the other
  for (const double bucket_mb : {0.0001, 1.0}) {
    auto training = training_of(trained_net(), bucket_mb);
    OneProcess one(1);
    one.net->first->bias.requires_grad_(true);
    expect_like_one_process(
        training, one, [](NetImpl&) {}, When::before_step, 0);
    training.model->second->bias.set_data(training.model->first->bias.data());
    training.zero_grad();
    const auto text = refusal([&] {
      mean_loss(training.forward(batch(group().rank(), 9))).backward();
      training.step();
    });
    EXPECT_THAT(text,
                testing::AllOf(HasSubstr(by_number ? "parameter 1 and parameter 3" : "first.bias and second.bias"),
                               HasSubstr("on the same memory"), HasSubstr("clone()")));
    for (auto* net : {training.model.get(), one.net.get()}) {
      net->second->bias.set_data(net->first->bias.data().clone());
    }
    expect_like_one_process(
        training, one, [](NetImpl&) {}, When::before_step, 0);
    if (HasFatalFailure()) return;
  }
}

TEST_P(ReplacedTensors, other_values_on_each_rank_are_named) {
  if (group().size() == 1) GTEST_SKIP() << "one rank agrees with itself";
  for (const bool in_place : {false, true}) {
    if (in_place && GetParam() == "ddp") continue;  // whose parameters any optimizer writes
    auto training = training_of(std::make_shared<NetImpl>(1));
    auto& weight = training.model->second->weight;
    const auto own = other_values(weight) * (1 + group().rank());
    if (in_place) {
      weight.data().copy_(own);
    } else {
      weight.set_data(own);
    }
    const auto text = refusal<DisagreeError>([&] {
      mean_loss(training.forward(batch(group().rank(), 0))).backward();
      training.step();
    });
    const bool by_number = GetParam().starts_with("zero") && in_place;  // an optimizer knows no names
    EXPECT_THAT(text, HasSubstr(by_number ? "parameter 2 [16, 16]" : "second.weight")) << in_place;
    EXPECT_THAT(text, HasSubstr("the same")) << in_place;
  }
}

TEST_P(ReplacedTensors, another_dtype_trains_on_or_is_refused_by_name) {
  auto training = training_of(std::make_shared<NetImpl>(1));
  OneProcess one(1);
  expect_like_one_process(
      training, one, [](NetImpl&) {}, When::before_step, 0);
  training.model->to(at::kFloat);
  one.net->to(at::kFloat);
  training.zero_grad();
  one.optimizer.zero_grad();
  const bool follows = GetParam() == "ddp" || GetParam().starts_with("zero");
  const auto step = [&] {
    mean_loss(training.forward(batch(group().rank(), 9).to(at::kFloat))).backward();
    training.step();
  };
  if (follows) {
    step();
    for (int rank = 0; rank < group().size(); ++rank) {
      (mean_loss(one.net->forward(batch(rank, 9).to(at::kFloat))) / group().size()).backward();
    }
    one.optimizer.step();
    EXPECT_LT(difference(training.model->parameters(), one.net->parameters()), 1e-5);
    EXPECT_EQ(training.model->second->weight.scalar_type(), at::kFloat);
    return;
  }
  EXPECT_THAT(refusal(step), testing::AllOf(HasSubstr("parameter "), HasSubstr("Float"), HasSubstr("Double")));
  training.model->to(at::kDouble);
  one.net->to(at::kDouble);
  expect_like_one_process(
      training, one, [](NetImpl&) {}, When::before_step, 0);
}

TEST_P(ReplacedTensors, a_parameter_that_is_unfrozen_trains_or_is_refused_by_name) {
  auto training = training_of(std::make_shared<NetImpl>(1));
  OneProcess one(1);
  expect_like_one_process(
      training, one, [](NetImpl&) {}, When::before_step, 0);
  training.model->first->bias.requires_grad_(true);
  one.net->first->bias.requires_grad_(true);
  const bool follows = GetParam() == "ddp" || GetParam().starts_with("zero");
  if (follows) {
    expect_like_one_process(
        training, one, [](NetImpl&) {}, When::before_step, 0);
    return;
  }
  training.zero_grad();
  EXPECT_THAT(refusal([&] {
                mean_loss(training.forward(batch(group().rank(), 9))).backward();
                training.step();
              }),
              HasSubstr("parameter first.bias"));
  training.model->first->bias.requires_grad_(false);
  one.net->first->bias.requires_grad_(false);
  training.model->first->bias.mutable_grad().reset();
  expect_like_one_process(
      training, one, [](NetImpl&) {}, When::before_step, 0);
}

TEST_P(ReplacedTensors, a_parameter_may_be_frozen_and_with_it_all_of_its_bucket) {
  for (const bool finds_unused : {false, true}) {
    SCOPED_TRACE(finds_unused ? "unused parameters are found" : "all parameters are used");
    auto training = training_of(std::make_shared<NetImpl>(1), /*bucket_mb=*/0.0001, finds_unused);
    OneProcess one(1);
    expect_like_one_process(
        training, one, [](NetImpl&) {}, When::before_step, 0);
    for (auto* net : {training.model.get(), one.net.get()}) {
      for (auto& parameter : {net->second->weight, net->third->bias}) {
        parameter.set_requires_grad(false);
        at::Tensor(parameter).mutable_grad().reset();
      }
    }
    const auto frozen = training.model->third->bias.detach().clone();
    expect_like_one_process(
        training, one, [](NetImpl&) {}, When::before_step, 0);
    EXPECT_TRUE(at::equal(training.model->third->bias.detach(), frozen));
    if (HasFatalFailure()) return;
  }
}

TEST_P(ReplacedTensors, BEY04_a_parameter_frozen_between_micro_batches_has_what_they_gave) {
  for (const bool weighted : {false, true}) {
    auto training = training_of(std::make_shared<NetImpl>(1));
    OneProcess one(1);
    const auto set_trainable = [&](bool trainable) {
      for (auto* net : {training.model.get(), one.net.get()}) net->second->weight.requires_grad_(trainable);
    };
    const auto backward = [&](int64_t number, int micros) {
      const auto loss = mean_loss(training.forward(batch(group().rank(), number)));
      weighted ? training.backward(loss * 4, 4) : loss.backward();
      for (int rank = 0; rank < group().size(); ++rank) {
        (mean_loss(one.net->forward(batch(rank, number))) / group().size() / (weighted ? micros : 1)).backward();
      }
    };
    for (int64_t step = 0; step < 3; ++step) {
      training.optimizer().zero_grad();
      training.zero_grad();
      one.optimizer.zero_grad();
      {
        const auto local = training.no_sync(true);
        backward(10 + step, 2);
      }
      set_trainable(false);
      backward(step, 2);
      if (step == 2) backward(20, 1);  // nothing is left by now
      set_trainable(true);
      training.step();
      one.optimizer.step();
      ASSERT_LT(difference(training.model->parameters(), one.net->parameters()), 1e-10)
          << "weighted " << weighted << ", step " << step;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, ReplacedTensors,
                         testing::Values("ddp", "zero1", "zero2", "megatron", "megatron_in_grads", "fsdp",
                                         "fsdp_grad_op", "fsdp_no_shard", "fsdp_hybrid"),
                         [](const auto& info) { return info.param; });

// Sharded optimizers update float32 copies of 16-bit parameters, and the copies must follow.
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

OptimizerOfNamed sgd_of_named() {
  return [](const std::vector<NamedParameter>& named) {
    std::vector<at::Tensor> parameters;
    for (const auto& entry : named) parameters.push_back(entry.parameter);
    return std::make_unique<SGD>(parameters, SGDOptions(0.05));
  };
}

// Every rank has the same batch, so that neighbours agree and everything equals one process.
TEST(ReplacedTensorsElsewhere, decentralized_starts_from_what_was_loaded) {
  for (const bool views : {false, true}) {
    for (const int64_t load_at : {0, 2}) {
      SCOPED_TRACE(std::string(views ? "views" : "own memory") + ", step " + std::to_string(load_at));
      auto net = std::make_shared<NetImpl>(1);
      DecentralizedDataParallel<NetImpl> parallel(net, sgd_of_named(), group(), {.param_as_bucket_view = views});
      NetImpl one(1);
      SGD optimizer(one.parameters(), SGDOptions(0.05));
      const auto other = std::make_shared<NetImpl>(7);
      for (int64_t step = 0; step < 5; ++step) {
        if (step == load_at) {
          for (size_t i = 0; i < net->parameters().size(); ++i) {
            net->parameters()[i].set_data(other->parameters()[i].detach().clone());
            one.parameters()[i].set_data(other->parameters()[i].detach().clone());
          }
          if (step > 0 && group().size() > 1) {
            EXPECT_THAT(refusal([&] { parallel.forward(batch(0, step)); }),
                        testing::AllOf(HasSubstr("first.weight"), HasSubstr("global_avg")));
            parallel.global_avg();
          }
        }
        mean_loss(parallel.forward(batch(0, step))).backward();
        optimizer.zero_grad();
        mean_loss(one.forward(batch(0, step))).backward();
        optimizer.step();
        ASSERT_LT(difference(net->parameters(), one.parameters()), 1e-9) << step;
      }
    }
  }
}

// All ranks have the same batch: as one process that does the same.
TEST(ReplacedTensorsElsewhere, decentralized_parameters_exchange_their_memory_and_handles_on_it_stay) {
  for (const int64_t exchange_at : {-1, 0, 2}) {
    SCOPED_TRACE("step " + std::to_string(exchange_at));
    auto net = trained_net();
    auto one = trained_net();
    DecentralizedDataParallel<NetImpl> parallel(net, sgd_of_named(), group(), {.bucket_cap_mb = 0.0001});
    SGD optimizer(one->parameters(), SGDOptions(0.05));
    std::vector<at::Tensor> handles;
    for (const auto& parameter : net->parameters()) handles.push_back(parameter.data());
    for (int64_t step = 0; step < 4; ++step) {
      if (step == exchange_at) {
        for (auto* of : {net.get(), one.get()}) exchange(*of);
        if (step > 0) parallel.global_avg();
      }
      mean_loss(parallel.forward(batch(0, step))).backward();
      optimizer.zero_grad();
      mean_loss(one->forward(batch(0, step))).backward();
      optimizer.step();
      ASSERT_LT(difference(net->parameters(), one->parameters()), 1e-9) << step;
      if (exchange_at < 0) ASSERT_EQ(difference(net->parameters(), handles), 0) << step;
    }
    if (exchange_at >= 0) continue;
    for (auto& handle : handles) handle.clamp_(-0.01, 0.01);
    for (const auto& parameter : net->parameters()) EXPECT_LE(parameter.abs().max().item<double>(), 0.01);
  }
}

TEST(ReplacedTensorsElsewhere, decentralized_parameters_on_the_memory_of_another_are_refused_by_name) {
  auto net = trained_net();
  DecentralizedDataParallel<NetImpl> parallel(net, sgd_of_named(), group(), {});
  const auto refuses = [&](const auto& act) {
    net->second->bias.set_data(net->first->bias.data());
    EXPECT_THAT(refusal(act), testing::AllOf(HasSubstr("first.bias and second.bias"), HasSubstr("clone()")));
    net->second->bias.set_data(net->first->bias.data().clone());
  };
  refuses([&] { parallel.forward(batch(0, 0)); });
  mean_loss(parallel.forward(batch(0, 0))).backward();
  refuses([&] { parallel.global_avg(); });
  parallel.global_avg();
  mean_loss(parallel.forward(batch(0, 1))).backward();
}

// All ranks have the same batch: theta and its momentum start from the loaded values, whatever the outer update.
TEST(ReplacedTensorsElsewhere, local_updates_start_from_what_was_loaded) {
  for (const bool in_place : {false, true}) {
    for (const int64_t load_at : {0, 3, 5}) {
      for (const int64_t delay : {0, 1}) {
        SCOPED_TRACE(std::string(in_place ? "in place" : "replaced") + ", step " + std::to_string(load_at) +
                     ", delay " + std::to_string(delay));
        const LocalUpdatesOptions options{.every = 3, .outer = OuterNesterov{.lr = 0.5, .momentum = 0}, .delay = delay};
        auto net = std::make_shared<NetImpl>(1), fresh_net = std::make_shared<NetImpl>(7);
        SGD optimizer(net->parameters(), SGDOptions(0.05));
        LocalUpdates local(net, optimizer, group(), options);
        const auto train = [](NetImpl& of, LocalUpdates& with, int64_t step) {
          of.zero_grad();
          mean_loss(of.forward(batch(0, step))).backward();
          with.step();
        };
        for (int64_t step = 0; step < load_at; ++step) train(*net, local, step);
        for (size_t i = 0; i < net->parameters().size(); ++i) {
          auto parameter = net->parameters()[i];
          const auto values = fresh_net->parameters()[i].detach().clone();
          const torch::NoGradGuard no_grad;
          if (in_place) {
            parameter.copy_(values);
          } else {
            parameter.set_data(values);
          }
        }
        SGD fresh_optimizer(fresh_net->parameters(), SGDOptions(0.05));
        LocalUpdates fresh(fresh_net, fresh_optimizer, group(), options);
        // Until the next exchange, and one more round for values loaded between two exchanges.
        const int64_t left = (3 - load_at % 3) + delay;
        for (int64_t step = 0; step < left; ++step) train(*net, local, step);
        for (int64_t step = 0; step < (load_at % 3 == 0 ? left : 0); ++step) train(*fresh_net, fresh, step);
        if (load_at % 3 != 0) {
          // By hand: steps from the loaded values, and half of the way to the result.
          NetImpl plain(7);
          SGD plain_optimizer(plain.parameters(), SGDOptions(0.05));
          for (int64_t step = 0; step < 3 - load_at % 3; ++step) {
            plain.zero_grad();
            mean_loss(plain.forward(batch(0, step))).backward();
            plain_optimizer.step();
          }
          if (delay > 0) continue;
          const NetImpl start(7);
          const torch::NoGradGuard no_grad;
          for (size_t i = 0; i < plain.parameters().size(); ++i) {
            plain.parameters()[i].copy_((plain.parameters()[i] + start.parameters()[i]) / 2);
          }
          ASSERT_LT(difference(net->parameters(), plain.parameters()), 1e-10);
          continue;
        }
        ASSERT_LT(difference(net->parameters(), fresh_net->parameters()), 1e-10);
      }
    }
  }
}

struct GrowingImpl : MlpImpl {
  explicit GrowingImpl(bool grows) : MlpImpl(12, 16, 5, at::kDouble), grows(grows) {
    cache = register_buffer("cache", at::zeros({2}, at::kDouble));
  }
  at::Tensor forward(const at::Tensor& x) {
    if (grows) cache.set_data(at::zeros({cache.size(0) + 1}, at::kDouble));
    return MlpImpl::forward(x) + cache.sum();
  }
  bool grows;
  at::Tensor cache;
};

TEST(ReplacedTensorsElsewhere, BEY09_a_buffer_that_has_another_size_on_one_rank_is_named) {
  if (group().size() == 1) GTEST_SKIP() << "one rank agrees with itself";
  std::vector<int> everyone(group().size());
  std::iota(everyone.begin(), everyone.end(), 0);
  const auto own = group().subgroup(everyone);  // is spoilt
  const bool odd = group().rank() == group().size() - 1;
  DistributedDataParallel<GrowingImpl> parallel(std::make_shared<GrowingImpl>(odd), own);
  mean_loss(parallel.forward(batch(group().rank(), 0))).backward();
  EXPECT_THAT(
      refusal<DisagreeError>([&] { parallel.forward(batch(group().rank(), 1)); }),
      testing::AllOf(HasSubstr("broadcast(2 x"), HasSubstr("broadcast(3 x"), HasSubstr("broadcast_buffers = false"),
                     HasSubstr(odd ? "(here cache is [3] and was [2])" : "(here none has changed)")));
  group().barrier().wait();
}

}  // namespace
}  // namespace shoal::test::replaced_tensors_test
