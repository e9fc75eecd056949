// Memory, descriptors and threads of groups that have gone.

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "shoal/group.h"
#include "tests/support/world.h"

namespace shoal::host_lifetime_test {
namespace {

using test::world;

int entries(const char* folder) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) count += entry.exists() ? 1 : 1;
  return count;
}

int64_t shared_kib() {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("RssShmem:", 0) == 0) return std::stoll(line.substr(9));
  }
  return -1;
}

TEST(HostLifetime, a_hundred_groups_leave_nothing_behind) {
  const auto cycle = [] {
    const auto group = test::fresh_group();
    auto shared = group.allocate(100000, at::kFloat).fill_(1);
    group.all_reduce(shared).wait();
    auto staged = at::ones({100000});
    group.all_reduce(staged).wait();
    const int next = (group.rank() + 1) % group.size();
    auto sent = group.send(staged, next);
    group.recv(at::empty_like(staged), (group.rank() + group.size() - 1) % group.size()).wait();
    sent.wait();
  };
  if (world().group().transport() != "host") GTEST_SKIP() << "of the host transport";
  for (int i = 0; i < 50; ++i) cycle();
  world().group().barrier().wait();
  const auto descriptors = entries("/proc/self/fd");
  const auto threads = entries("/proc/self/task");
  const auto shared = shared_kib();
  for (int i = 0; i < 100; ++i) cycle();
  world().group().barrier().wait();
  EXPECT_EQ(entries("/proc/self/fd"), descriptors);
  EXPECT_EQ(entries("/proc/self/task"), threads);
  // The memory of one cycle may be present or not; a leak would be a hundred times larger.
  EXPECT_LT(shared_kib() - shared, 16 << 10);
}

}  // namespace
}  // namespace shoal::host_lifetime_test
