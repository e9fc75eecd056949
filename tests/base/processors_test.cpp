// Processors that a process may use, with the files of cgroups in a planted root of the file system.

#include "base/processors.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <thread>
#include <vector>

#include "tests/support/temp_folder.h"

namespace shoal::test::processors_test {
namespace {

class Root {
 public:
  Root& with(const std::string& path, const std::string& text) {
    const auto file = folder_.path() / path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
    return *this;
  }
  std::optional<int> limit() const { return processor_limit(folder_.path()); }

 private:
  TempFolder folder_;
};

TEST(Processors, the_limit_of_a_container_is_that_of_its_group_or_of_one_around_it) {
  const auto in_group = [](Root& root) -> Root& { return root.with("proc/self/cgroup", "0::/pods/one\n"); };
  Root none, own, outer, root, part, less;
  EXPECT_EQ(in_group(none).with("sys/fs/cgroup/pods/one/cpu.max", "max 100000\n").limit(), std::nullopt);
  EXPECT_EQ(in_group(own).with("sys/fs/cgroup/pods/one/cpu.max", "200000 100000\n").limit(), 2);
  in_group(outer).with("sys/fs/cgroup/pods/one/cpu.max", "400000 100000\n");
  EXPECT_EQ(outer.with("sys/fs/cgroup/pods/cpu.max", "300000 100000\n").limit(), 3);
  EXPECT_EQ(in_group(root).with("sys/fs/cgroup/cpu.max", "800000 200000\n").limit(), 4) << "as docker shows it";
  EXPECT_EQ(in_group(part).with("sys/fs/cgroup/cpu.max", "250000 100000\n").limit(), 2);
  EXPECT_EQ(in_group(less).with("sys/fs/cgroup/cpu.max", "50000 100000\n").limit(), 1);
}

TEST(Processors, the_limit_of_cgroups_of_version_1_is_found) {
  const auto in_group = [](Root& root) -> Root& {
    return root.with("proc/self/cgroup",
                     "5:memory:/other\n4:cpuacct,cpu:/docker/a\n2:cpuset:/docker/a\n0::/docker/a\n");
  };
  const auto set = [](Root& root, const std::string& group, const std::string& quota) -> Root& {
    const auto folder = "sys/fs/cgroup/" + group;
    return root.with(folder + "/cpu.cfs_quota_us", quota).with(folder + "/cpu.cfs_period_us", "100000\n");
  };
  Root none, own, seen_as_root, another;
  EXPECT_EQ(set(in_group(none), "cpuacct,cpu/docker/a", "-1\n").limit(), std::nullopt);
  EXPECT_EQ(set(in_group(own), "cpuacct,cpu/docker/a", "300000\n").limit(), 3);
  EXPECT_EQ(set(in_group(seen_as_root), "cpu", "200000\n").limit(), 2);
  EXPECT_EQ(set(in_group(another), "memory/other", "200000\n").limit(), std::nullopt);
}

TEST(Processors, files_that_are_not_there_or_say_something_else_are_no_limit) {
  Root empty, odd, strange;
  EXPECT_EQ(empty.limit(), std::nullopt);
  odd.with("proc/self/cgroup", "nothing\n0:\n0::/../..\n");
  EXPECT_EQ(odd.with("sys/fs/cgroup/cpu.max", "").limit(), std::nullopt);
  strange.with("proc/self/cgroup", "0::/../..\n");
  EXPECT_EQ(strange.with("sys/fs/cgroup/cpu.max", "1e9 x\n").limit(), std::nullopt);
}

TEST(Processors, a_process_has_those_on_which_it_may_run) {
  EXPECT_GE(processors_of_host(), processors());
  std::thread([] {  // its own
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
    EXPECT_EQ(processors(), 1);
  })
      .join();
}

TEST(Processors, processes_divide_those_on_which_several_may_run) {
  const auto from_to = [](int first, int last) {
    cpu_set_t some;
    CPU_ZERO(&some);
    for (int processor = first; processor <= last; ++processor) CPU_SET(processor, &some);
    return some;
  };
  const auto eight = from_to(0, 7), nine = from_to(0, 8);
  EXPECT_EQ(share_of_processors(eight, {}, {}), 8);
  EXPECT_EQ(share_of_processors(eight, {eight, eight, eight}, {}), 2);
  EXPECT_EQ(share_of_processors(nine, {nine, nine}, {}), 3);
  EXPECT_EQ(share_of_processors(from_to(0, 5), {from_to(6, 7)}, {}), 6) << "each is bound to its own";
  EXPECT_EQ(share_of_processors(from_to(0, 3), {from_to(2, 5)}, {}), 3);
  EXPECT_EQ(share_of_processors(from_to(0, 0), {from_to(0, 0)}, {}), 1) << "at least";
  EXPECT_EQ(share_of_processors(eight, {}, 4), 4);
  EXPECT_EQ(share_of_processors(from_to(0, 3), {from_to(4, 7)}, 4), 2) << "the limit is that of both";
}

TEST(Processors, a_process_divides_its_own_with_those_of_its_host) {
  EXPECT_EQ(share_of_processors(std::vector<int>()), processors());
  const int half = std::max(1, processors() / 2);
  EXPECT_EQ(share_of_processors({getpid()}), half);
  EXPECT_EQ(share_of_processors({-1}), half) << "of which nothing is known";
}

}  // namespace
}  // namespace shoal::test::processors_test
