// BEY17: one copy per host, written by its owners and read by all ranks.

#include "shoal/detail/host_shared_buffer.h"

#include <malloc.h>

#include "shoal/error.h"
#include "shoal/group.h"
#include "tests/support/page_meter.h"
#include "tests/support/world.h"

namespace shoal::host_shared_buffer_test {
namespace {

using test::group;

std::vector<Range> equal_ranges(int64_t numel) {
  std::vector<Range> owners;
  for (int rank = 0; rank < group().size(); ++rank) {
    owners.push_back({numel * rank / group().size(), numel * (rank + 1) / group().size()});
  }
  return owners;
}

TEST(HostSharedBuffer, readers_see_what_the_owners_have_published) {
  const int64_t numel = 10007;
  auto log = std::make_shared<CallLog>();
  auto buffer = group().recorded(log).allocate_host_shared(numel, at::kFloat, equal_ranges(numel));
  log->clear();
  EXPECT_EQ(buffer.tensor().abs().sum().item<float>(), 0);
  group().barrier().wait();  // before any rank writes
  for (int64_t step = 1; step <= 50; ++step) {
    buffer.own().fill_(static_cast<double>(step * 100 + group().rank()));
    buffer.publish(step);
    buffer.wait_published(step);
    for (int rank = 0; rank < group().size(); ++rank) {
      const auto& range = buffer.owners()[rank];
      const auto part = buffer.tensor().narrow(0, range.begin, range.size());
      ASSERT_TRUE((part == step * 100 + rank).all().item<bool>()) << "step " << step << ", rank " << rank;
    }
    group().barrier().wait();  // no rank reads any more
  }
  if (buffer.shared()) {
    EXPECT_TRUE(log->records().empty()) << "nothing may move";
  }
}

TEST(HostSharedBuffer, waits_for_the_owners_of_a_range_only) {
  if (!group().allocate_host_shared(8, at::kFloat, equal_ranges(8)).shared())
    GTEST_SKIP() << "without shared memory all move";
  auto buffer = group().allocate_host_shared(1000, at::kDouble, equal_ranges(1000));
  if (group().rank() == 0) {
    buffer.own().fill_(5);
    buffer.publish(1);
  }
  buffer.wait_published(1, buffer.owners()[0]);
  EXPECT_EQ(buffer.tensor()[0].item<double>(), 5);
  group().barrier().wait();
  if (group().rank() != 0) buffer.publish(1);
  buffer.wait_published(1);
}

TEST(HostSharedBuffer, takes_unequal_and_empty_ranges_and_gaps) {
  std::vector<Range> owners(group().size());
  owners.back() = {3, 9};
  auto buffer = group().allocate_host_shared(12, at::kInt, owners);
  buffer.own().fill_(7);
  buffer.publish(4);
  buffer.wait_published(4);
  EXPECT_EQ(buffer.tensor().sum().item<int64_t>(), 6 * 7);
}

TEST(HostSharedBuffer, refuses_ranges_that_overlap_or_leave_the_buffer_and_old_versions) {
  std::vector<Range> outside(group().size());
  outside[0] = {0, 11};
  EXPECT_THROW(group().allocate_host_shared(10, at::kFloat, outside), UsageError);
  EXPECT_THROW(group().allocate_host_shared(10, at::kFloat, std::vector<Range>(group().size() + 1)), UsageError);
  if (group().size() > 1) {
    std::vector<Range> overlapping(group().size());
    overlapping[0] = {0, 6};
    overlapping[1] = {5, 10};
    EXPECT_THROW(group().allocate_host_shared(10, at::kFloat, overlapping), UsageError);
  }
  auto buffer = group().allocate_host_shared(10, at::kFloat, equal_ranges(10));
  buffer.publish(2);
  EXPECT_THROW(buffer.publish(2), UsageError);
  buffer.wait_published(2);
}

TEST(HostSharedBuffer, BEY17_takes_the_memory_of_one_copy) {
  constexpr double mib = 1 << 20;
  const int64_t numel = 16 << 20;  // 64 MiB of float32
  // What earlier tests have left is freed now: memory of messages by an operation after all ranks have read them.
  for (int meeting = 0; meeting < 2; ++meeting) group().barrier().wait();
  malloc_trim(0);
  const auto before = test::proportional_bytes();
  auto buffer = group().allocate_host_shared(numel, at::kFloat, equal_ranges(numel));
  buffer.own().fill_(1);
  buffer.publish(1);
  buffer.wait_published(1);
  EXPECT_EQ(buffer.tensor().sum().item<double>(), static_cast<double>(numel));
  group().barrier().wait();
  const double grown = static_cast<double>(test::proportional_bytes() - before) / mib;
  const double copies = buffer.shared() ? 1.0 / group().size() : 1;
  EXPECT_NEAR(grown, 64 * copies, 4);
  group().barrier().wait();
}

}  // namespace
}  // namespace shoal::host_shared_buffer_test
