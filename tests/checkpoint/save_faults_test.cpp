// Saves that fail: every rank reports why, the old checkpoint stays, and the next save works (BEY05, BEY06).

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <torch/types.h>

#include <chrono>
#include <filesystem>
#include <fstream>

#include "checkpoint/folder.h"
#include "checkpoint/loading/reader.h"
#include "checkpoint/loading/reshard.h"
#include "checkpoint/saving/saver.h"
#include "shoal/error.h"
#include "tests/support/forked_ranks.h"
#include "tests/support/refusal.h"
#include "tests/support/temp_folder.h"

namespace {

bool names_are_exchanged = true;

}  // namespace

// In the place of the C library's, for file systems that cannot exchange names.
extern "C" int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned int flags) {
  if (names_are_exchanged) return static_cast<int>(syscall(SYS_renameat2, from_folder, from, to_folder, to, flags));
  errno = EINVAL;
  return -1;
}

namespace shoal::save_faults_test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int ranks = 3;

CheckpointContents contents_of(int64_t step, const World& world, int64_t numel = 1 << 16) {
  const Range range{numel * world.rank() / world.size(), numel * (world.rank() + 1) / world.size()};
  return {
      .step = step,
      .strategy = "test",
      .slices = {{.name = "w", .shape = {numel}, .range = range, .values = at::full({range.size()}, step, at::kLong)}}};
}

std::string save(CheckpointSaver& saver, const CheckpointContents& contents, bool async) {
  try {
    if (async) saver.save_async(contents);
    async ? saver.wait() : saver.save(contents);
  } catch (const CheckpointError& error) {
    return error.what();
  }
  return "saved";
}

void expect_step(const fs::path& root, int64_t step) {
  const CheckpointReader reader(root);
  EXPECT_EQ(reader.index().step, step);
  EXPECT_TRUE((reader.read("w") == step).all().item<bool>());
  for (const auto& entry : fs::directory_iterator(root)) {
    EXPECT_EQ(entry.path().filename().string().find(".tmp-"), std::string::npos) << entry.path();
  }
}

// Saves step 1, calls `hinder` on rank 0, tries to save step 2 both ways, calls `help`, and saves step 3. Returns the
// ranks' errors, which must be equal; step 1 must exist in between.
std::string attempt(const fs::path& root, const std::function<void()>& hinder, const std::function<void()>& help,
                    int64_t numel = 1 << 16, bool unchanged = true) {
  const auto ended = test::run_ranks(ranks, [&](const World& world) -> std::string {
    const auto act = [&](const std::function<void()>& what) {
      world.group().barrier().wait();
      if (world.rank() == 0) what();
      world.group().barrier().wait();
    };
    CheckpointSaver saver(world.group(), root);
    saver.save(contents_of(1, world));
    act(hinder);
    const auto first = save(saver, contents_of(2, world, numel), /*async=*/false);
    const auto second = save(saver, contents_of(2, world, numel), /*async=*/true);
    std::string kept = "kept";
    if (unchanged) {
      const CheckpointReader reader(root);
      if (reader.index().step != 1 || reader.verify().bytes != 8 << 16) kept = "lost";
    }
    act(help);
    saver.save(contents_of(3, world));
    // The unfinished folder's name is random.
    const bool both_failed = first.starts_with("checkpoint ") && second.starts_with("checkpoint ");
    return fmt::format("{}, {}: {}", both_failed ? "failed" : "did not fail", kept, first);
  });
  for (const auto& rank : ended) {
    EXPECT_TRUE(WIFEXITED(rank.status));
    EXPECT_EQ(rank.text, ended[0].text);
  }
  expect_step(root, 3);
  EXPECT_THAT(ended[0].text, HasSubstr("failed, kept: checkpoint " + (root / "step-2").string() + " was not saved: "));
  return ended[0].text;
}

constexpr uid_t nobody = 65534;  // permissions do not bind root

TEST(SaveFaults, BEY05_no_permission) {
  const test::TempFolder folder;
  const auto root = folder.path() / "run";
  fs::create_directory(root);
  ASSERT_EQ(chmod(folder.path().c_str(), 0777), 0);
  const auto before = geteuid();
  if (before == 0 && (chown(root.c_str(), nobody, static_cast<gid_t>(-1)) != 0 || seteuid(nobody) != 0)) {
    GTEST_SKIP() << "root that cannot become another user";
  }
  const auto text = attempt(
      root, [&] { ASSERT_EQ(chmod(root.c_str(), 0555), 0); }, [&] { ASSERT_EQ(chmod(root.c_str(), 0755), 0); });
  ASSERT_EQ(seteuid(before), 0);
  EXPECT_THAT(text, AllOf(HasSubstr("rank 0: cannot make folder"), HasSubstr("Permission denied")));
}

// File system of its own for a test; the test is skipped if that is not allowed.
class Mounted {
 public:
  explicit Mounted(fs::path path) : path_(std::move(path)) {
    fs::create_directory(path_);
    mounted_ = mount("tmpfs", path_.c_str(), "tmpfs", 0, "size=4m") == 0;
  }
  ~Mounted() {
    if (mounted_) umount2(path_.c_str(), MNT_DETACH);
  }
  bool ready() const { return mounted_; }
  int remount(unsigned long flags) const {
    return mount("tmpfs", path_.c_str(), "tmpfs", MS_REMOUNT | flags, "size=4m");
  }

 private:
  fs::path path_;
  bool mounted_ = false;
};

TEST(SaveFaults, BEY05_disk_full) {
  const test::TempFolder folder;
  const Mounted disk(folder.path() / "disk");
  if (!disk.ready()) GTEST_SKIP() << "mounting a small file system needs root";
  const auto text = attempt(
      folder.path() / "disk/run", [] {}, [] {}, /*numel=*/1 << 20);
  EXPECT_THAT(text, AllOf(HasSubstr("cannot write "), HasSubstr("of-00003.model.safetensors"),
                          HasSubstr("No space left on device"), HasSubstr("rank ")));
}

TEST(SaveFaults, BEY05_reshard_onto_a_full_disk) {
  const test::TempFolder folder;
  const Mounted disk(folder.path() / "disk");
  if (!disk.ready()) GTEST_SKIP() << "mounting a small file system needs root";
  const auto root = folder.path() / "run", out = folder.path() / "disk/out";
  test::run_ranks(ranks, [&](const World& world) -> std::string {
    CheckpointSaver(world.group(), root).save(contents_of(1, world, /*numel=*/1 << 20));
    return "";
  });
  try {
    reshard(CheckpointReader(root), out, 2);
    ADD_FAILURE() << "8 MiB on 4";
  } catch (const CheckpointError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("cannot write " + out.string()), HasSubstr("No space left on device")));
  }
  for (const auto& entry : fs::directory_iterator(out)) EXPECT_EQ(entry.path().filename(), ".lock");
  expect_step(root, 1);
}

TEST(SaveFaults, BEY05_read_only) {
  const test::TempFolder folder;
  const Mounted disk(folder.path() / "disk");
  if (!disk.ready()) GTEST_SKIP() << "mounting a file system needs root";
  const auto root = folder.path() / "disk/run";
  const auto text = attempt(
      root, [&] { ASSERT_EQ(disk.remount(MS_RDONLY), 0); }, [&] { ASSERT_EQ(disk.remount(0), 0); });
  EXPECT_THAT(text,
              AllOf(HasSubstr("rank 0: cannot open " + (root / ".lock").string()), HasSubstr("Read-only file system")));
}

// Moves the folder of the unfinished step 2 away as soon as it exists.
void take_away(const fs::path& root, const fs::path& to) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (std::chrono::steady_clock::now() < deadline) {
    for (const auto& entry : fs::directory_iterator(root)) {
      if (!entry.path().filename().string().starts_with(".step-2")) continue;
      fs::rename(entry.path(), to);
      return;
    }
  }
  ADD_FAILURE() << "no folder was made";
}

TEST(SaveFaults, BEY06_the_folder_vanishes_while_ranks_write) {
  const test::TempFolder folder;
  const auto root = folder.path() / "run";
  const auto ended = test::run_ranks(ranks, [&](const World& world) -> std::string {
    CheckpointSaver saver(world.group(), root);
    saver.save(contents_of(1, world));
    saver.save_async(contents_of(2, world, 1 << 23));
    if (world.rank() == 0) take_away(root, folder.path() / "gone");
    std::string first = "saved";
    try {
      saver.wait();
    } catch (const CheckpointError& error) {
      first = error.what();
    }
    world.group().barrier().wait();
    const auto kept = CheckpointReader(root).index().step;
    world.group().barrier().wait();
    saver.save(contents_of(3, world));
    return fmt::format("{} {}", kept, first);
  });
  for (const auto& rank : ended) {
    EXPECT_EQ(rank.text, ended[0].text);
    EXPECT_THAT(rank.text,
                AllOf(HasSubstr("1 checkpoint "), HasSubstr("No such file or directory"), HasSubstr("rank ")));
  }
  expect_step(root, 3);
}

TEST(SaveFaults, BEY06_two_jobs_in_one_place) {
  const test::TempFolder folder;
  const auto root = folder.path() / "run";
  int other = -1;
  // Simulates another job.
  const auto text = attempt(
      root,
      [&] {
        other = open((root / ".lock").c_str(), O_RDWR | O_CLOEXEC);
        ASSERT_EQ(flock(other, LOCK_EX | LOCK_NB), 0);
        const std::string_view holder = "process 7 on another host";
        ASSERT_EQ(write(other, holder.data(), holder.size()), static_cast<ssize_t>(holder.size()));
      },
      [&] { close(other); });
  EXPECT_THAT(text, AllOf(HasSubstr("another job is saving to " + root.string()), HasSubstr("process 7 on another")));
}

TEST(SaveFaults, BEY06_two_trainings_of_one_process_in_one_place) {
  const test::TempFolder folder;
  {
    const FolderLock lock(folder.path());
    EXPECT_THAT(test::refusal<CheckpointError>([&] { FolderLock{folder.path()}; }),
                HasSubstr("another training of this process is saving to " + folder.path().string()));
  }
  const FolderLock again(folder.path());
}

TEST(SaveFaults, BEY06_two_real_jobs_take_turns_or_are_told_so) {
  const test::TempFolder folder;
  const auto root = folder.path() / "run";
  const auto job = [&](const World& world) -> std::string {
    CheckpointSaver saver(world.group(), root);
    int saved = 0, refused = 0;
    for (int64_t step = 1; step <= 30; ++step) {
      const auto text = save(saver, contents_of(step, world), /*async=*/step % 2 == 0);
      saved += text == "saved" ? 1 : 0;
      refused += text.find("another job is saving to") != std::string::npos ? 1 : 0;
    }
    return saved + refused == 30 ? fmt::format("{}", saved) : "another error";
  };
  std::vector<test::RankEnded> second;
  const auto first = test::run_ranks(2, job, [&](const auto&) { second = test::run_ranks(2, job); });
  for (const auto& ended : {first[0], second[0]}) EXPECT_NE(ended.text, "another error");
  EXPECT_EQ(first[0].text, first[1].text);
  EXPECT_EQ(second[0].text, second[1].text);
  EXPECT_GT(std::atoi(first[0].text.c_str()) + std::atoi(second[0].text.c_str()), 0) << "somebody has the lock";
  const CheckpointReader reader(root);
  EXPECT_TRUE((reader.read("w") == reader.index().step).all().item<bool>());
}

// As over NFS.
TEST(SaveFaults, BEY05_a_step_is_saved_again_where_names_cannot_be_exchanged) {
  const test::TempFolder folder;
  const auto root = folder.path() / "run";
  names_are_exchanged = false;
  const auto ended = test::run_ranks(2, [&](const World& world) -> std::string {
    CheckpointSaver saver(world.group(), root);
    saver.save(contents_of(1, world));
    auto again = contents_of(1, world);
    again.slices[0].values.fill_(7);
    return save(saver, again, /*async=*/false);
  });
  names_are_exchanged = true;
  for (const auto& rank : ended) EXPECT_EQ(rank.text, "saved");
  EXPECT_TRUE((CheckpointReader(root).read("w") == 7).all().item<bool>());

  // A job that ends between its two renames leaves both under hidden names.
  fs::rename(root / "step-1", root / ".step-1.tmp-00000000");
  EXPECT_TRUE((CheckpointReader(root).read("w") == 7).all().item<bool>());
  test::run_ranks(1, [&](const World& world) -> std::string {
    CheckpointSaver(world.group(), root).save(contents_of(3, world));
    return "";
  });
  EXPECT_TRUE((CheckpointReader(root / "step-1").read("w") == 7).all().item<bool>());
  expect_step(root, 3);
}

TEST(SaveFaults, BEY06_an_unfinished_first_save_is_no_checkpoint) {
  const test::TempFolder folder;
  const auto root = folder.path() / "run";
  fs::create_directories(root / ".step-4.tmp-00000000");
  std::ofstream(root / ".step-4.tmp-00000000/index.json") << "{}";
  EXPECT_THROW(CheckpointReader{root}, CheckpointError);
  // Died between publication and the update of `latest`: the checkpoint counts.
  test::run_ranks(1, [&](const World& world) -> std::string {
    CheckpointSaver(world.group(), root).save(contents_of(9, world));
    return "";
  });
  fs::remove(root / "latest");
  expect_step(root, 9);
  std::ofstream(root / "latest") << "step-12\n";
  EXPECT_THROW(CheckpointReader{root}, CheckpointError) << "names what is not there";
  std::ofstream(root / "latest") << "../other\n";
  EXPECT_THROW(CheckpointReader{root}, CheckpointError);
}

}  // namespace
}  // namespace shoal::save_faults_test
