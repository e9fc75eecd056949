// What an update must not do in an elastic loop, and what becomes of a rank that does it.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <unistd.h>

#include "shoal/zero.h"
#include "tests/elastic/elastic_run.h"

namespace shoal::elastic_update_test {
namespace {

// What is wrong with `act`, which must throw a UsageError with `text`; empty: nothing.
std::string fault_of_refusal(const std::string& text, const std::function<void()>& act) {
  try {
    act();
  } catch (const UsageError& error) {
    const std::string thrown = error.what();
    return thrown.find(text) == std::string::npos ? thrown + "\n" : "";
  }
  return "no error instead of: " + text + "\n";
}

// A training whose steps differ in their updates only.
struct Training {
  explicit Training(const World& world, const ElasticOptions& options = {})
      : optimizer(net->parameters(), torch::optim::AdamOptions(0.01), world.group()),
        parallel(net, world.group()),
        elastic(world, parallel, optimizer, options) {
    alarm(30);
  }
  bool step(const std::function<void()>& update) {
    const auto x = test::inputs_of({1, 2});
    const auto compute = [&] {
      optimizer.zero_grad();
      test::loss_of(parallel.forward(x), x).backward();
    };
    return elastic.step(2, compute, update);
  }
  bool step() {
    return step([this] { optimizer.step(); });
  }

  std::shared_ptr<test::Net> net = std::make_shared<test::Net>();
  OSS<torch::optim::Adam> optimizer;
  DistributedDataParallel<test::Net> parallel;
  Elastic elastic;
};

TEST(ElasticUpdate, ELA02_ELA03_what_a_sharded_update_must_not_do_is_refused_by_name) {
  const auto ended = test::run_ranks(2, [&](const World& world) -> std::string {
    alarm(30);
    auto net = std::make_shared<test::Net>();
    net->third->bias.set_requires_grad(false);
    OSS<torch::optim::Adam> optimizer(net->parameters(), torch::optim::AdamOptions(0.01), world.group());
    DistributedDataParallel parallel(net, world.group());
    auto made = std::make_unique<Elastic>(world, parallel, optimizer);
    auto& elastic = *made;
    const auto x = test::inputs_of({1, 2});
    std::string all;
    const auto expect = [&](const std::string& text, const std::function<void()>& act) {
      all += fault_of_refusal(text, act);
    };
    const auto step = [&](const std::function<void()>& update) {
      const auto compute = [&] {
        optimizer.zero_grad();
        test::loss_of(parallel.forward(x), x).backward();
        optimizer.clip_grad_norm(0.1);
      };
      if (!elastic.step(2, compute, update)) all += "a step was not complete\n";
    };
    const auto usual = [&] { optimizer.step(); };
    step(usual);
    expect("is for the second function of Elastic::step()", usual);
    expect("clip with clip_grad_norm() in the first function", [&] {
      step([&] {
        GradScaler scaler;
        optimizer.step(scaler);
      });
    });
    expect("gradients were changed in the second function", [&] {
      step([&] {
        torch::nn::utils::clip_grad_norm_(net->parameters(), 0.01);
        optimizer.step();
      });
    });
    step(usual);
    net->third->bias.set_requires_grad(true);
    expect("parameter 5 [1] was unfrozen or added", [&] { step(usual); });
    net->third->bias.set_requires_grad(false);
    step(usual);
    optimizer.load_state_dict(*net, optimizer.state_dict(*net));
    expect("was loaded or replaced", [&] { step(usual); });
    made.reset();
    optimizer.zero_grad();
    test::loss_of(parallel.forward(x), x).backward();
    optimizer.clip_grad_norm(0.1);
    optimizer.step();
    return all + "end";
  });
  for (const auto& rank : ended) EXPECT_EQ(rank.text, "end");
}

// Rank 1 alone does what is refused, or leaves step() out. It leaves the job, and the others update for it and go on.
TEST(ElasticUpdate, ELA02_ELA03_a_rank_that_alone_does_not_update_leaves_and_the_others_go_on) {
  for (const bool changes : {true, false}) {
    const auto ended = test::run_ranks(3, [&](const World& world) -> std::string {
      Training training(world);
      const bool differs = world.rank() == 1;
      const auto update = [&] {
        if (differs && changes) torch::nn::utils::clip_grad_norm_(training.net->parameters(), 0.01);
        if (!differs || changes) training.optimizer.step();
      };
      if (!training.step()) return "the first step was not complete";
      if (differs) {
        const auto* text =
            changes ? "gradients were changed in the second function" : "did not update, as it did on another rank";
        auto faults = fault_of_refusal(text, [&] { training.step(update); });
        faults += fault_of_refusal("it has left the job", [&] { training.step(); });
        return faults + "has left";
      }
      if (!training.step(update)) return "the step was not complete";
      while (world.size() == 3) training.step();
      return std::to_string(world.size());
    });
    for (size_t rank = 0; rank < ended.size(); ++rank) EXPECT_EQ(ended[rank].text, rank == 1 ? "has left" : "2");
  }
}

// As after an overflow that a program looks for itself. The late rank is not killed before twice the limit.
TEST(ElasticUpdate, ELA02_ELA08_a_late_rank_of_a_step_that_nobody_updates_is_waited_for) {
  const auto ended = test::run_ranks(3, [&](const World& world) -> std::string {
    Training training(world, {.straggler_seconds = 1});
    training.step();
    while (!training.step([&] { usleep(world.rank() == 0 ? 1'400'000 : 0); })) {
    }
    while (!training.step()) {
    }
    return std::to_string(world.size());
  });
  for (const auto& rank : ended) EXPECT_EQ(rank.text, "3");
}

// It comes after the update, so it cannot be taken for one that has changed nothing.
TEST(ElasticUpdate, ELA02_ELA03_a_second_update_in_a_step_ends_the_rank) {
  const auto ended = test::run_ranks(2, [&](const World& world) -> std::string {
    Training training(world);
    const auto twice = [&] {
      training.optimizer.step();
      training.optimizer.step();
    };
    auto faults = fault_of_refusal("is for the second function of Elastic::step(), once in each step",
                                   [&] { training.step(twice); });
    faults += fault_of_refusal("it has left the job", [&] { training.step(twice); });
    return faults + "end";
  });
  for (const auto& rank : ended) EXPECT_EQ(rank.text, "end");
}

TEST(ElasticUpdate, ELA02_ELA03_what_an_update_by_range_must_not_do_is_refused_by_name) {
  const auto refused = [](test::Sharding sharding, at::ScalarType dtype) {
    SCOPED_TRACE(fmt::format("{}, {}", static_cast<int>(sharding), c10::toString(dtype)));
    const auto ended = test::run_ranks(2, [&](const World& world) -> std::string {
      alarm(30);
      auto net = std::make_shared<test::Net>();
      const test::Trained trained{.sharding = sharding, .optimizer = "adamw", .dtype = dtype};
      net->to_dtype(trained.module_dtype());
      const auto wrapped = test::wrap_as(trained, net, world.group());
      auto made = wrapped.elastic(world);
      const auto x = test::inputs_of({1, 2});
      std::string all;
      const auto expect = [&](const std::string& text, const std::function<void()>& act) {
        all += fault_of_refusal(text, act);
        wrapped.optimizer->zero_grad();
      };
      const auto compute = [&] { test::loss_of(wrapped.forward(x), x).backward(); };
      const auto step = [&](const std::function<void()>& update) {
        if (!made->step(2, compute, update)) all += "a step was not complete\n";
        wrapped.optimizer->zero_grad();
      };
      const auto usual = [&] { wrapped.step(); };
      step(usual);
      expect("is for the second function of Elastic::step()", usual);
      for (const bool to_none : {true, false}) {
        expect("gradients were changed in the second function", [&] {
          step([&] {
            wrapped.optimizer->zero_grad(to_none);
            usual();
          });
        });
      }
      step(usual);
      // Values that the program writes count, also in the copies that the optimizer updates.
      const auto norm = [&] { return net->second->weight.norm().item<double>(); };
      const auto before = norm();
      {
        const torch::NoGradGuard no_grad;
        net->second->weight.mul_(4);
      }
      step(usual);
      if (norm() < 3 * before) all += "a written value is lost\n";
      wrapped.by_range()->load_state_dict(wrapped.by_range()->state_dict());
      expect("was loaded or replaced", [&] { step(usual); });
      made.reset();
      compute();
      usual();
      return all + "end";
    });
    for (const auto& rank : ended) EXPECT_EQ(rank.text, "end");
  };
  for (const auto sharding : {test::Sharding::megatron, test::Sharding::fsdp}) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) refused(sharding, dtype);
  }
}

TEST(ElasticUpdate, ELA01_an_update_that_communicates_is_refused) {
  const auto ended = test::run_ranks(3, [&](const World& world) -> std::string {
    alarm(30);
    auto model = std::make_shared<test::Net>();
    DistributedDataParallel parallel(model, world.group());
    torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(0.01));
    Elastic elastic(world, parallel, optimizer);
    const auto x = test::inputs_of({1, 2});
    while (elastic.steps() < 5) {
      elastic.step(
          2, [&] { test::loss_of(parallel.forward(x), x).backward(); },
          [&] {
            optimizer.step();
            world.all_reduce(1.0);
          });
      optimizer.zero_grad();
    }
    return "no error";
  });
  for (const auto& rank : ended) {
    EXPECT_THAT(rank.text,
                testing::AllOf(testing::HasSubstr("all_reduce(sum, 2 x Double)"),
                               testing::HasSubstr("in the second function of Elastic::step(), which could")));
  }
}

// Of FullyShardedDataParallel it adds up the norm.
TEST(ElasticUpdate, ELA01_clipping_that_communicates_is_refused_in_an_update) {
  const auto ended = test::run_ranks(2, [&](const World& world) -> std::string {
    alarm(30);
    const auto net = std::make_shared<test::Net>();
    const auto wrapped = test::wrap_as({.sharding = test::Sharding::fsdp}, net, world.group());
    const auto elastic = wrapped.elastic(world);
    const auto x = test::inputs_of({1, 2});
    const auto step = [&] {
      const auto compute = [&] { test::loss_of(wrapped.forward(x), x).backward(); };
      elastic->step(2, compute, [&] {
        wrapped.clip(*net, 1e-3);
        wrapped.step();
      });
    };
    auto all = fault_of_refusal("norm of the gradients in the second function of Elastic::step()", step);
    all += fault_of_refusal("it has left the job", step);
    return all + "end";
  });
  for (const auto& rank : ended) EXPECT_EQ(rank.text, "end");
}

// Nor is there a step to finish for others where there are none.
TEST(ElasticUpdate, ELA01_the_update_of_a_rank_that_is_alone_may_communicate) {
  const auto ended = test::run_ranks(1, [&](const World& world) -> std::string {
    auto model = std::make_shared<test::Net>();
    DistributedDataParallel parallel(model, world.group());
    torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(0.01));
    Elastic elastic(world, parallel, optimizer);
    const auto x = test::inputs_of({1, 2});
    double sum = 0;
    elastic.step(
        2, [&] { test::loss_of(parallel.forward(x), x).backward(); },
        [&] {
          optimizer.step();
          sum = world.all_reduce(1.0);
        });
    return fmt::format("{} of {} steps", sum, elastic.steps());
  });
  EXPECT_EQ(ended.front().text, "1 of 1 steps");
}

}  // namespace
}  // namespace shoal::elastic_update_test
