// Gradients that are there when a step of an elastic loop begins, and gradients that accumulate within one.

#include <gtest/gtest.h>
#include <sys/wait.h>

#include "tests/elastic/elastic_run.h"

namespace shoal::elastic_gradients_test {
namespace {

using Samples = std::vector<size_t>;

struct Trained {
  explicit Trained(const World& world, test::Sharding sharding = test::Sharding::none)
      : model(std::make_shared<test::Net>()), wrapped(test::wrap_as({.sharding = sharding}, model, world.group())) {
    alarm(30);
  }
  void backward(const Samples& samples) {
    const auto x = test::inputs_of(samples);
    test::loss_of(wrapped.forward(x), x).backward();
  }
  // Collective with a sharded optimizer.
  std::string hash() const { return fmt::format("{}", test::hash_of(wrapped.state(*model), *model)); }

  std::shared_ptr<test::Net> model;
  test::Wrapped wrapped;
  torch::optim::Optimizer& optimizer = *wrapped.optimizer;
};

// Those that are told apart here: gradients in grad(), and in buffers.
constexpr test::Sharding kinds_of_gradients[] = {test::Sharding::none, test::Sharding::megatron, test::Sharding::fsdp};

void expect_all(const std::vector<test::RankEnded>& ended, const std::string& text, int except = -1) {
  for (size_t rank = 0; rank < ended.size(); ++rank) {
    if (static_cast<int>(rank) == except) continue;
    EXPECT_TRUE(WIFEXITED(ended[rank].status)) << "rank " << rank;
    EXPECT_NE(ended[rank].text.find(text), std::string::npos) << "rank " << rank << ": " << ended[rank].text;
  }
}

// Gradients that are dropped or zeroed, after a step or at the beginning of compute. Rank 2 dies on the way.
void zero_grad_where_loops_have_it(test::Sharding sharding) {
  constexpr int kinds = 4, steps = 3 * kinds, last_of_three = 6;
  const auto at_the_end = [](int64_t step) { return step % 2 == 0; };
  const auto to_none = [](int64_t step) { return step % kinds < 2; };
  const auto ended = test::run_ranks(3, [&](const World& world) -> std::string {
    const Samples own{static_cast<size_t>(world.rank()), 5};
    const auto self = world.rank();
    std::string expected;
    {
      Trained plain(world, sharding);
      for (int64_t step = 0; step < last_of_three; ++step) {
        torch::manual_seed(static_cast<uint64_t>(step));
        plain.backward(own);
        plain.wrapped.step();
        plain.optimizer.zero_grad();
      }
      expected = plain.hash();
    }
    Trained trained(world, sharding);
    const auto made = trained.wrapped.elastic(world);
    auto& elastic = *made;
    const auto hash = [&] { return elastic.together([&] { return trained.hash(); }); };
    while (elastic.steps() < steps) {
      const auto step = elastic.steps();
      if (step == last_of_three && hash() != expected) return "the steps differ from a plain loop's";
      const auto compute = [&] {
        torch::manual_seed(static_cast<uint64_t>(step));
        if (!at_the_end(step)) trained.optimizer.zero_grad(to_none(step));
        if (self == 2 && step >= last_of_three) std::raise(SIGKILL);
        trained.backward(own);
      };
      if (!elastic.step(2, compute, [&] { trained.wrapped.step(); })) continue;
      if (at_the_end(step + 1)) trained.optimizer.zero_grad(to_none(step + 1));
    }
    return "same " + hash();
  });
  expect_all(ended, "same ", 2);
  EXPECT_EQ(ended[0].text, ended[1].text);
}

TEST(ElasticGradients, ELA02_zero_grad_where_loops_have_it) {
  for (const auto sharding : kinds_of_gradients) {
    SCOPED_TRACE(static_cast<int>(sharding));
    zero_grad_where_loops_have_it(sharding);
  }
}

// Rank 2 dies between its two micro-batches.
TEST(ElasticGradients, ELA02_micro_batches_of_one_step_equal_one_batch) {
  const auto ended = test::run_ranks(3, [](const World& world) -> std::string {
    alarm(30);
    torch::nn::Linear model(4, 1);
    DistributedDataParallel parallel(model, world.group());
    torch::optim::Adam optimizer(model->parameters());
    Elastic elastic(world, parallel, optimizer);
    const auto self = world.rank();
    const auto gradients_of = [&](const std::vector<Samples>& micro_batches) {
      std::vector<at::Tensor> gradients;
      const auto compute = [&] {
        for (size_t i = 0; i < micro_batches.size(); ++i) {
          if (i == 1 && self == 2) std::raise(SIGKILL);
          const auto scope = parallel.no_sync(i + 1 < micro_batches.size());
          const auto x = test::inputs_of(micro_batches[i]);
          (test::loss_of(parallel.forward(x), x) / static_cast<double>(micro_batches.size())).backward();
        }
      };
      const auto keep = [&] { gradients = {model->weight.grad().clone(), model->bias.grad().clone()}; };
      while (!elastic.step(4, compute, keep)) continue;
      optimizer.zero_grad();
      return gradients;
    };
    const auto parts = gradients_of({{0, 1}, {2, 3}});
    const auto together = gradients_of({{0, 1, 2, 3}});
    if (world.size() != 2 || elastic.steps() != 2) return "rank 2 is alive";
    for (size_t i = 0; i < parts.size(); ++i) {
      if (!at::allclose(parts[i], together[i], 1e-5, 1e-7)) return fmt::format("gradient {} differs", i);
      if (parts[i].abs().max().item<double>() == 0) return fmt::format("gradient {} is zero", i);
    }
    return "equal";
  });
  expect_all(ended, "equal", 2);
}

constexpr const char* refused = "call zero_grad() after each step() or at the beginning of compute";

TEST(ElasticGradients, ELA02_gradients_from_before_a_step_are_refused_on_every_rank) {
  for (const bool on_all : {true, false}) {
    SCOPED_TRACE(on_all);
    const auto ended = test::run_ranks(2, [&](const World& world) {
      Trained trained(world);
      const auto made = trained.wrapped.elastic(world);
      auto& elastic = *made;
      for (int i = 0; i < 3; ++i) {
        if (i == 1 && world.rank() == 1 && !on_all) trained.optimizer.zero_grad();
        elastic.step(
            1, [&] { trained.backward({1}); }, [&] {});
      }
      return std::string("no error");
    });
    expect_all(ended, refused);
    EXPECT_NE(ended[0].text.find("this rank had before step(), that of first.weight among them"), std::string::npos)
        << ended[0].text;
    if (!on_all) {
      EXPECT_NE(ended[1].text.find("another rank had"), std::string::npos) << ended[1].text;
    }
  }
}

// Under ShardedDataParallel a gradient is with its owner alone, which tells the others.
TEST(ElasticGradients, ELA02_with_oss_gradients_from_before_a_step_are_refused_on_every_rank) {
  for (const bool zeroed : {true, false}) {
    SCOPED_TRACE(zeroed);
    const auto ended = test::run_ranks(2, [&](const World& world) -> std::string {
      alarm(30);
      auto model = std::make_shared<test::Net>();
      OSS<torch::optim::Adam> optimizer(model->parameters(), torch::optim::AdamOptions(0.01), world.group());
      ShardedDataParallel parallel(model, optimizer, world.group());
      Elastic elastic(world, parallel, optimizer);
      for (int i = 0; i < 3; ++i) {
        const auto compute = [&] {
          if (zeroed && i == 1) optimizer.zero_grad();
          const auto x = test::inputs_of({1});
          test::loss_of(parallel.forward(x), x).backward();
        };
        elastic.step(1, compute, [&] { optimizer.step(); });
        if (zeroed && i == 1) optimizer.zero_grad();
      }
      return "no error";
    });
    expect_all(ended, zeroed ? "no error" : refused);
  }
}

// A backward outside of compute alone, which computes nothing.
TEST(ElasticGradients, ELA02_a_backward_before_the_step_is_refused) {
  for (const auto sharding : kinds_of_gradients) {
    SCOPED_TRACE(static_cast<int>(sharding));
    const auto ended = test::run_ranks(2, [&](const World& world) {
      Trained trained(world, sharding);
      const auto elastic = trained.wrapped.elastic(world);
      trained.backward({1});
      elastic->step(
          1, [] {}, [&] { trained.wrapped.step(); });
      return std::string("no error");
    });
    expect_all(ended, refused);
  }
}

// The step is undone for the death, and its repetition must not lose them without a word either.
TEST(ElasticGradients, ELA02_gradients_from_before_a_step_in_which_a_rank_dies_are_refused) {
  for (const auto sharding : kinds_of_gradients) {
    for (const bool before_backward : {true, false}) {
      SCOPED_TRACE(fmt::format("{}, {}", static_cast<int>(sharding), before_backward));
      const auto ended = test::run_ranks(3, [&](const World& world) {
        Trained trained(world, sharding);
        const auto elastic = trained.wrapped.elastic(world);
        const auto self = world.rank();
        elastic->step(
            1, [&] { trained.backward({1}); }, [] {});
        const auto compute = [&] {
          if (self == 0 && before_backward) std::raise(SIGKILL);
          if (before_backward) world.all_reduce(1.0);
          trained.model->first->weight.register_hook([&](const at::Tensor&) {
            if (self == 0) std::raise(SIGKILL);
          });
          trained.backward({2});
        };
        for (int i = 0; i < 2; ++i) elastic->step(1, compute, [&] { trained.wrapped.step(); });
        return std::string("no error");
      });
      expect_all(ended, refused, 0);
    }
  }
}

// Rank 1 is killed before its backward of step 2. catches: `compute` catches what the others' backward throws, as loops
// do that skip bad batches; nobody may update with gradients of some of the ranks.
std::vector<std::string> hashes_after_a_death(test::Sharding sharding, bool catches) {
  const auto ended = test::run_ranks(3, [&](const World& world) -> std::string {
    const auto self = static_cast<size_t>(world.rank());
    Trained trained(world, sharding);
    const auto elastic = trained.wrapped.elastic(world);
    while (elastic->steps() < 4) {
      const auto step = elastic->steps();
      const auto compute = [&] {
        if (self == 1 && step == 2) std::raise(SIGKILL);
        try {
          trained.backward({self, 3 + self});
        } catch (const Error&) {
          if (!catches) throw;
        }
      };
      elastic->step(2, compute, [&] { trained.wrapped.step(); });
      trained.optimizer.zero_grad();
    }
    return elastic->together([&] { return trained.hash(); });
  });
  return {ended[0].text, ended[2].text};
}

TEST(ElasticGradients, ELA02_an_error_that_compute_catches_makes_no_step_with_gradients_of_some_ranks) {
  using test::Sharding;
  for (const auto sharding : {Sharding::none, Sharding::zero1, Sharding::zero2, Sharding::megatron, Sharding::fsdp}) {
    SCOPED_TRACE(static_cast<int>(sharding));
    const auto thrown = hashes_after_a_death(sharding, false);
    EXPECT_EQ(thrown[0].find("error"), std::string::npos) << thrown[0];
    EXPECT_EQ(thrown[0], thrown[1]);
    EXPECT_EQ(hashes_after_a_death(sharding, true), thrown);
  }
}

}  // namespace
}  // namespace shoal::elastic_gradients_test
