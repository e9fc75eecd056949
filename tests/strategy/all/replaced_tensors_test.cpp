// Parameters that are loaded, replaced or written after their module was wrapped: training continues as in one process
// that does the same, or is refused.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <torch/serialize.h>

#include <map>
#include <set>
#include <sstream>

#include "shoal/error.h"
#include "tests/strategy/all/replaced_tensors.h"
#include "tests/support/refusal.h"

namespace shoal::test::replaced_tensors_test {
namespace {

using namespace replaced_tensors;
using testing::HasSubstr;

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

const char* name_of(When when) {
  const std::map<When, const char*> names{{When::before_forward, "before forward"},
                                          {When::in_forward, "in forward"},
                                          {When::before_backward, "before backward"},
                                          {When::before_step, "before step"}};
  return names.at(when);
}

// Each change at each point, in the first step or in the third: a third of them on 2 ranks, on 3, and on another number
// or over sockets.
TEST_P(ReplacedTensors, training_goes_on_as_in_one_process) {
  int number = group().size() + (group().size() > 1 && group().transport() != "host" ? 2 : 0);
  for (const auto& [name, change, when] : cases()) {
    for (const auto point : when) {
      ++number;
      for (const int64_t step : {0, 2}) {
        if ((number + step / 2) % 3 != 0) continue;
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

INSTANTIATE_TEST_SUITE_P(All, ReplacedTensors,
                         testing::Values("ddp", "zero1", "zero2", "megatron", "megatron_in_grads", "fsdp",
                                         "fsdp_grad_op", "fsdp_no_shard", "fsdp_hybrid"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace shoal::test::replaced_tensors_test
