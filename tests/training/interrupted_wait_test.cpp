// Signal handlers of a program run while a rank waits for others (WorldOptions::while_waiting): what they may throw,
// and what they may use.

#include <gmock/gmock.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <stdexcept>
#include <utility>

#include "shoal/error.h"
#include "shoal/training.h"
#include "tests/support/forked_ranks.h"
#include "tests/support/models.h"

namespace shoal::interrupted_wait_test {
namespace {

using testing::HasSubstr;

std::function<void()> handler;  // of the process, called once in a wait

// How often a handler has begun, in all ranks, which share it.
std::atomic<int>& begun() {
  static auto* count = static_cast<std::atomic<int>*>(
      mmap(nullptr, sizeof(std::atomic<int>), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  return *count;
}

// Until the handler of another rank has begun, or 20 s.
void keep_waiting() {
  for (int i = 0; i < 2000 && begun() == 0; ++i) usleep(10'000);
}

WorldOptions options_over(const std::string& transport) {
  WorldOptions options;
  options.transport = transport;
  options.while_waiting = [] {
    if (!handler) return;
    ++begun();
    std::exchange(handler, {})();
  };
  return options;
}

Training<test::MlpImpl> training_of(const std::string& strategy, const World& world) {
  return make_training(strategy, test::seeded(3), optimizer_recipe<FusedAdamW>(torch::optim::AdamWOptions(1e-2)),
                       world.group());
}

// The handler throws on rank 0, which catches that and goes on with the next step, as if nothing had been.
std::string go_on_after_interruption(const World& world, const std::string& strategy) {
  const int rank = world.rank();
  auto training = training_of(strategy, world);
  std::string told;
  for (int step = 0; step < 5; ++step) {
    training->zero_grad();
    try {
      const auto loss = training.forward(test::batch(rank, step)).pow(2).mean();
      if (step == 2 && rank == 1) keep_waiting();
      if (step == 2 && rank == 0) handler = [] { throw std::runtime_error("interrupted"); };
      training->backward(loss);
      handler = {};
      training->step();
    } catch (const Error& error) {
      return told + error.what();
    } catch (const std::runtime_error& error) {
      told += fmt::format("{}; ", error.what());
    }
  }
  return told + "nothing was noticed";
}

TEST(InterruptedWait, ranks_do_not_go_on_with_parameters_that_differ) {
  for (const std::string strategy : {"ddp", "zero1", "zero2", "megatron", "fsdp"}) {
    begun() = 0;
    const auto ended = test::run_ranks(
        2, [&](const World& world) { return go_on_after_interruption(world, strategy); }, {}, options_over("auto"));
    EXPECT_THAT(ended[0].text, testing::StartsWith("interrupted; ")) << strategy;
    for (const auto& rank : ended) {
      EXPECT_THAT(rank.text, testing::Not(HasSubstr("nothing was noticed"))) << strategy;
      if (strategy == "ddp") EXPECT_THAT(rank.text, HasSubstr("ended an earlier backward of rank 0 while it waited"));
    }
  }
}

// An operator on parameters that others hold would wait for them within the wait.
TEST(InterruptedWait, a_handler_cannot_use_parameters_that_are_being_gathered) {
  const auto body = [](const World& world) -> std::string {
    auto training = training_of("fsdp", world);
    const auto parameters = training.module()->parameters();
    const auto train = [&](int step) {
      training->backward(training.forward(test::batch(world.rank(), step)).pow(2).mean());
      training->step();
      training->zero_grad();
    };
    for (int step = 0; step < 2; ++step) train(step);
    if (world.rank() == 1) keep_waiting();
    if (world.rank() == 0) handler = [&] { parameters.front().norm(); };
    try {
      train(2);
      return "no error";
    } catch (const Error& error) {
      return error.what();
    }
  };
  begun() = 0;
  const auto ended = test::run_ranks(2, body, {}, options_over("tcp"));
  EXPECT_THAT(ended[0].text, HasSubstr("a signal handler used parameters of a FullyShardedDataParallel"));
  EXPECT_THAT(ended[1].text, testing::Not("no error"));
}

}  // namespace
}  // namespace shoal::interrupted_wait_test
