// OSS in an elastic job: what it takes of gradients and of changes of parameters.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/embedding.h>
#include <unistd.h>

#include <csignal>

#include "shoal/hooks.h"
#include "shoal/zero.h"
#include "tests/elastic/elastic_run.h"
#include "tests/support/refusal.h"

namespace shoal::elastic_oss_test {
namespace {

WorldOptions over_sockets() {
  WorldOptions options;
  options.transport = "tcp";
  return options;
}

struct Lookup : torch::nn::Module {
  torch::nn::Embedding table =
      register_module("table", torch::nn::Embedding(torch::nn::EmbeddingOptions(8, 4).sparse(true)));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(4, 1));
  at::Tensor forward(const at::Tensor& indices) { return last(table(indices)).sum(); }
};

// Otherwise owners alone would refuse them, in a step, while the others wait.
TEST(ElasticOSS, ELA01_sparse_gradients_of_oss_are_refused_by_name) {
  const auto train = [](const World& world) {
    std::string all;
    const bool apart = world.group().transport() == "tcp";
    for (const auto& [zero2, by_host] : {std::pair(false, false), {true, false}, {false, true}, {true, true}}) {
      if (by_host && apart) continue;
      const auto net = std::make_shared<Lookup>();
      OSS<torch::optim::SGD> optimizer(net->parameters(), torch::optim::SGDOptions(0.1),
                                       by_host ? world.group().by_host() : world.group());
      std::unique_ptr<DataParallelCore> parallel;
      if (zero2) parallel = std::make_unique<ShardedDataParallel<Lookup>>(net, optimizer, world.group());
      if (!zero2) parallel = std::make_unique<DistributedDataParallel<Lookup>>(net, world.group());
      all += test::refusal([&] { const Elastic elastic(world, *parallel, optimizer); });
    }
    return all;
  };
  for (const auto& options : {WorldOptions(), over_sockets()}) {
    for (const auto& rank : test::run_ranks(2, train, {}, options)) {
      EXPECT_THAT(rank.text,
                  testing::HasSubstr("sparse gradients, such as that of table.weight, are not supported with"));
      EXPECT_THAT(rank.text, testing::Not(testing::HasSubstr("nothing was refused")));
    }
  }
}

// Two of the ranks own the parameter; the others have no sparse gradient of their own to refuse.
TEST(ElasticOSS, ELA01_gradients_that_are_made_sparse_are_refused_on_all_ranks_with_second_owners) {
  const auto train = [](const World& world) {
    alarm(30);
    const auto net = std::make_shared<test::Net>();
    OSS<torch::optim::Adam> optimizer(net->parameters(), torch::optim::AdamOptions(0.01), world.group());
    DistributedDataParallel parallel(net, world.group());
    Elastic elastic(world, parallel, optimizer);
    const auto x = test::inputs_of({1, 2});
    const auto compute = [&] {
      test::loss_of(parallel.forward(x), x).backward();
      auto& gradient = net->first->weight.mutable_grad();
      gradient = gradient.to_sparse();
    };
    return test::refusal([&] { elastic.step(2, compute, [&] { optimizer.step(); }); });
  };
  for (const auto& rank : test::run_ranks(4, train, {}, over_sockets())) {
    EXPECT_THAT(rank.text,
                testing::HasSubstr("sparse gradients are not supported where parameters have second owners"));
  }
}

// A parameter beside the wrapped module: what the loss is multiplied with.
struct WithTemperature {
  explicit WithTemperature(const World& of)
      : world(of),
        optimizer(parameters(), torch::optim::AdamOptions(0.01), world.group()),
        parallel(net, optimizer, world.group(), {.log_sizes = false}),
        elastic(world, parallel, optimizer) {}
  std::vector<at::Tensor> parameters() const {
    auto list = net->parameters();
    list.push_back(beside);
    return list;
  }
  // uses: whether the loss depends on it. Returns the bytes that this rank has sent.
  int64_t step(const at::Tensor& x, bool uses, double clip = 0) {
    const auto before = world.group().statistics().bytes;
    const auto compute = [&] {
      optimizer.zero_grad();
      const auto loss = test::loss_of(parallel.forward(x), x);
      (uses ? loss * beside.exp() : loss).backward();
      if (clip > 0) optimizer.clip_grad_norm(clip);
    };
    elastic.step(2, compute, [&] { optimizer.step(); });
    return world.group().statistics().bytes - before;
  }

  const World& world;
  std::shared_ptr<test::Net> net = std::make_shared<test::Net>();
  at::Tensor beside = torch::ones({}, torch::requires_grad());
  OSS<torch::optim::Adam> optimizer;
  ShardedDataParallel<test::Net> parallel;
  Elastic elastic;
};

// Its gradients are compared before the commit.
TEST(ElasticOSS, ELA02_ELA03_a_parameter_beside_the_wrapped_module_is_updated_without_communication) {
  const auto train = [](const World& world) -> std::string {
    alarm(30);
    WithTemperature training(world);
    const auto x = test::inputs_of({1, 2});
    const auto without = training.step(x, /*uses=*/false);
    const auto with = training.step(x, /*uses=*/true);
    if (training.beside.item<double>() == 1) return "not updated";
    if (with - without > 500) return fmt::format("{} bytes in place of {}", with, without);
    training.optimizer.zero_grad();
    const auto differs = test::inputs_of({1, 2 + static_cast<size_t>(world.rank())});
    try {
      training.step(differs, /*uses=*/true);
    } catch (const DisagreeError& error) {
      return error.what();
    }
    return "different gradients were used";
  };
  for (const auto& options : {WorldOptions(), over_sockets()}) {
    for (const auto& rank : test::run_ranks(3, train, {}, options)) {
      EXPECT_THAT(rank.text, testing::HasSubstr("gradients that no wrapper averages, of parameters outside of the"));
    }
  }
}

// Also on its second owner.
TEST(ElasticOSS, ELA02_ELA04_a_gradient_beside_the_wrapped_module_is_clipped_once) {
  const auto train = [](const World& world) -> std::string {
    alarm(30);
    WithTemperature training(world);
    training.step(test::inputs_of({1, 2}), /*uses=*/true, /*clip=*/0.1);
    const auto own = training.beside.grad().item<double>();
    const auto most = world.group().all_reduce(std::vector<double>{own, -own}, ReduceOp::max);
    return most[0] == -most[1] ? "end" : fmt::format("gradients from {} to {}", -most[1], most[0]);
  };
  for (const auto& rank : test::run_ranks(3, train, {}, over_sockets())) EXPECT_EQ(rank.text, "end");
}

// Its owners stay. One that had none cannot get any.
TEST(ElasticOSS, ELA02_a_parameter_is_frozen_and_unfrozen_under_zero2) {
  const auto train = [](const World& world) -> std::string {
    alarm(30);
    const auto net = std::make_shared<test::Net>();
    net->third->bias.set_requires_grad(false);
    OSS<torch::optim::Adam> optimizer(net->parameters(), torch::optim::AdamOptions(0.01), world.group());
    const bool noticed = world.group().transport() == "host";
    ShardedDataParallel parallel(net, optimizer, world.group(),
                                 {.auto_refresh_trainable = noticed, .log_sizes = false});
    Elastic elastic(world, parallel, optimizer);
    const auto x = test::inputs_of({1, 2, static_cast<size_t>(world.rank())});
    const auto& weight = net->second->weight;
    const auto moves = [&] {
      if (!noticed) parallel.refresh_trainable();
      const auto before = weight.detach().clone();
      const auto compute = [&] {
        optimizer.zero_grad();
        test::loss_of(parallel.forward(x), x).backward();
      };
      elastic.step(3, compute, [&] { optimizer.step(); });
      return !at::equal(weight, before);
    };
    if (!moves()) return "it does not move";
    weight.set_requires_grad(false);
    if (moves()) return "it moves though it is frozen";
    weight.set_requires_grad(true);
    if (!moves()) return "it does not move any more";
    net->to(at::kDouble);
    auto said = test::refusal(moves);
    net->to(at::kFloat);
    net->third->bias.set_requires_grad(true);
    return said + test::refusal(moves);
  };
  for (const auto& options : {WorldOptions(), over_sockets()}) {
    for (const auto& rank : test::run_ranks(2, train, {}, options)) {
      EXPECT_THAT(rank.text, testing::AllOf(testing::HasSubstr("was converted: it is Double"),
                                            testing::HasSubstr("parameter 5 [1] was unfrozen or added")));
    }
  }
}

// Ends this rank where the buckets are made: a wrapper asks then whether the hook fits.
struct EndsItsRank : SumHook {
  bool serves(SumResult result) const override {
    if (ends) std::raise(SIGKILL);
    return SumHook::serves(result);
  }
  bool ends = false;
};

TEST(ElasticOSS, ELA01_a_rank_ends_while_the_buckets_of_zero2_are_made_for_those_that_are_left) {
  const auto train = [](const World& world) -> std::string {
    alarm(30);
    const int self = world.rank();
    const auto hook = std::make_shared<EndsItsRank>();
    const auto net = std::make_shared<test::Net>();
    OSS<torch::optim::Adam> optimizer(net->parameters(), torch::optim::AdamOptions(0.01), world.group());
    ShardedDataParallel parallel(net, optimizer, world.group(), {.communication_hook = hook, .log_sizes = false});
    Elastic elastic(world, parallel, optimizer, {.on_change = [](const ElasticChange&) {}});
    const auto x = test::inputs_of({1, 2});
    while (elastic.steps() < 3) {
      if (elastic.steps() == 1 && self == 2) std::raise(SIGKILL);
      hook->ends = elastic.steps() == 1 && self == 1;
      const auto compute = [&] {
        optimizer.zero_grad();
        test::loss_of(parallel.forward(x), x).backward();
      };
      elastic.step(2, compute, [&] { optimizer.step(); });
    }
    return fmt::format("{} rank", world.size());
  };
  const auto ended = test::run_ranks(3, train);
  EXPECT_EQ(ended[0].text, "1 rank") << ended[0].status;
  for (const size_t rank : {1, 2}) EXPECT_TRUE(WIFSIGNALED(ended[rank].status));
}

}  // namespace
}  // namespace shoal::elastic_oss_test
