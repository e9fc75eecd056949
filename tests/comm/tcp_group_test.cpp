// Groups over the tcp transport: what they hold, who may call them, and what a forked child does with them.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/types.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <random>
#include <set>
#include <sstream>
#include <thread>

#include "comm/rendezvous/socket.h"
#include "shoal/error.h"
#include "tests/support/world.h"

namespace shoal::tcp_group_test {
namespace {

const Group& group() {
  return test::world().group();
}

Group fresh() {
  std::vector<int> everyone(group().size());
  std::iota(everyone.begin(), everyone.end(), 0);
  return group().subgroup(everyone);
}

class TcpGroup : public testing::Test {
 protected:
  void SetUp() override {
    if (group().transport() != "tcp") GTEST_SKIP() << "over " << group().transport();
  }
};

std::set<std::string> entries(const std::string& folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) names.insert(entry.path().filename());
  return names;
}

TEST_F(TcpGroup, a_hundred_groups_leave_no_thread_and_no_descriptor) {
  const auto cycle = [] {
    const auto made = fresh();
    auto tensor = at::ones({100000});
    made.all_reduce(tensor).wait();
    const int next = (made.rank() + 1) % made.size();
    auto sent = made.send(tensor, next);
    made.recv(at::empty_like(tensor), (made.rank() + made.size() - 1) % made.size()).wait();
    sent.wait();
  };
  cycle();
  const auto threads = entries("/proc/self/task").size();
  const auto files = entries("/proc/self/fd").size();
  for (int i = 0; i < 100; ++i) cycle();
  EXPECT_LE(entries("/proc/self/task").size(), threads);
  EXPECT_LE(entries("/proc/self/fd").size(), files);
}

// Ports on which this process listens.
std::vector<int> own_ports() {
  std::set<std::string> own;
  std::error_code closed;
  for (const auto& name : entries("/proc/self/fd"))
    own.insert(std::filesystem::read_symlink("/proc/self/fd/" + name, closed));
  std::vector<int> ports;
  std::ifstream file("/proc/self/net/tcp");
  std::string line;
  std::getline(file, line);
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string number, local, remote, state, queues, timer, retransmits, user, timeout, inode;
    words >> number >> local >> remote >> state >> queues >> timer >> retransmits >> user >> timeout >> inode;
    if (state == "0A" && own.contains("socket:[" + inode + "]")) {
      ports.push_back(std::stoi(local.substr(local.find(':') + 1), nullptr, 16));
    }
  }
  return ports;
}

// While ranks connect, others of the machine call them as well, and say nothing, anything, or half of something.
TEST_F(TcpGroup, strangers_are_not_taken_for_ranks) {
  std::atomic<bool> over = false;
  std::atomic<int> calls = 0;
  std::vector<Descriptor> open;
  std::mt19937 random(group().rank());
  const auto call = [&](int port) {
    const auto place = resolve("127.0.0.1", port);
    auto caller = make_socket(place, SOCK_STREAM);
    if (!connect_to(caller, place)) return;
    std::string said;
    for (auto length = random() % 4 * 30; length > 0; --length) said += static_cast<char>(random());
    [[maybe_unused]] const auto sent = send(caller.number(), said.data(), said.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    ++calls;
    if (random() % 4 == 0 && open.size() < 200) open.push_back(std::move(caller));
  };
  std::thread strangers([&] {
    while (!over) {
      for (const int port : own_ports()) {
        for (int i = 0; i < 10; ++i) call(port);
      }
    }
  });
  // On a busy machine strangers come seldom.
  const auto fewest_calls = [&] {
    return group().all_reduce(std::vector<double>{static_cast<double>(calls)}, ReduceOp::min).front();
  };
  for (int i = 0; i < 12 || (i < 300 && fewest_calls() <= 10); ++i) {
    // One rank is late, so that the others listen for a while.
    if (i % group().size() == group().rank()) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    const auto made = fresh();
    auto tensor = at::full({3}, made.rank());
    made.all_reduce(tensor).wait();
    EXPECT_EQ(tensor[0].item<int>(), made.size() * (made.size() - 1) / 2);
  }
  over = true;
  strangers.join();
  EXPECT_GT(calls, 10);
}

// The parts of one rank wait for those of another, while other connections are full, and emptied at any moment.
TEST_F(TcpGroup, large_tensors_in_flight_together_arrive_whole) {
  constexpr int64_t numel = 3 << 20;
  for (int round = 0; round < 3; ++round) {
    std::vector<at::Tensor> tensors;
    std::vector<Work> works;
    for (int root = 0; root < group().size(); ++root) {
      tensors.push_back(at::full({numel + root}, group().rank() + 1, at::kFloat));
      works.push_back(group().broadcast(tensors.back(), root));
      tensors.push_back(at::full({numel + root}, group().rank() + 1, at::kFloat));
      works.push_back(group().all_reduce(tensors.back()));
    }
    for (auto& work : works) work.wait();
    const int sum = group().size() * (group().size() + 1) / 2;
    for (int root = 0; root < group().size(); ++root) {
      EXPECT_TRUE(tensors[2 * root].eq(root + 1).all().item<bool>());
      EXPECT_TRUE(tensors[2 * root + 1].eq(sum).all().item<bool>());
    }
  }
}

// As a loop over the gradients of a model with many parameters issues them.
TEST_F(TcpGroup, fifteen_hundred_operations_in_flight_finish) {
  constexpr int count = 1500;
  for (const int64_t numel : {1, 5000}) {
    std::vector<at::Tensor> tensors;
    std::vector<Work> works;
    for (int i = 0; i < count; ++i) {
      tensors.push_back(at::full({numel}, group().rank() + i, at::kFloat));
      works.push_back(group().all_reduce(tensors.back()));
    }
    for (auto& work : works) work.wait();
    const int size = group().size();
    for (int i = 0; i < count; ++i) {
      ASSERT_TRUE(tensors[i].eq(size * (size - 1) / 2 + size * i).all().item<bool>()) << i;
    }
  }
}

// The receiver finds the difference in its call, and its group ends with the exception.
TEST_F(TcpGroup, both_ranks_name_a_message_that_does_not_fit_a_later_receive) {
  if (group().rank() > 1) return;
  std::string text;
  try {
    const auto pair = group().subgroup({0, 1});
    if (group().rank() == 0) pair.send(at::ones({10}), 1).wait();
    if (group().rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      pair.recv(at::zeros({11}), 0).wait();
    }
  } catch (const DisagreeError& error) {
    text = error.what();
  }
  EXPECT_NE(text.find("rank 0 sends 40 bytes"), std::string::npos) << text;
  EXPECT_NE(text.find("rank 1 expects 44 bytes"), std::string::npos) << text;
}

TEST_F(TcpGroup, a_rank_that_leaves_its_group_in_the_midst_of_a_message_is_missed) {
  if (group().rank() > 1) return;
  const auto start = std::chrono::steady_clock::now();
  try {
    const auto pair = group().subgroup({0, 1});
    const auto tensor = at::ones({32 << 20});
    if (group().rank() == 0) {
      EXPECT_THROW(pair.send(tensor, 1).wait(), CommError);
    } else {
      const auto received = pair.recv(tensor, 0);
      throw std::runtime_error("something else");
    }
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "something else");
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
}

TEST_F(TcpGroup, a_forked_child_ends_without_the_parents_connections) {
  auto made = std::make_unique<Group>(fresh());
  auto before = at::ones({1000000});
  made->all_reduce(before).wait();
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    made.reset();
    _exit(0);
  }
  auto after = at::ones({1000000});
  made->all_reduce(after).wait();
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status)) << "ended by signal " << WTERMSIG(status);
  made->barrier().wait();
  EXPECT_TRUE(after.equal(before));
}

}  // namespace
}  // namespace shoal::tcp_group_test
