// What a training loop calls beside its strategy: metrics, messages, seeds, barriers, progress.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <pty.h>
#include <sys/ioctl.h>
#include <torch/types.h>
#include <torch/utils.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numeric>
#include <thread>

#include "shoal/error.h"
#include "shoal/metrics.h"
#include "shoal/progress.h"
#include "tests/support/shared_folder.h"
#include "tests/support/temp_folder.h"
#include "tests/support/world.h"

namespace shoal::test {
namespace {

TEST(AllReduceOfNumbers, sums_averages_and_compares_in_float64) {
  const int ranks = world().size();
  const double mine = 1.0 / 3 + world().rank();
  double sum = 0;
  for (int rank = 0; rank < ranks; ++rank) sum += 1.0 / 3 + rank;
  EXPECT_DOUBLE_EQ(world().all_reduce(mine), sum);
  EXPECT_DOUBLE_EQ(world().all_reduce(mine, ReduceOp::avg), sum / ranks);
  EXPECT_EQ(world().all_reduce(world().rank(), ReduceOp::max), ranks - 1);
  EXPECT_EQ(world().all_reduce(world().rank(), ReduceOp::min), 0);
}

TEST(AllReduceOfNumbers, integers_are_exact_up_to_2_to_53) {
  const int64_t most = int64_t{1} << 53;
  const auto mine = world().rank() == 0 ? most - (world().size() - 1) : 1;
  EXPECT_EQ(static_cast<int64_t>(world().all_reduce(static_cast<double>(mine))), most);
}

TEST(AllReduceOfNumbers, a_list_is_one_operation) {
  const auto before = group().statistics().calls;
  const double rank = world().rank();
  const auto sums = world().all_reduce({1.0, rank, 0.5 * rank});
  EXPECT_EQ(group().statistics().calls, before + 1);
  const double ranks = world().size();
  const double sum = ranks * (ranks - 1) / 2;
  EXPECT_THAT(sums, testing::ElementsAre(ranks, sum, 0.5 * sum));
  EXPECT_TRUE(world().all_reduce(std::vector<double>{}).empty());
}

TEST(AllReduceOfNumbers, lists_of_other_lengths_are_an_error_on_every_rank) {
  if (world().size() == 1) GTEST_SKIP() << "nobody to differ from";
  std::vector<int> ranks(world().size());
  std::iota(ranks.begin(), ranks.end(), 0);
  const auto some = group().subgroup(ranks);  // of no use afterwards
  EXPECT_THROW(some.all_reduce(std::vector<double>(world().rank() == 0 ? 1 : 0, 5.0)), DisagreeError);
}

// Ranks hold parts of different sizes; the mean of their means is another number.
TEST(MeanMetric, weighs_every_sample_once) {
  MeanMetric metric(group());
  std::vector<double> all;
  for (int rank = 0; rank < world().size(); ++rank) {
    for (int batch = 0; batch <= rank; ++batch) {
      const int samples = 1 + 2 * rank;
      double batch_sum = 0;
      for (int i = 0; i < samples; ++i) {
        all.push_back(0.25 * (rank + batch * i));
        batch_sum += all.back();
      }
      if (rank == world().rank()) metric.update(batch_sum / samples, samples);
    }
  }
  double sum = 0;
  for (const double value : all) sum += value;
  EXPECT_DOUBLE_EQ(metric.compute(), sum / static_cast<double>(all.size()));
}

TEST(MeanMetric, counts_of_tensors_are_exact) {
  MeanMetric accuracy(group());
  const int64_t mine = 1000 + world().rank();
  accuracy.update(at::arange(mine).remainder(3).eq(0));
  accuracy.update(at::zeros({0}, at::kBool));
  double right = 0, count = 0;
  for (int rank = 0; rank < world().size(); ++rank) {
    right += (1000 + rank + 2) / 3;
    count += 1000 + rank;
  }
  EXPECT_EQ(accuracy.compute(), right / count);
  EXPECT_EQ(accuracy.weight(), static_cast<double>(mine));
  accuracy.reset();
  accuracy.update(at::full({2}, 0.1, at::kFloat).to(at::kDouble));
  EXPECT_NEAR(accuracy.compute(), 0.1, 1e-8);
}

TEST(MeanMetric, refuses_what_has_no_mean) {
  MeanMetric metric(group());
  EXPECT_THROW(metric.update(1, -1), UsageError);
  EXPECT_THROW(metric.update(1, NAN), UsageError);
  EXPECT_THROW(metric.update(at::zeros({2}, at::kComplexFloat)), UsageError);
  metric.update(NAN, 0);  // a batch of padding only
  EXPECT_THROW(metric.compute(), UsageError) << "on every rank";
  if (world().rank() == 0) metric.update(3);
  EXPECT_EQ(metric.compute(), 3);
}

// What `act` writes to a stream of this process.
template <class Act>
std::string written(int stream, const std::string& path, const Act& act) {
  std::fflush(nullptr);
  const int before = dup(stream);
  std::FILE* file = std::fopen(path.c_str(), "w");
  dup2(fileno(file), stream);
  act();
  std::fflush(nullptr);
  dup2(before, stream);
  close(before);
  std::fclose(file);
  std::ifstream text(path);
  return {std::istreambuf_iterator<char>(text), {}};
}

std::string of_this_rank(const SharedFolder& folder) {
  return folder / ("rank-" + std::to_string(world().rank()));
}

TEST(World, print0_writes_one_line_on_rank0_only) {
  const SharedFolder folder;
  const auto text = written(STDOUT_FILENO, of_this_rank(folder), [] { world().print0("epoch", 3, "loss", 0.5); });
  EXPECT_EQ(text, world().rank() == 0 ? "epoch 3 loss 0.5\n" : "");
}

TEST(World, manual_seed_gives_ranks_numbers_of_their_own_every_time_the_same) {
  const auto drawn = [](uint64_t seed) {
    world().manual_seed(seed);
    return at::rand({4}, at::kDouble);
  };
  const auto mine = drawn(7);
  EXPECT_TRUE(drawn(7).equal(mine));
  EXPECT_FALSE(drawn(8).equal(mine));
  auto all = at::zeros({world().size() * 4}, at::kDouble);
  group().all_gather(all, mine).wait();
  for (int rank = 0; rank < world().size(); ++rank) {
    EXPECT_EQ(all.narrow(0, rank * 4, 4).equal(mine), rank == world().rank()) << rank;
  }
}

TEST(World, barrier_waits_for_the_last_rank) {
  const SharedFolder folder;
  if (world().rank() == world().size() - 1) {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    std::ofstream(folder / "late") << "here";
  }
  world().barrier();
  EXPECT_TRUE(std::filesystem::exists(folder / "late"));
}

// What `act` shows on a terminal.
template <class Act>
std::string shown(unsigned short columns, const Act& act) {
  int here = -1, terminal = -1;
  const winsize size{24, columns, 0, 0};
  if (openpty(&here, &terminal, nullptr, nullptr, &size) != 0) return "no pseudo terminal";
  const int before = dup(STDERR_FILENO);
  dup2(terminal, STDERR_FILENO);
  act();
  std::fflush(stderr);
  dup2(before, STDERR_FILENO);
  close(before);
  close(terminal);
  std::string text;
  for (char c = 0; read(here, &c, 1) == 1;) text += c;  // an error at the end
  close(here);
  return text;
}

TEST(ProgressBar, is_a_line_on_rank0s_terminal_that_goes) {
  const auto text = shown(120, [] {
    ProgressBar bar(world(), 200, {.unit = "samples", .unit_scale = 8});
    bar.update(50, "too early");
    std::this_thread::sleep_for(std::chrono::milliseconds(2100));
    bar.update(50, "loss 0.5");
  });
  if (world().rank() != 0) {
    EXPECT_EQ(text, "");
    return;
  }
  EXPECT_THAT(text, testing::StartsWith("\r\x1b[K[============            ]  50 %  step 100/200  "));
  EXPECT_THAT(text, testing::HasSubstr(" samples/s  loss 0.5  0:02 left"));
  EXPECT_THAT(text, testing::EndsWith("\r\x1b[K"));
  EXPECT_THAT(text, testing::Not(testing::HasSubstr("too early")));
}

// What `act` writes into a file in the place of standard error.
template <class Act>
std::string written(const Act& act) {
  const TempFolder folder;
  const int file = open(folder.file("log").c_str(), O_CREAT | O_RDWR, 0600);
  const int before = dup(STDERR_FILENO);
  dup2(file, STDERR_FILENO);
  act();
  std::fflush(stderr);
  dup2(before, STDERR_FILENO);
  close(before);
  close(file);
  std::ifstream text(folder.file("log"));
  return {std::istreambuf_iterator<char>(text), {}};
}

TEST(ProgressBar, a_file_ends_with_a_line_at_100_percent) {
  if (world().rank() != 0) return;
  const auto text = written([] {
    ProgressBar bar(4, {.unit = "samples"});
    bar.update(1, "too early");
    std::this_thread::sleep_for(std::chrono::milliseconds(2100));
    bar.update(2, "within ten seconds");
    bar.update(1, "loss 0.5");
  });
  EXPECT_THAT(text, testing::MatchesRegex("100 %  step 4/4  [0-9.]+ samples/s  loss 0.5  0:00 left\n"));
  EXPECT_EQ(written([] {
              ProgressBar bar(2);
              bar.update(2);
            }),
            "")
      << "short loops print nothing";
}

// A longer line would leave its first row behind with each redraw.
TEST(ProgressBar, fits_a_narrow_terminal) {
  if (world().rank() != 0) return;
  for (const unsigned short columns : {80, 40}) {
    const auto text = shown(columns, [] {
      ProgressBar bar(200, {.unit = "samples", .unit_scale = 8});
      std::this_thread::sleep_for(std::chrono::milliseconds(2100));
      bar.update(100, "loss 0.5  eval loss 0.61");
    });
    const std::string start = "\r\x1b[K";
    ASSERT_THAT(text, testing::StartsWith(start));
    const auto line = text.substr(start.size(), text.find('\r', 1) - start.size());
    EXPECT_LT(line.size(), columns) << line;
    EXPECT_THAT(line, testing::HasSubstr("50 %  step 100/200"));
  }
}

}  // namespace
}  // namespace shoal::test
