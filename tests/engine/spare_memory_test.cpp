// Memory of buckets that others use again.

#include "engine/buckets/spare_memory.h"

#include <gtest/gtest.h>

#include <deque>

#include "comm/transport/dry_run.h"
#include "engine/buckets/common_sizes.h"

namespace shoal::spare_memory_test {
namespace {

// Takes buffers of these sizes in turn, three at a time, and returns how many were fresh after two rounds.
int fresh_buffers(SpareMemory spare, const std::vector<int64_t>& sizes, int64_t* most_alive) {
  const Group group = dry_run_group(2);
  std::deque<at::Tensor> alive;
  int fresh = 0;
  for (int round = 0; round < 4; ++round) {
    for (const auto numel : sizes) {
      if (alive.size() == 3) {
        spare.put(alive.front());
        alive.pop_front();
      }
      if (round > 1 && !spare.fits(numel, at::kFloat)) ++fresh;
      alive.push_back(spare.take(group, numel, at::kFloat));
      int64_t sum = 0;
      for (const auto& memory : alive) sum += memory.numel();
      *most_alive = std::max(*most_alive, sum);
      EXPECT_GE(alive.back().numel(), numel);
    }
  }
  return fresh;
}

// The matrices of a block of GPT with width 1024, in Ki elements: they come in turns, so that no two in a row are
// alike.
TEST(SpareMemory, sizes_that_alternate_use_each_others_memory) {
  const std::vector<int64_t> sizes{4096, 4096, 1024, 3072};
  int64_t most = 0;
  EXPECT_EQ(fresh_buffers(SpareMemory(4, true), sizes, &most), 0);
  EXPECT_LE(most, 3 * 4096) << "three of the largest";
  EXPECT_GT(fresh_buffers(SpareMemory(), sizes, &most), 4) << "with buffers that fit closely, most are fresh";
}

// The buckets of GPT with width 512, of 4 MiB and a trailer. The norms' is just too small for one of them, and not for
// the next.
TEST(SpareMemory, sizes_that_nearly_fit_are_one) {
  const std::vector<int64_t> numels{197632, 1049088, 1050624, 1050112, 1024};
  EXPECT_EQ(common_sizes(numels, 1 << 20, 4), std::vector<int64_t>(5, 1050624));
  EXPECT_EQ(common_sizes({100, 1000, 1130}, 0, 4), (std::vector<int64_t>{100, 1130, 1130})) << "not ten times as large";
  EXPECT_EQ(common_sizes({100, 380, 425}, 0, 4), (std::vector<int64_t>{425, 425, 425})) << "380 and then an eighth";
  EXPECT_EQ(common_sizes({100, 380, 600}, 0, 4), (std::vector<int64_t>{380, 600, 600}));
  EXPECT_TRUE(common_sizes({}, 0, 4).empty());
}

TEST(SpareMemory, the_smallest_buffer_that_fits_is_taken_and_none_that_is_much_too_large) {
  const Group group = dry_run_group(2);
  SpareMemory spare(4, /*keeps_larger=*/true);
  for (const int64_t numel : {100, 30, 60}) spare.put(at::empty({numel}));
  EXPECT_FALSE(spare.fits(20, at::kDouble));
  EXPECT_EQ(spare.take(group, 20, at::kFloat).numel(), 30);
  EXPECT_EQ(spare.take(group, 24, at::kFloat).numel(), 60) << "4 times 24 are 96";
  EXPECT_FALSE(spare.fits(24, at::kFloat));
  EXPECT_EQ(spare.take(group, 24, at::kFloat).numel(), 24);
  EXPECT_TRUE(spare.fits(100, at::kFloat)) << "a small need leaves what is too large for it";
  EXPECT_EQ(spare.take(group, 400, at::kFloat).numel(), 400);
  EXPECT_FALSE(spare.fits(100, at::kFloat)) << "a large one frees what does not fit";
  spare.put(at::empty({300}));
  EXPECT_FALSE(spare.fits(70, at::kFloat)) << "a buffer for 300 does not serve 70, whatever a fresh one would have";
  EXPECT_EQ(spare.take(group, 70, at::kFloat, 290).numel(), 290);
  spare.put(at::empty({290}));
  EXPECT_TRUE(spare.fits(1, at::kFloat, 290)) << "as large as a fresh one would be";
  EXPECT_EQ(spare.take(group, 1, at::kFloat, 290).numel(), 290);
  spare.put(at::empty({500}));
  spare.shrink(1);
  EXPECT_EQ(spare.take(group, 290, at::kFloat).numel(), 500) << "the largest stays";
}

}  // namespace
}  // namespace shoal::spare_memory_test
