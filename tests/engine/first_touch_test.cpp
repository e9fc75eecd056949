// Detection of the first operator that uses certain memory.

#include "engine/paging/first_touch.h"

#include <gtest/gtest.h>
#include <torch/types.h>

#include <atomic>
#include <future>
#include <stdexcept>
#include <thread>
#include <vector>

namespace shoal {
namespace {

TEST(FirstTouch, tells_once_per_arming_before_the_operator_runs) {
  auto memory = watchable(at::zeros({4}));
  std::vector<size_t> told;
  FirstTouch watch([&](size_t index) {
    told.push_back(index);
    memory.fill_(7);
  });
  watch.arm(3, memory, "away");
  const auto other = at::ones({4}) + 1;
  EXPECT_TRUE(told.empty());
  EXPECT_EQ(memory.narrow(0, 1, 2).sum().item<float>(), 14) << "told before";
  memory.add_(1);
  EXPECT_EQ(told, (std::vector<size_t>{3}));
  watch.arm(3, memory, "away");
  memory.add_(1);
  EXPECT_EQ(told.size(), 2U);
}

TEST(FirstTouch, one_touch_counts_for_all_storages_of_a_memory_and_all_memories_of_a_storage) {
  const auto a = watchable(at::zeros({4})), b = watchable(at::zeros({4})), common = watchable(at::zeros({4}));
  std::vector<size_t> told;
  FirstTouch watch([&](size_t index) { told.push_back(index); });
  watch.arm(0, a, "away");
  watch.arm(0, common, "away");
  watch.arm(1, b, "away");
  watch.arm(1, common, "away");
  a.add_(1);
  EXPECT_EQ(told, (std::vector<size_t>{0}));
  common.add_(1);
  b.add_(1);
  EXPECT_EQ(told, (std::vector<size_t>{0, 1}));
  watch.arm(0, common, "away");
  watch.arm(1, common, "away");
  common.add_(1);
  EXPECT_EQ(told, (std::vector<size_t>{0, 1, 0, 1}));
  watch.arm(0, a, "away");
  watch.touch_all();
  EXPECT_EQ(told.size(), 5U);
}

TEST(FirstTouch, other_threads_wait_for_the_same_memory_and_for_no_other) {
  const auto memory = watchable(at::zeros({4})), other = watchable(at::zeros({4}));
  std::promise<void> told;
  std::promise<void> go_on;
  std::atomic<bool> done = false;
  FirstTouch watch([&](size_t) {
    told.set_value();
    go_on.get_future().wait();
    done = true;
  });
  watch.arm(0, memory, "away");
  std::thread first([&] { memory.add_(1); });
  told.get_future().wait();
  auto elsewhere = std::async(std::launch::async, [&] { other.add_(1); });
  EXPECT_EQ(elsewhere.wait_for(std::chrono::seconds(10)), std::future_status::ready);
  auto here = std::async(std::launch::async, [&] {
    at::full_like(memory, 0);  // uses it, but neither reads nor writes what the other thread writes
    return done.load();
  });
  EXPECT_EQ(here.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout);
  go_on.set_value();
  EXPECT_TRUE(here.get());
  first.join();
  EXPECT_EQ(memory.sum().item<float>(), 4);
}

TEST(FirstTouch, what_throws_is_thrown_by_the_operator_and_not_tried_again) {
  const auto memory = watchable(at::zeros({4}));
  int told = 0;
  FirstTouch watch([&](size_t) {
    ++told;
    throw std::runtime_error("a peer is gone");
  });
  watch.arm(0, memory, "away");
  EXPECT_THROW(watch.touch_all(), std::runtime_error);
  memory.add_(1);
  watch.arm(0, memory, "away");
  EXPECT_THROW(memory.add_(1), std::runtime_error);
  memory.add_(1);
  EXPECT_EQ(memory.sum().item<float>(), 8);
  EXPECT_EQ(told, 2);
}

}  // namespace
}  // namespace shoal
