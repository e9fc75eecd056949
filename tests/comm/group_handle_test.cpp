// Groups as handles: their ranks, how long they live, and what they refuse and tell.

#include "shoal/group.h"

#include <csignal>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <vector>

#include "shoal/error.h"
#include "tests/support/world.h"

namespace shoal::group_handle_test {
namespace {

using test::group;

TEST(Group, subgroups_number_their_ranks_anew) {
  const int ranks = group().size();
  std::vector<int> mine;
  for (int rank = group().rank() % 2; rank < ranks; rank += 2) mine.push_back(rank);
  const auto half = group().subgroup(mine);
  EXPECT_EQ(half.size(), static_cast<int>(mine.size()));
  EXPECT_EQ(half.world_rank(half.rank()), group().rank());
  auto tensor = at::full({1}, group().rank(), at::kLong);
  half.all_reduce(tensor).wait();
  EXPECT_EQ(tensor.item<int64_t>(), std::accumulate(mine.begin(), mine.end(), 0));
  EXPECT_EQ(group().by_host().size(), ranks);
}

// An early rank must not close its end before a late one has connected.
TEST(Group, may_go_as_soon_as_it_is_made) {
  std::vector<int> everyone(group().size());
  std::iota(everyone.begin(), everyone.end(), 0);
  for (int i = 0; i < 30; ++i) group().subgroup(everyone);
}

TEST(Group, may_go_as_soon_as_its_last_operation_is_done) {
  std::vector<int> everyone(group().size());
  std::iota(everyone.begin(), everyone.end(), 0);
  for (int i = 0; i < 30; ++i) {
    const auto part = at::full({64}, group().rank(), at::kByte);
    auto all = at::empty({64 * group().size()}, at::kByte);
    group().subgroup(everyone).all_gather(all, part).wait();
    for (int rank = 0; rank < group().size(); ++rank) EXPECT_EQ(all[64 * rank].item<int>(), rank);
  }
}

// A rank that is ahead of the others keeps one or two groups a little longer.
TEST(Group, leaves_nothing_behind_when_all_ranks_have_let_go_of_it) {
  std::vector<int> everyone(group().size());
  std::iota(everyone.begin(), everyone.end(), 0);
  const auto descriptors_after = [&](int groups) {
    for (int i = 0; i < groups; ++i) group().subgroup(everyone).barrier().wait();
    group().barrier().wait();
    const std::filesystem::directory_iterator entries("/proc/self/fd");
    return std::distance(begin(entries), end(entries));
  };
  const auto before = descriptors_after(5);
  EXPECT_LT(descriptors_after(40) - before, 40);
}

TEST(Group, allocate_gives_aligned_zeros) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    const auto memory = group().allocate(77, at::TensorOptions(dtype));
    EXPECT_EQ(memory.numel(), 77);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.data_ptr()) % 128, 0U);
    EXPECT_EQ(memory.abs().sum().item<double>(), 0);
  }
}

TEST(CallLog, records_what_passes_through_the_handle) {
  auto log = std::make_shared<CallLog>();
  const auto recorded = group().recorded(log);
  recorded.all_reduce(at::ones({256}), ReduceOp::max, {7, 2, "test"}).wait();
  group().barrier().wait();
  recorded.broadcast(at::ones({10}, at::kDouble), 0).wait();
  const auto records = log->records();
  ASSERT_EQ(records.size(), 2U);
  EXPECT_EQ(records[0].op, Op::all_reduce);
  EXPECT_EQ(records[0].reduce, ReduceOp::max);
  EXPECT_EQ(records[0].bytes, 1024);
  EXPECT_EQ(records[0].label.step, 7);
  EXPECT_EQ(records[0].label.bucket, 2);
  EXPECT_EQ(records[0].group, "world");
  EXPECT_GE(records[0].finished, records[0].issued);
  EXPECT_EQ(log->bytes(Op::broadcast), 80);
  EXPECT_EQ(log->count(Op::barrier), 0);
}

TEST(Agree, names_the_first_difference_and_both_ranks) {
  std::vector<std::string> items = {"a float32 [3]", "b float32 [4]", "c float32 [5]"};
  agree(group(), "the model", items);
  if (group().size() == 1) return;
  const int odd = group().size() - 1;
  if (group().rank() == odd) items[1] = "b float32 [5]";
  try {
    agree(group(), "the model", items);
    FAIL() << "no error";
  } catch (const DisagreeError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("rank 0 has b float32 [4], rank " + std::to_string(odd) + " has b float32 [5]"),
              std::string::npos)
        << text;
  }
  if (group().rank() == odd) items = {"a float32 [3]"};
  EXPECT_THROW(agree(group(), "the model", items), DisagreeError);
}

// Gloo writes without MSG_NOSIGNAL: in a thread that takes SIGPIPE, a rank that has ended would end this one without a
// word.
TEST(Group, no_thread_of_gloo_takes_sigpipe) {
  if (group().transport() != "gloo") GTEST_SKIP() << "over Gloo";
  group().barrier().wait();
  int threads = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm") >> std::ws, name);
    if (name.find("gloo") == std::string::npos) continue;
    ++threads;
    std::ifstream status(task.path() / "status");
    std::string line;
    while (std::getline(status, line) && line.rfind("SigBlk:", 0) != 0) continue;
    const auto blocked = std::stoull(line.substr(line.find('\t') + 1), nullptr, 16);
    EXPECT_NE(blocked & (1ULL << (SIGPIPE - 1)), 0U) << name;
  }
  EXPECT_GT(threads, 0);
}

}  // namespace
}  // namespace shoal::group_handle_test
