// Parameters that are loaded or replaced in decentralised training and local updates, and buffers.

#include <gmock/gmock.h>

#include <numeric>

#include "shoal/ddp.h"
#include "shoal/decentralized.h"
#include "shoal/error.h"
#include "shoal/local_updates.h"
#include "tests/strategy/all/replaced_tensors.h"
#include "tests/support/refusal.h"

namespace shoal::test::replaced_elsewhere_test {
namespace {

using namespace replaced_tensors;
using testing::HasSubstr;

OptimizerRecipe sgd_recipe() {
  return optimizer_recipe<SGD>(SGDOptions(0.05));
}

// Every rank has the same batch, so that neighbours agree and everything equals one process.
TEST(ReplacedTensorsElsewhere, decentralized_starts_from_what_was_loaded) {
  for (const bool views : {false, true}) {
    for (const int64_t load_at : {0, 2}) {
      SCOPED_TRACE(std::string(views ? "views" : "own memory") + ", step " + std::to_string(load_at));
      auto net = std::make_shared<NetImpl>(1);
      DecentralizedDataParallel<NetImpl> parallel(net, sgd_recipe(), group(), {.param_as_bucket_view = views});
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
    DecentralizedDataParallel<NetImpl> parallel(net, sgd_recipe(), group(), {.bucket_cap_mb = 0.0001});
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
  DecentralizedDataParallel<NetImpl> parallel(net, sgd_recipe(), group(), {});
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
}  // namespace shoal::test::replaced_elsewhere_test
