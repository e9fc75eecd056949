// Groups over several hosts, which are process namespaces of this machine: two with two ranks each.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <iterator>
#include <string>
#include <vector>

#include "comm/group/group_state.h"
#include "shoal/error.h"
#include "shoal/group.h"
#include "tests/support/forked_hosts.h"

namespace shoal::hosts_test {
namespace {

class Hosts : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!test::ForkedHosts::possible()) GTEST_SKIP() << "this system makes no namespaces";
  }
};

// Runs `body` on all ranks; each must return "right".
void expect_right(const std::function<std::string(const Group&)>& body, int timeout_seconds = 60) {
  WorldOptions options;
  options.timeout_seconds = timeout_seconds;
  test::ForkedHosts hosts(
      {2, 2},
      [&](const World& world) -> std::string {
        if (world.group().transport() != "host+tcp") return "transport " + world.group().transport();
        return body(world.group());
      },
      options);
  for (const auto& rank : hosts.wait(60)) EXPECT_EQ(rank.text, "right");
}

std::string right_if(bool right, const std::string& otherwise) {
  return right ? "right" : otherwise;
}

TEST_F(Hosts, a_mean_does_not_overflow) {
  expect_right([](const Group& group) -> std::string {
    for (const auto dtype : {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble}) {
      // Exact in bfloat16, too. Their sum, and that of two of them, is beyond the range.
      const double unit = dtype == at::kHalf ? 1 : dtype == at::kDouble ? 0x1p1008 : 0x1p112;
      const double value = unit * (32768 + 8192 * (group.rank() % 2));
      const auto expected = at::full({1000}, unit * 36864, dtype);
      auto all = at::full({1000}, value, dtype);
      group.all_reduce(all, ReduceOp::avg).wait();
      if (!at::equal(all, expected)) return "all_reduce";
      auto one = at::full({1000}, value, dtype);
      group.reduce(one, 3, ReduceOp::avg).wait();
      if (group.rank() == 3 && !at::equal(one, expected)) return "reduce";
      auto part = at::empty({250}, dtype);
      group.reduce_scatter(part, at::full({1000}, value, dtype), ReduceOp::avg).wait();
      if (!at::equal(part, expected.narrow(0, 0, 250))) return "reduce_scatter";
    }
    return "right";
  });
}

TEST_F(Hosts, a_rank_without_parts_takes_part_in_an_all_to_all) {
  expect_right([](const Group& group) -> std::string {
    std::vector<at::Tensor> inputs, outputs;
    for (int rank = 0; rank < group.size(); ++rank) {
      const int64_t rows = group.rank() == 3 || rank == 3 ? 0 : 2;
      inputs.push_back(at::full({rows}, group.rank() + 1.0));
      outputs.push_back(at::zeros({rows}));
    }
    issue(group, {.op = Op::all_to_all, .inputs = inputs, .outputs = outputs, .label = {}}).wait();
    auto one = at::ones({1});
    group.all_reduce(one).wait();
    const double expected = group.rank() == 3 ? 0 : 12;
    return right_if(at::cat(outputs).sum().item<double>() == expected && one.item<float>() == 4, "wrong parts");
  });
}

TEST_F(Hosts, a_reduction_that_the_dtype_does_not_have_is_refused_and_breaks_nothing) {
  expect_right([](const Group& group) -> std::string {
    auto tensor = at::ones({1000});
    try {
      group.all_reduce(tensor, ReduceOp::bxor).wait();
      return "not refused";
    } catch (const UsageError&) {
    }
    group.all_reduce(tensor).wait();
    return right_if((tensor == 4).all().item<bool>(), "wrong sum");
  });
}

TEST_F(Hosts, groups_may_be_waited_for_in_another_order_than_on_other_ranks) {
  expect_right([](const Group& group) -> std::string {
    const auto second = group.subgroup({0, 1, 2, 3});
    const auto here = group.by_host();
    auto one = at::ones({100000}), other = at::ones({1}), local = at::ones({1});
    for (int round = 0; round < 3; ++round) {
      auto work = group.all_reduce(one.fill_(1));
      auto next = second.all_reduce(other.fill_(1));
      auto last = here.all_reduce(local.fill_(1));
      if (group.rank() == 0) {
        last.wait();
        next.wait();
        work.wait();
      } else {
        work.wait();
        next.wait();
        last.wait();
      }
      if (!(one == 4).all().item<bool>() || other.item<float>() != 4 || local.item<float>() != 2) return "wrong sum";
    }
    // Begun on rank 0 before, and on the others after the second one.
    if (group.rank() == 0) {
      auto work = group.all_reduce(one.fill_(1));
      second.all_reduce(other.fill_(1)).wait();
      work.wait();
    } else {
      group.all_reduce(one.fill_(1)).wait();
      second.all_reduce(other.fill_(1)).wait();
    }
    return right_if((one == 4).all().item<bool>() && other.item<float>() == 4, "wrong sum");
  });
}

TEST_F(Hosts, messages_that_nobody_receives_yet_hold_up_no_broadcast) {
  expect_right([](const Group& group) -> std::string {
    std::vector<Work> works;
    for (int tag = 0; tag < 20 && group.rank() == 0; ++tag) {
      works.push_back(group.send(at::full({300000}, tag + 1.0), 1, tag));
    }
    auto tensor = at::full({100000}, group.rank() + 1.0);
    group.broadcast(tensor, 0).wait();
    if (!(tensor == 1).all().item<bool>()) return "wrong broadcast";
    auto received = at::empty({300000});
    for (int tag = 0; tag < 20 && group.rank() == 1; ++tag) {
      group.recv(received, 0, tag).wait();
      if (!(received == tag + 1).all().item<bool>()) return "wrong message";
    }
    for (auto& work : works) work.wait();
    return "right";
  });
}

// Rank 1 waits for rank 3 alone, on another host, and hears of it by rank 0, which goes on as a program that cleans up.
TEST_F(Hosts, a_rank_that_waits_across_hosts_hears_what_its_own_host_knows) {
  WorldOptions options;
  options.stopped_timeout_seconds = 1;
  test::ForkedHosts hosts(
      {2, 2},
      [](const World& world) -> std::string {
        const auto group = world.group().subgroup({0, 1, 2, 3});
        auto tensor = at::ones({500000});
        group.all_reduce(tensor).wait();
        if (world.rank() == 3) std::raise(SIGSTOP);
        try {
          group.all_reduce(tensor).wait();
        } catch (const CommError& error) {
          if (world.rank() == 1) return error.what();
        }
        pause();
        return "";
      },
      options);
  const auto begin = std::chrono::steady_clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(); };
  while (!hosts.text_of(1) && seconds() < 20) usleep(10000);
  const auto text = hosts.text_of(1).value_or("rank 1 waits after 20 s");
  EXPECT_EQ(text.rfind("rank 3 (pid ", 0), 0U) << text;
  for (const int rank : {0, 2, 3}) hosts.signal(rank, SIGKILL);
  hosts.wait(20);
}

// As each change of the ranks of an elastic job does.
TEST_F(Hosts, a_group_that_is_given_up_leaves_no_sockets_behind) {
  expect_right([](const Group& world) -> std::string {
    const auto open = [] {
      const std::filesystem::directory_iterator all("/proc/self/fd");
      return std::distance(begin(all), end(all));
    };
    std::vector<std::ptrdiff_t> counts;
    for (int round = 0; round < 3; ++round) {
      {
        const auto group = world.subgroup({0, 1, 2, 3});
        auto tensor = at::ones({1000});
        group.all_reduce(tensor).wait();
        auto& progress = *state_of(group)->progress;
        progress.failure.set("given up");
        progress.transport->give_up("given up");
      }
      world.barrier().wait();
      counts.push_back(open());
    }
    return right_if(counts[2] == counts[0], fmt::format("{} descriptors, {} later", counts[0], counts[2]));
  });
}

TEST_F(Hosts, a_collective_that_timed_out_on_one_rank_is_over_on_all) {
  for (const int64_t numel : {1, 400000}) {
    SCOPED_TRACE(numel);
    expect_right([numel](const Group& world) -> std::string {
      const auto group = world.subgroup({0, 1, 2, 3});
      state_of(group)->progress->timeout_ms = 300;
      auto tensor = at::full({numel}, world.rank() + 1.0);
      const auto fails = [&] {
        try {
          group.all_reduce(tensor).wait();
          return false;
        } catch (const CommError&) {
          return true;
        }
      };
      world.barrier().wait();
      if (world.rank() != 3 && !fails()) return "no timeout";
      if (world.rank() != 3) tensor.fill_(1000);
      world.barrier().wait();
      if (world.rank() == 3 && !fails()) return "a late rank has got a sum";
      world.barrier().wait();
      return right_if((tensor == (world.rank() == 3 ? 4 : 1000)).all().item<bool>(), "written");
    });
  }
}

}  // namespace
}  // namespace shoal::hosts_test
