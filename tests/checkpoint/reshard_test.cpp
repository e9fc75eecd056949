// Resharding of a checkpoint for another number of ranks (BEY05).

#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <torch/types.h>

#include <filesystem>
#include <fstream>
#include <numeric>
#include <set>

#include "checkpoint/loading/reader.h"
#include "checkpoint/loading/reshard.h"
#include "checkpoint/saving/saver.h"
#include "shoal/error.h"
#include "tests/checkpoint/tensors.h"
#include "tests/support/forked_ranks.h"
#include "tests/support/refusal.h"
#include "tests/support/temp_folder.h"

namespace shoal::reshard_test {
namespace {

using test::refusal;

namespace fs = std::filesystem;
using test::Whole;
using ::testing::HasSubstr;

enum class Cut { none, anywhere };

std::string bytes_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::vector<Whole> save(const fs::path& root, int ranks, Cut cut) {
  at::set_num_threads(1);  // children of a process with threads cannot start any
  const auto wholes = test::random_wholes(6);
  const auto ended = test::run_ranks(ranks, [&](const World& world) -> std::string {
    CheckpointSaver(world.group(), root)
        .save({.step = 40,
               .strategy = "ddp",
               .slices = cut == Cut::none ? test::whole_slices(wholes)
                                          : test::random_slices(wholes, world.rank(), world.size(), 7),
               .rank_state = {{"seed", 100 + world.rank()}},
               .global_state = {{"scale", 8.5}}});
    return "saved";
  });
  for (const auto& rank : ended) EXPECT_EQ(rank.text, "saved");
  return wholes;
}

// Expects everything that a reader sees to be equal, except file names.
void expect_same(const fs::path& path, const fs::path& original, const std::vector<Whole>& wholes) {
  const CheckpointReader reader(path), before(original);
  EXPECT_EQ(reader.verify().unchecked, 0);
  const auto &index = reader.index(), &old = before.index();
  EXPECT_EQ(index.step, old.step);
  EXPECT_EQ(index.strategy, old.strategy);
  EXPECT_EQ(index.world_size, old.world_size);
  EXPECT_EQ(index.global_state, old.global_state);
  EXPECT_EQ(index.rank_states, old.rank_states);
  EXPECT_EQ(index.tensors.size(), wholes.size());
  for (const auto& whole : wholes) {
    const auto& tensor = reader.tensor(whole.name);
    EXPECT_EQ(tensor.part, whole.part);
    EXPECT_EQ(tensor.order, before.tensor(whole.name).order);
    EXPECT_TRUE(test::same_bytes(reader.read(whole.name), whole.tensor)) << whole.name;
  }
}

// Expects one file per part and rank, all of the same size up to one element.
void expect_balanced(const fs::path& path, int ranks) {
  const CheckpointReader reader(path);
  std::map<std::string, std::map<std::string, int64_t>> bytes;  // by part and file
  for (const auto& [name, tensor] : reader.index().tensors) {
    for (const auto& slice : tensor.slices) {
      bytes[tensor.part][slice.file] += slice.range.size() * static_cast<int64_t>(c10::elementSize(tensor.dtype));
    }
  }
  std::set<std::string> expected, found;
  for (const auto& [part, files] : bytes) {
    int64_t least = std::numeric_limits<int64_t>::max(), most = 0;
    for (const auto& [file, size] : files) {
      least = std::min(least, size);
      most = std::max(most, size);
    }
    EXPECT_LE(most - least, 8) << part;
    for (int rank = 0; rank < ranks; ++rank) {
      expected.insert(ranks == 1 ? part + ".safetensors"
                                 : fmt::format("rank-{:05d}-of-{:05d}.{}.safetensors", rank, ranks, part));
    }
  }
  expected.insert("index.json");
  for (const auto& entry : fs::directory_iterator(reader.path())) found.insert(entry.path().filename());
  EXPECT_EQ(found, expected);
}

TEST(Reshard, BEY05_from_one_to_four_to_three_to_one_is_the_same_byte_for_byte) {
  const test::TempFolder folder;
  const auto wholes = save(folder.path() / "run", 1, Cut::none);
  fs::path last = folder.path() / "run";
  for (const int ranks : {4, 3, 1}) {
    SCOPED_TRACE(ranks);
    const auto next = folder.path() / fmt::format("of{}", ranks);
    EXPECT_EQ(reshard(CheckpointReader(last), next, ranks), next / "step-40");
    expect_same(next, folder.path() / "run", wholes);
    expect_balanced(next, ranks);
    last = next;
  }
  for (const auto* name : {"index.json", "model.safetensors", "optimizer.safetensors"}) {
    EXPECT_TRUE(bytes_of(folder.path() / "run/step-40" / name) == bytes_of(last / "step-40" / name)) << name;
  }
  EXPECT_EQ(bytes_of(last / "latest"), "step-40\n");
}

TEST(Reshard, BEY05_what_ranks_have_cut_anywhere_comes_out_even) {
  const test::TempFolder folder;
  const auto wholes = save(folder.path() / "run", 3, Cut::anywhere);
  for (const int ranks : {1, 2, 5, 64}) {
    SCOPED_TRACE(ranks);
    const auto out = folder.path() / fmt::format("of{}", ranks);
    reshard(CheckpointReader(folder.path() / "run"), out, ranks);
    expect_same(out, folder.path() / "run", wholes);
    expect_balanced(out, ranks);
  }
  // More ranks than bytes: the rest have no file.
  const auto tiny = folder.path() / "tiny";
  test::run_ranks(1, [&](const World& world) -> std::string {
    CheckpointSaver(world.group(), tiny)
        .save({.step = 1,
               .strategy = "test",
               .slices = {whole_slice("a", at::ones({3}, at::kByte)), whole_slice("none", at::empty({0, 2}))}});
    return "";
  });
  reshard(CheckpointReader(tiny), folder.path() / "spread", 50'000);
  const CheckpointReader spread(folder.path() / "spread");
  EXPECT_EQ(spread.tensor("a").slices.size(), 3U);
  EXPECT_TRUE(at::equal(spread.read("a"), at::ones({3}, at::kByte)));
  EXPECT_EQ(spread.read("none").sizes(), (at::IntArrayRef{0, 2}));
}

TEST(Reshard, BEY05_files_of_other_programs_become_a_checkpoint) {
  const test::TempFolder folder;
  const CheckpointReader original(PYTHON_FILES "/sharded");
  reshard(original, folder.path() / "run", 2);
  const CheckpointReader reader(folder.path() / "run");
  EXPECT_EQ(reader.path(), folder.path() / "run/step-0");
  EXPECT_EQ(reader.verify().unchecked, 0);
  EXPECT_EQ(reader.index().tensors.size(), 3U);
  for (const auto& [name, tensor] : original.index().tensors) {
    EXPECT_TRUE(test::same_bytes(reader.read(name), original.read(name))) << name;
  }
}

TEST(Reshard, BEY05_wrong_input_leaves_nothing) {
  const test::TempFolder folder;
  const auto run = folder.path() / "run", out = folder.path() / "out";
  save(run, 2, Cut::anywhere);
  const CheckpointReader reader(run);
  EXPECT_THAT(refusal<UsageError>([&] { reshard(reader, out, 0); }), HasSubstr("0 ranks"));
  EXPECT_THAT(refusal<UsageError>([&] { reshard(reader, out, 100'001); }), HasSubstr("100001 ranks"));
  EXPECT_FALSE(fs::exists(out));
  const auto names = [](const fs::path& path) {
    std::set<std::string> list;
    for (const auto& entry : fs::directory_iterator(path)) list.insert(entry.path().filename());
    return list;
  };
  // Nothing is overwritten: neither the run, nor the checkpoint, nor another folder.
  for (const auto& taken : {run, run / "step-40", folder.path()}) {
    const auto before = names(taken);
    EXPECT_THAT(refusal<UsageError>([&] { reshard(reader, taken, 2); }), HasSubstr("reshard to a new folder"));
    EXPECT_EQ(names(taken), before);
  }
  std::ofstream(folder.path() / "file") << "text";
  EXPECT_THAT(refusal<CheckpointError>([&] { reshard(reader, folder.path() / "file", 2); }),
              HasSubstr("cannot make folder"));
  // Another job has the lock.
  fs::create_directory(out);
  const int other = open((out / ".lock").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0644);
  ASSERT_EQ(flock(other, LOCK_EX | LOCK_NB), 0);
  EXPECT_THAT(refusal<CheckpointError>([&] { reshard(reader, out, 2); }), HasSubstr("another job is saving to"));
  close(other);
  // Damage to the original while it is read: a flipped bit, a truncated file, a missing file.
  const auto file = run / "step-40" / reader.tensor("large").slices.back().file;
  const auto bytes = bytes_of(file);
  auto flipped = bytes;
  flipped[flipped.size() - 100'000] = static_cast<char>(flipped[flipped.size() - 100'000] ^ 16);
  for (const auto& damaged : {flipped, bytes.substr(0, bytes.size() / 2), std::string()}) {
    fs::remove(file);
    if (!damaged.empty()) std::ofstream(file, std::ios::binary) << damaged;
    const auto error = refusal<CheckpointError>([&] { reshard(CheckpointReader(run), out, 3); });
    EXPECT_THAT(error, HasSubstr(file.filename().string()));
    EXPECT_EQ(names(out), (std::set<std::string>{".lock"}));
  }
  std::ofstream(file, std::ios::binary | std::ios::trunc) << bytes;
  // Remains of a dead job are removed.
  fs::create_directory(out / ".step-40.tmp-12345678");
  reshard(CheckpointReader(run), out, 3);
  EXPECT_EQ(names(out), (std::set<std::string>{".lock", "latest", "step-40"}));
}

}  // namespace
}  // namespace shoal::reshard_test
