// Ranks killed at any moment of saves into one folder (BEY06).
//
// SHOAL_KILLS (default 20) sets the number of kills.

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <random>
#include <set>
#include <thread>

#include "base/environment.h"
#include "checkpoint/folder.h"
#include "checkpoint/loading/reader.h"
#include "checkpoint/saving/saver.h"
#include "shoal/error.h"
#include "tests/support/forked_ranks.h"
#include "tests/support/temp_folder.h"

namespace shoal::save_kill_test {
namespace {

namespace fs = std::filesystem;

constexpr int64_t numel = 1 << 20;

// Every element encodes its step, so that parts of two steps cannot be taken for one.
std::vector<NamedSlice> slices_of(int64_t step, int rank, int ranks) {
  std::vector<NamedSlice> slices;
  for (int tensor = 0; tensor < 3; ++tensor) {
    const Range range{numel * rank / ranks, numel * (rank + 1) / ranks};
    slices.push_back({.name = fmt::format("tensor{}", tensor),
                      .shape = {1024, numel / 1024},
                      .range = range,
                      .values = at::full({range.size()}, step * 10 + tensor, at::kLong)});
  }
  slices.push_back(whole_slice("bias", at::full({5}, step, at::kLong)));
  return slices;
}

int64_t check_complete(const fs::path& root) {
  const CheckpointReader reader(root);
  EXPECT_EQ(reader.verify().unchecked, 0);
  const auto step = reader.index().step;
  for (int tensor = 0; tensor < 3; ++tensor) {
    EXPECT_TRUE((reader.read(fmt::format("tensor{}", tensor)) == step * 10 + tensor).all().item<bool>());
  }
  EXPECT_TRUE((reader.read("bias") == step).all().item<bool>());
  EXPECT_EQ(reader.index().global_state["step"], step);
  return step;
}

int kills() {
  return std::stoi(process_environment()("SHOAL_KILLS").value_or("20"));
}

TEST(SaveKill, BEY06_whichever_rank_dies_whenever_a_checkpoint_is_there) {
  const test::TempFolder folder;
  const auto root = folder.path() / "run";
  at::set_num_threads(1);  // children of a process with threads cannot start any
  std::mt19937 random(11);
  int64_t last = 0;
  int newer = 0, named = 0, survivors = 0;
  // Kills are spread over the duration of three saves.
  const auto begun = std::chrono::steady_clock::now();
  test::run_ranks(4, [&](const World& world) -> std::string {
    CheckpointSaver saver(world.group(), root);
    for (int i = 0; i < 3; ++i) {
      saver.save({.step = 0,
                  .strategy = "test",
                  .slices = slices_of(0, world.rank(), world.size()),
                  .global_state = {{"step", 0}}});
    }
    return "";
  });
  const auto window = std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - begun);
  for (int trial = 0; trial < kills(); ++trial) {
    const int ranks = 1 + static_cast<int>(random() % 4);
    const bool all = random() % 4 == 0;
    const int victim = static_cast<int>(random() % ranks);
    const bool async = random() % 2 == 0;
    const auto keep_last = static_cast<int64_t>(random() % 3);
    const bool same_step = random() % 4 == 0;  // replaces the same checkpoint repeatedly
    const auto microseconds = random() % static_cast<unsigned>(window.count());
    SCOPED_TRACE(fmt::format("trial {}: rank {} of {} after {} us", trial, all ? -1 : victim, ranks, microseconds));
    const auto ended = test::run_ranks(ranks, [&](const World& world) -> std::string {
      CheckpointSaver saver(world.group(), root, {.keep_last = keep_last});
      world.group().barrier().wait();
      if (all || world.rank() == victim) {
        std::thread([microseconds] {
          std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
          std::raise(SIGKILL);
        }).detach();
      }
      for (auto step = last + 1;; step += same_step ? 0 : 1) {
        const CheckpointContents contents{.step = step,
                                          .strategy = "test",
                                          .slices = slices_of(step, world.rank(), world.size()),
                                          .global_state = {{"step", step}}};
        async ? saver.save_async(contents) : saver.save(contents);
      }
    });
    for (int rank = 0; rank < ranks; ++rank) {
      if (all || rank == victim) {
        ASSERT_TRUE(WIFSIGNALED(ended[rank].status) && WTERMSIG(ended[rank].status) == SIGKILL) << ended[rank].text;
        continue;
      }
      ASSERT_TRUE(WIFEXITED(ended[rank].status) && WEXITSTATUS(ended[rank].status) == 0) << "rank " << rank;
      ++survivors;
      named += ended[rank].text.find(fmt::format("rank {} ", victim)) != std::string::npos ? 1 : 0;
    }
    const auto step = check_complete(root);
    ASSERT_GE(step, last);
    newer += step > last ? 1 : 0;
    last = step;
  }
  // The next save removes the remains of dead jobs, and prunes.
  test::run_ranks(1, [&](const World& world) -> std::string {
    const auto step = last + 1;
    CheckpointSaver(world.group(), root, {.keep_last = 1})
        .save({.step = step, .strategy = "test", .slices = slices_of(step, 0, 1), .global_state = {{"step", step}}});
    return "";
  });
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(root)) names.insert(entry.path().filename());
  EXPECT_EQ(names, (std::set<std::string>{".lock", "latest", step_name(last + 1)}));
  EXPECT_EQ(check_complete(root), last + 1);
  EXPECT_GT(newer, 0) << "some saves must get through";
  fmt::print("{} kills, a complete checkpoint after each; {} of them newer; {} of {} survivors named the dead\n",
             kills(), newer, named, survivors);
}

}  // namespace
}  // namespace shoal::save_kill_test
