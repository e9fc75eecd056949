#pragma once
// Errors that ranks which differ get alike, and within two seconds.

#include <gmock/gmock.h>
#include <torch/optim/sgd.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "shoal/error.h"
#include "shoal/optimizer_recipe.h"
#include "tests/support/world.h"

namespace shoal::test::mismatch {

inline bool odd_one() {
  return group().rank() == group().size() - 1;
}

inline std::string odd_name() {
  return "rank " + std::to_string(group().size() - 1);
}

// Every rank calls `act` and gets a DisagreeError with the same sentence in time; the world stays usable.
inline void expect_named(const std::function<void()>& act, const std::vector<std::string>& parts) {
  group().barrier().wait();
  const auto start = std::chrono::steady_clock::now();
  std::string text = "(nothing was thrown)";
  try {
    act();
  } catch (const DisagreeError& error) {
    text = error.what();
  }
  EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), 2);
  for (const auto& part : parts) EXPECT_THAT(text, ::testing::HasSubstr(part));
  const auto hash = static_cast<int64_t>(std::hash<std::string>()(text));
  auto lowest = at::full({1}, hash, at::kLong);
  group().all_reduce(lowest, ReduceOp::min).wait();
  EXPECT_EQ(lowest.item<int64_t>(), hash) << "ranks say different things: " << text;
}

class Mismatch : public ::testing::Test {
 protected:
  void SetUp() override {
    if (group().size() == 1) GTEST_SKIP() << "one rank agrees with itself";
  }
};

inline OptimizerRecipe decentralized_sgd() {
  return optimizer_recipe<torch::optim::SGD>(torch::optim::SGDOptions(0.1));
}

inline const std::vector<std::string>& strategies() {
  static const std::vector<std::string> all{"ddp", "zero1", "zero2", "megatron", "fsdp"};
  return all;
}

}  // namespace shoal::test::mismatch
