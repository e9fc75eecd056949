// BEY09, for strategies: if ranks wrap different things, all of them report it within two seconds, before anything is
// trained, and can continue together. (For collectives: tests/comm/disagree_test.cpp.)

#include <gmock/gmock.h>
#include <torch/optim/sgd.h>

#include <numeric>

#include "shoal/decentralized.h"
#include "shoal/error.h"
#include "shoal/fsdp.h"
#include "shoal/megatron.h"
#include "shoal/zero.h"
#include "tests/strategy/faults/mismatch.h"
#include "tests/support/models.h"
#include "tests/support/training.h"
#include "tests/support/world.h"

namespace shoal::test::mismatch_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace mismatch;  // NOLINT(google-build-using-namespace): helpers of this folder's tests

// Two layers, which differ on odd ranks in the selected way.
struct PairImpl : torch::nn::Module {
  enum Difference { none, width, order, missing, frozen, dtype };
  explicit PairImpl(Difference difference) {
    const auto add = [this](const char* name, int64_t out) {
      register_module(name, torch::nn::Linear(torch::nn::LinearOptions(12, out).bias(false)));
    };
    if (difference == order) add("second", 5);
    add("first", difference == width ? 6 : 5);
    if (difference != order && difference != missing) add("second", 5);
    to(difference == dtype ? at::kFloat : at::kDouble);
    if (difference == frozen) parameters().front().requires_grad_(false);
  }
  at::Tensor forward(const at::Tensor& x) { return x; }
};

TEST_F(Mismatch, BEY09_names_different_models_under_every_strategy) {
  const std::vector<std::pair<PairImpl::Difference, std::vector<std::string>>> cases{
      {PairImpl::width, {"first.weight", "[5, 12]", "[6, 12]"}},
      {PairImpl::order, {"first.weight", "second.weight"}},
      {PairImpl::missing, {"second.weight", "nothing"}},
      {PairImpl::frozen, {"first.weight", "frozen"}},
      {PairImpl::dtype, {"first.weight", "Float", "Double"}}};
  auto all = strategies();
  all.emplace_back("decentralized");
  for (const auto& strategy : all) {
    if (strategy == "zero1" || strategy == "zero2") continue;  // their optimizer compares first: below
    for (const auto& [difference, parts] : cases) {
      SCOPED_TRACE(strategy + ", difference " + std::to_string(difference));
      auto named = parts;
      named.insert(named.end(), {"rank 0 has", odd_name() + " has"});
      expect_named(
          [&, kind = difference] {
            const auto model = std::make_shared<PairImpl>(odd_one() ? kind : PairImpl::none);
            if (strategy == "decentralized") {
              const DecentralizedDataParallel<PairImpl> parallel(model, decentralized_sgd(), group());
            } else {
              Training<PairImpl>::make<torch::optim::SGD>(strategy, model, group(), torch::optim::SGDOptions(0.1));
            }
          },
          named);
    }
  }
}

TEST_F(Mismatch, BEY09_names_different_parameters_of_sharded_optimizers) {
  for (const auto* strategy : {"zero1", "zero2"}) {
    for (const auto difference :
         {PairImpl::width, PairImpl::order, PairImpl::missing, PairImpl::frozen, PairImpl::dtype}) {
      SCOPED_TRACE(std::string(strategy) + ", difference " + std::to_string(difference));
      expect_named(
          [&] {
            Training<PairImpl>::make<torch::optim::SGD>(
                strategy, std::make_shared<PairImpl>(odd_one() ? difference : PairImpl::none), group(),
                torch::optim::SGDOptions(0.1));
          },
          {"rank 0 has", odd_name() + " has"});
    }
  }
}

// All ranks. Where they call different operations, a group is of no use afterwards.
Group of_all() {
  std::vector<int> ranks(static_cast<size_t>(group().size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return group().subgroup(ranks);
}

// As by ReduceLROnPlateauScheduler with each rank's own loss. Each rank would update its part of the model in its own
// way.
TEST_F(Mismatch, BEY09_names_options_of_sharded_optimizers_that_were_changed_in_different_ways) {
  using torch::optim::SGDOptions;
  struct Change {
    std::function<void(SGDOptions& options)> act;
    std::vector<std::string> parts;
  };
  const auto here = [](double usual) { return odd_one() ? 2 * usual : usual; };
  const std::vector<Change> changes{
      {[&](SGDOptions& options) { options.lr(here(0.03)); },
       {"rank 0 has param group 0: lr 0.03", odd_name() + " has param group 0: lr 0.06"}},
      {[&](SGDOptions& options) { options.momentum(here(0.4)); }, {"rank 0 has param group 0:", "momentum 0.4", "0.8"}},
      {[&](SGDOptions& options) { odd_one() ? options.lr(0.01) : options.momentum(0.1); },
       {"momentum 0.1", "lr 0.01"}}};
  for (const auto& strategy : strategies()) {
    if (strategy == "ddp") continue;  // its optimizer is the program's
    for (const auto& change : changes) {
      SCOPED_TRACE(strategy);
      auto training = Training<MlpImpl>::make<torch::optim::SGD>(strategy, seeded(1).ptr(), of_all(), SGDOptions(0.1));
      const auto step = [&](int64_t number) {
        training.zero_grad();
        mean_loss(training.forward(batch(group().rank(), number))).backward();
        training.step();
      };
      auto& options = static_cast<SGDOptions&>(training.optimizer().param_groups()[0].options());
      step(0);
      options.lr(0.1).momentum(0.5);
      step(1);  // alike on all ranks
      options.momentum(0);
      step(2);
      change.act(options);
      expect_named([&] { step(3); }, change.parts);
      if (&change != &changes.back()) continue;
      options.lr(0.1).momentum(0);
      step(4);
      if (odd_one()) options.lr(0.05);
      const auto go_on = [&] {  // FSDP's ranks do not meet in a step over sockets
        step(5);
        step(6);
      };
      EXPECT_THAT(refusal<DisagreeError>(go_on),
                  AllOf(HasSubstr(odd_name()), HasSubstr("agreement on changed options of")));
    }
  }
}

// Loads a state in which the odd rank has other momenta, on all ranks or on the odd one alone.
template <class Load>
void load_and_step(OptimizerState state, bool odd_alone, const Load& load, const std::function<void(int64_t)>& step,
                   const std::string& name) {
  step(0);
  load(state);  // alike
  step(1);
  for (auto& [parameter, entry] : state) {
    for (auto& [kind, tensor] : entry.tensors) tensor.mul_(odd_one() ? 2 : 1);
  }
  if (odd_one() || !odd_alone) load(state);
  if (!odd_alone) return expect_named([&] { step(2); }, {"the loaded state of " + name, odd_name() + " has"});
  const auto go_on = [&] {
    step(2);
    step(3);
  };
  EXPECT_THAT(refusal<DisagreeError>(go_on), AllOf(HasSubstr(odd_name()), HasSubstr("the loaded state of " + name)));
}

TEST_F(Mismatch, BEY09_names_loaded_states_of_sharded_optimizers_that_differ) {
  const auto sgd = torch::optim::SGDOptions(0.1).momentum(0.9);
  for (const bool odd_alone : {false, true}) {
    const auto stepping = [](auto& optimizer, auto forward) {
      return [&optimizer, forward](int64_t number) {
        mean_loss(forward(batch(group().rank(), number))).backward();
        optimizer.step();
        optimizer.zero_grad();
      };
    };
    {
      auto model = seeded(1);
      DistributedOptimizer<torch::optim::SGD> optimizer(model, sgd, of_all());
      const auto step = stepping(optimizer, [&](const at::Tensor& x) { return model->forward(x); });
      step(0);
      load_and_step(
          optimizer.state_dict(), odd_alone, [&](const OptimizerState& state) { optimizer.load_state_dict(state); },
          step, "DistributedOptimizer");
    }
    {
      FullyShardedDataParallel<MlpImpl> parallel(seeded(1), of_all());
      FullyShardedOptimizer<torch::optim::SGD> optimizer(parallel, sgd);
      const auto step = stepping(optimizer, [&](const at::Tensor& x) { return parallel.forward(x); });
      step(0);
      load_and_step(
          optimizer.state_dict(), odd_alone, [&](const OptimizerState& state) { optimizer.load_state_dict(state); },
          step, "FullyShardedOptimizer");
    }
    {
      auto model = seeded(1);
      const auto all = of_all();
      OSS<torch::optim::SGD> optimizer(model->parameters(), sgd, all);
      ShardedDataParallel<MlpImpl> parallel(model, optimizer, all);
      const auto step = stepping(optimizer, [&](const at::Tensor& x) { return parallel.forward(x); });
      step(0);
      load_and_step(
          optimizer.state_dict(*model), odd_alone,
          [&](const OptimizerState& state) { optimizer.load_state_dict(*model, state); }, step, "OSS");
    }
  }
}

// A scaler of the program's own.
TEST_F(Mismatch, BEY09_names_loss_scales_that_differ) {
  const double own = odd_one() ? 64 : 1024;
  const auto all = of_all();
  auto model = seeded(1);
  OSS<torch::optim::SGD> optimizer(model->parameters(), torch::optim::SGDOptions(0.1), all);
  DistributedDataParallel<MlpImpl> parallel(model, all);
  GradScaler scaler({.initial_scale = own});
  scaler.scale(mean_loss(parallel.forward(batch(group().rank(), 0)))).backward();
  EXPECT_THAT(refusal<DisagreeError>([&] { optimizer.step(scaler); }),
              AllOf(HasSubstr("OSS: ranks have loss scales from 64 to 1024"),
                    HasSubstr("this one has " + std::to_string(static_cast<int>(own)))));
}

// Models with equal properties, such as two agents of one kind, differ only in their order.
TEST_F(Mismatch, BEY09_names_equal_models_in_another_order) {
  std::vector<int> everyone(group().size());
  for (size_t rank = 0; rank < everyone.size(); ++rank) everyone[rank] = static_cast<int>(rank);
  const auto own = group().subgroup(everyone);  // may be spoilt
  DistributedDataParallel<MlpImpl> first(seeded(3).ptr(), own), second(seeded(4).ptr(), own);
  const auto backward = [](DistributedDataParallel<MlpImpl>& parallel) {
    mean_loss(parallel.forward(batch(group().rank(), 0))).backward();
  };
  expect_named(
      [&] {
        try {
          backward(odd_one() ? second : first);
          backward(odd_one() ? first : second);
        } catch (const DisagreeError& error) {
          const std::string text = error.what();
          throw DisagreeError(text.substr(0, text.find(" (detected")));  // by whom differs
        }
      },
      {"different operations as #", "bucket 0: gradients of ", "bucket 0: model 2's gradients of "});
}

// No mismatch: the mean over ranks includes zeros, on all ranks alike.
TEST_F(Mismatch, BEY09_unused_parameters_that_differ_between_ranks_and_steps_are_no_mismatch) {
  struct Branches : torch::nn::Module {
    Branches() {
      for (int i = 0; i < 4; ++i) {
        branches.push_back(register_module("branch" + std::to_string(i), torch::nn::Linear(12, 5)));
      }
      to(at::kDouble);
    }
    at::Tensor forward(const at::Tensor& x, int64_t seed) { return branches[seed % 4](x); }
    std::vector<torch::nn::Linear> branches;
  };
  torch::manual_seed(3);
  auto model = std::make_shared<Branches>();
  auto reference = std::make_shared<Branches>();
  DistributedDataParallel<Branches> parallel(model, group(), {.find_unused_parameters = true});
  {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < model->parameters().size(); ++i) reference->parameters()[i].copy_(model->parameters()[i]);
  }
  for (int64_t step = 0; step < 6; ++step) {
    const auto seed_of = [&](int rank) { return 7 * rank + 3 * step; };
    model->zero_grad();
    mean_loss(parallel.forward(batch(group().rank(), step), seed_of(group().rank()))).backward();
    reference->zero_grad();
    for (int rank = 0; rank < group().size(); ++rank) {
      (mean_loss(reference->forward(batch(rank, step), seed_of(rank))) / group().size()).backward();
    }
    for (size_t i = 0; i < model->parameters().size(); ++i) {
      const auto expected = reference->parameters()[i].grad();
      const auto found = model->parameters()[i].grad();
      ASSERT_EQ(expected.defined(), found.defined()) << i;
      if (!expected.defined()) continue;
      EXPECT_LT((expected - found).abs().max().item<double>(), 1e-12);
    }
  }
}

}  // namespace
}  // namespace shoal::test::mismatch_test
