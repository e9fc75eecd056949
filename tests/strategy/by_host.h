#pragma once
// Ranks on several hosts, of which each has all shards.

#include <gmock/gmock.h>
#include <torch/optim/adam.h>

#include "shoal/zero.h"
#include "tests/support/forked_hosts.h"
#include "tests/support/models.h"

namespace shoal::by_host {

using Adam = OSS<torch::optim::Adam>;
using Parallel = ShardedDataParallel<test::MlpImpl>;

inline const torch::optim::AdamOptions adam(1e-2);
inline constexpr int64_t micro_batches = 2;
inline constexpr double max_norm = 0.05;
inline const std::vector<std::vector<int>> kinds{{2, 2}, {1, 2}, {2, 1}, {3}, {1, 1, 1}};

class ByHost : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!test::ForkedHosts::possible()) GTEST_SKIP() << "this system does not let a process make namespaces";
  }
};

inline void run(const std::vector<int>& hosts, const std::function<std::string(const World&)>& body,
                const ::testing::Matcher<const std::string&>& expected = ::testing::StrEq("")) {
  test::ForkedHosts job(hosts, [&](const World& world) {
    alarm(40);
    return body(world);
  });
  for (const auto& one : job.wait(50)) EXPECT_THAT(one.text, expected) << "hosts " << ::testing::PrintToString(hosts);
}

inline test::Mlp model_of(int seed, at::ScalarType dtype = at::kDouble) {
  torch::manual_seed(seed);
  return test::Mlp(12, 16, 5, dtype);
}

}  // namespace shoal::by_host
