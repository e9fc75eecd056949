// A global batch that stays as ranks are lost: what does not fit it, and an exception in a share.

#include <gtest/gtest.h>

#include "tests/elastic/elastic_run.h"
#include "tests/elastic/elastic_training.h"
#include "tests/support/refusal.h"

namespace shoal::elastic_batch_errors_test {
namespace {

TEST(ElasticBatch, ELA05_what_does_not_fit_a_global_batch_is_refused) {
  const auto refusal = [](int64_t batch, int64_t step, bool with_sampler) {
    const auto ended = test::run_ranks(2, [&](const World& world) {
      alarm(30);
      torch::nn::Linear model(4, 1);
      DistributedDataParallel parallel(model, world.group());
      torch::optim::Adam optimizer(model->parameters());
      DistributedSampler sampler(20, world.group());
      const ElasticOptions options{.keep_global_batch = batch};
      if (!with_sampler) {
        Elastic elastic(world, parallel, optimizer, options);
        return std::string("no error");
      }
      Elastic elastic(world, parallel, optimizer, sampler, options);
      elastic.in_epoch();
      if (step == 0) return fmt::format("{}", elastic.batch_size());
      const auto x = at::ones({step, 4});
      elastic.step(
          step, [&] { parallel.forward(x).mean().backward(); }, [] {});
      return std::string("no error");
    });
    EXPECT_EQ(ended[0].text, ended[1].text);
    return ended[0].text;
  };
  EXPECT_NE(refusal(5, 1, true).find("keep_global_batch is 5: give a multiple of 2"), std::string::npos);
  EXPECT_NE(refusal(8, 4, false).find("keep_global_batch needs a sampler"), std::string::npos);
  EXPECT_NE(refusal(8, 3, true).find("3 samples in a step, and with keep_global_batch = 8 this rank has 4"),
            std::string::npos);
  EXPECT_EQ(refusal(8, 4, true), "no error");
  EXPECT_EQ(refusal(8, 0, true), "4");
  EXPECT_NE(refusal(0, 0, true).find("batch_size() is for keep_global_batch"), std::string::npos);
}

// Three ranks' shares on two: a plain backward after a step that the program's own exception ended is a mean over two.
TEST(ElasticBatch, ELA05_an_exception_in_compute_leaves_no_shares_behind) {
  const auto ended = test::run_ranks(3, [](const World& world) -> std::string {
    alarm(30);
    torch::nn::Linear model(4, 1);
    DistributedDataParallel parallel(model, world.group());
    torch::optim::Adam optimizer(model->parameters());
    DistributedSampler sampler(60, world.group());
    const auto self = world.rank();
    const auto backward = [&] { parallel.forward(at::ones({1, 4})).sum().backward(); };
    {
      Elastic elastic(world, parallel, optimizer, sampler,
                      {.keep_global_batch = 6, .on_change = [](const ElasticChange&) {}});
      bool fails = false;
      const auto compute = [&](int64_t, int64_t) {
        if (self == 2) std::raise(SIGKILL);
        if (fails) throw std::out_of_range("of the program");
        backward();
      };
      while (elastic.steps() == 0) {
        elastic.in_epoch();
        elastic.step(elastic.batch_size(), compute, [] {});
        optimizer.zero_grad();
      }
      elastic.in_epoch();
      fails = true;
      try {
        elastic.step(elastic.batch_size(), compute, [] {});
        return "no error";
      } catch (const std::out_of_range&) {
      }
    }
    optimizer.zero_grad();
    backward();
    return fmt::format("{}", model->bias.grad().item<float>());
  });
  EXPECT_EQ(ended[0].text, "1");
  EXPECT_EQ(ended[1].text, "1");
}

}  // namespace
}  // namespace shoal::elastic_batch_errors_test
