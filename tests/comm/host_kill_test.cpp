// Ranks that die or stop at any moment of any operation on the host transport. The ranks are forked from this process,
// which has loaded everything but joined nothing, so that hundreds of deaths take seconds.
//
// SHOAL_KILLS (default 25) sets their number.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <torch/types.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <random>
#include <thread>

#include "base/environment.h"
#include "shoal/error.h"
#include "shoal/world.h"
#include "tests/support/forked_ranks.h"

namespace shoal {
namespace {

// Runs one operation, the same on all ranks for one number; returns whether its result is correct.
bool operate(const Group& group, int number) {
  std::mt19937 random(number);
  const int64_t sizes[] = {1, 100, 5000, 200000, 700000};
  const auto numel = sizes[random() % std::size(sizes)];
  const bool shared = random() % 2 == 0;
  const int root = static_cast<int>(random() % group.size());
  const auto make = [&](int64_t count) { return shared ? group.allocate(count, at::kFloat) : at::zeros({count}); };
  const auto size = group.size();
  auto tensor = make(numel).fill_(group.rank() + 1);
  const double sum = size * (size + 1) / 2.0;
  switch (random() % 6) {
    case 0:
      group.all_reduce(tensor).wait();
      return tensor[numel - 1].item<double>() == sum;
    case 1: {
      auto part = at::empty({numel});
      group.reduce_scatter(part, make(numel * size).fill_(group.rank() + 1)).wait();
      return part[0].item<double>() == sum;
    }
    case 2: {
      auto whole = make(numel * size);
      group.all_gather(whole, tensor).wait();
      return whole[-1].item<double>() == size;
    }
    case 3:
      group.broadcast(tensor, root).wait();
      return tensor[0].item<double>() == root + 1;
    case 4: {
      auto sent = group.send(tensor, (group.rank() + 1) % size);
      auto received = make(numel);
      const int from = (group.rank() + size - 1) % size;
      group.recv(received, from).wait();
      sent.wait();
      return received[0].item<double>() == from + 1;
    }
    default:
      group.barrier().wait();
      return true;
  }
}

int kills() {
  return std::stoi(process_environment()("SHOAL_KILLS").value_or("25"));
}

TEST(HostKill, a_rank_that_dies_at_any_moment_is_named_by_all_others_within_two_seconds) {
  std::mt19937 random(7);
  double slowest = 0;
  int survivors = 0;
  int named = 0;
  for (int trial = 0; trial < kills(); ++trial) {
    const int size = 2 + static_cast<int>(random() % 7);
    const int victim = static_cast<int>(random() % size);
    const auto microseconds = random() % 30000;
    const int first = static_cast<int>(random() % 100000);
    SCOPED_TRACE(fmt::format("trial {}: rank {} of {} after {} us", trial, victim, size, microseconds));
    const auto ended = test::run_ranks(size, [&](const World& world) -> std::string {
      world.group().barrier().wait();
      if (world.rank() == victim) {
        std::thread([microseconds] {
          std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
          std::raise(SIGKILL);
        }).detach();
      }
      for (int number = first;; ++number) {
        if (!operate(world.group(), number)) return fmt::format("operation {} gave a wrong result", number);
      }
    });
    for (int rank = 0; rank < size; ++rank) {
      if (rank == victim) {
        ASSERT_TRUE(WIFSIGNALED(ended[rank].status) && WTERMSIG(ended[rank].status) == SIGKILL) << ended[rank].text;
        continue;
      }
      ASSERT_TRUE(WIFEXITED(ended[rank].status) && WEXITSTATUS(ended[rank].status) == 0)
          << "rank " << rank << " crashed";
      const bool right = ended[rank].text.rfind(fmt::format("error: rank {} ", victim), 0) == 0;
      EXPECT_TRUE(right) << "rank " << rank << " said: " << ended[rank].text;
      ++survivors;
      named += right ? 1 : 0;
      slowest = std::max(slowest, std::chrono::duration<double>(ended[rank].at - ended[victim].at).count());
    }
  }
  EXPECT_LT(slowest, 2) << "seconds from the death to the last survivor's error";
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1) << "a process is left";
  for (const auto& file : std::filesystem::directory_iterator("/dev/shm")) {
    EXPECT_EQ(file.path().filename().string().find("shoal"), std::string::npos) << file.path();
  }
  fmt::print("{} deaths, named by {} of {} survivors; slowest {:.2f} s\n", kills(), named, survivors, slowest);
}

TEST(HostKill, the_end_of_the_rank_that_holds_the_store_is_named_where_groups_are_made) {
  const auto ended = test::run_ranks(3, [](const World& world) -> std::string {
    world.barrier();
    std::this_thread::sleep_for(std::chrono::milliseconds(world.rank() == 0 ? 20 : 70));
    if (world.rank() == 0) std::raise(SIGKILL);
    try {
      world.group().subgroup({0, 1, 2});
    } catch (const CommError& error) {
      return error.what();
    }
    return "nothing was refused";
  });
  for (const int rank : {1, 2}) EXPECT_EQ(ended[rank].text.rfind("rank 0 (pid ", 0), 0U) << ended[rank].text;
}

TEST(HostKill, a_rank_that_is_stopped_for_a_while_goes_on) {
  const auto ended = test::run_ranks(
      3,
      [](const World& world) -> std::string {
        for (int number = 0; number < 800; ++number) {
          if (!operate(world.group(), number)) return fmt::format("operation {} gave a wrong result", number);
        }
        return "right";
      },
      [](const std::vector<pid_t>& pids) {
        for (int i = 0; i < 3; ++i) {
          std::this_thread::sleep_for(std::chrono::milliseconds(400));
          kill(pids[i], SIGSTOP);
          std::this_thread::sleep_for(std::chrono::milliseconds(500));
          kill(pids[i], SIGCONT);
        }
      });
  for (const auto& rank : ended) EXPECT_EQ(rank.text, "right");
}

// Starts a collective whose data pass through staging buffers, and returns it with what it writes.
std::pair<Work, at::Tensor> start_staged(const Group& group, Op op) {
  constexpr int64_t numel = 1000;
  const auto one = at::full({numel}, group.rank() + 1.0);
  auto all = at::full({numel * group.size()}, group.rank() + 1.0);
  switch (op) {
    case Op::all_gather:
      return {group.all_gather(all, one), all};
    case Op::reduce_scatter: {
      auto part = at::empty({numel});
      auto work = group.reduce_scatter(part, all);
      return {std::move(work), part};
    }
    case Op::broadcast:
      return {group.broadcast(one, 1), one};
    case Op::reduce:
      return {group.reduce(one, 0), one};
    default:
      return {group.all_reduce(one), one};
  }
}

// Rank 1 ends as soon as its part of the collective is done, while rank 0 has yet to read what rank 1 gave.
TEST(HostKill, a_rank_may_end_right_after_a_collective_that_others_still_carry_out) {
  for (const auto op : {Op::all_gather, Op::reduce_scatter, Op::broadcast, Op::reduce, Op::all_reduce}) {
    SCOPED_TRACE(static_cast<int>(op));
    const auto ended = test::run_ranks(2, [op](const World& world) -> std::string {
      const auto& group = world.group();
      const bool late = group.rank() == 0;
      if (late) std::this_thread::sleep_for(std::chrono::milliseconds(200));  // rank 1 has announced the call by then
      auto [work, result] = start_staged(group, op);
      std::this_thread::sleep_for(std::chrono::milliseconds(late ? 1200 : 600));
      work.wait();
      return fmt::format("{}", result[-1].item<double>());
    });
    const bool sums = op != Op::all_gather && op != Op::broadcast;
    EXPECT_EQ(ended[0].text, sums ? "3" : "2");
    EXPECT_EQ(ended[1].text.find("error"), std::string::npos) << ended[1].text;
  }
}

// Rank 1 has sent its part of a gather and ends, while rank 2's takes much longer.
TEST(HostKill, a_rank_may_end_while_others_still_send) {
  auto* stage = static_cast<std::atomic<int>*>(
      mmap(nullptr, sizeof(std::atomic<int>), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  *stage = 0;
  WorldOptions options;
  options.transport = "tcp";
  options.stopped_timeout_seconds = 60;
  const auto body = [stage](const World& world) -> std::string {
    const auto& group = world.group();
    const int64_t numel = 25'000'000;
    const auto input = at::full({numel}, group.rank() + 1, at::kFloat);
    std::vector<at::Tensor> outputs;
    for (int rank = 0; group.rank() == 0 && rank < group.size(); ++rank) outputs.push_back(at::empty({numel}));
    group.barrier().wait();
    auto work = group.gather(outputs, input, 0);
    if (group.rank() == 2) *stage = 1;
    work.wait();
    if (group.rank() == 2) *stage = 2;
    if (group.rank() == 1) *stage = *stage == 1 ? 3 : 4;
    return outputs.empty() ? "sent" : fmt::format("{} {}", outputs[1][-1].item<float>(), outputs[2][-1].item<float>());
  };
  const auto stop = [stage](const std::vector<pid_t>& ranks) {
    while (*stage == 0) usleep(100);
    kill(ranks[2], SIGSTOP);
    for (int look = 0; look < 20000 && *stage < 3; ++look) usleep(1000);
    usleep(2'000'000);
    kill(ranks[2], SIGCONT);
  };
  const auto ended = test::run_ranks(3, body, stop, options);
  EXPECT_EQ(ended[0].text, "2 3");
  EXPECT_EQ(ended[1].text, "sent");
  EXPECT_EQ(ended[2].text, "sent");
  munmap(stage, sizeof(std::atomic<int>));
}

TEST(HostKill, a_wait_with_a_limit_looks_at_its_peers_and_calls_while_waiting) {
  const auto begin = std::chrono::steady_clock::now();
  int looks = 0;
  WorldOptions options;
  options.while_waiting = [&looks] { ++looks; };
  const auto body = [&looks](const World& world) -> std::string {
    world.group().barrier().wait();
    if (world.rank() == 1) {
      usleep(500'000);
      raise(SIGKILL);
    }
    auto tensor = at::ones({8});
    auto work = world.group().all_reduce(tensor);
    looks = 0;
    if (work.wait_for(std::chrono::milliseconds(250))) return "nobody has come";
    if (looks == 0) return "while_waiting was not called";
    try {
      return work.wait_for(std::chrono::milliseconds::max()) ? "finished" : "not finished";
    } catch (const CommError& error) {
      return error.what();
    }
  };
  const auto ended = test::run_ranks(2, body, {}, options);
  EXPECT_EQ(ended[0].text.rfind("rank 1 (pid ", 0), 0U) << ended[0].text;
  EXPECT_LT(ended[0].at - begin, std::chrono::seconds(20));
}

// A program that only asks whether its work is done comes to an end when a peer has died.
TEST(HostKill, work_with_a_dead_rank_is_done) {
  for (const auto* transport : {"host", "tcp", "gloo"}) {
    SCOPED_TRACE(transport);
    WorldOptions options;
    options.transport = transport;
    const auto ended = test::run_ranks(
        2,
        [](const World& world) -> std::string {
          world.group().barrier().wait();
          if (world.rank() == 1) raise(SIGKILL);
          auto tensor = at::ones({8});
          const auto begin = std::chrono::steady_clock::now();
          try {
            auto work = world.group().all_reduce(tensor);
            while (!work.done()) {
              if (std::chrono::steady_clock::now() - begin > std::chrono::seconds(20)) return "never done";
              std::this_thread::sleep_for(std::chrono::milliseconds(1));
            }
            work.wait();
          } catch (const CommError& error) {
            return error.what();
          }
          return "no error";
        },
        {}, options);
    EXPECT_NE(ended[0].text.find("rank 1"), std::string::npos) << ended[0].text;
  }
}

TEST(HostKill, a_forked_child_may_not_use_its_parents_group) {
  const auto ended = test::run_ranks(2, [](const World& world) -> std::string {
    int ends[2];
    if (pipe(ends) != 0) return "no pipe";
    const pid_t child = fork();
    if (child == 0) {
      std::string text = "no error";
      try {
        world.group().barrier().wait();
      } catch (const UsageError& error) {
        text = error.what();
      }
      [[maybe_unused]] const auto written = write(ends[1], text.data(), text.size());
      std::_Exit(0);
    }
    waitpid(child, nullptr, 0);
    char buffer[500];
    const auto length = read(ends[0], buffer, sizeof buffer);
    world.group().barrier().wait();
    return std::string(buffer, std::max<ssize_t>(0, length));
  });
  for (const auto& rank : ended)
    EXPECT_NE(rank.text.find("from which this one was forked"), std::string::npos) << rank.text;
}

}  // namespace
}  // namespace shoal
