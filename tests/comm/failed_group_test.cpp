// A rank whose call has failed goes on with its own tensors. What the others call afterwards fails, too: they must not
// take what is in those tensors for data, and must not write to them.

#include <gmock/gmock.h>

#include <functional>
#include <numeric>
#include <thread>

#include "comm/backend/backend.h"
#include "comm/group/group_state.h"
#include "shoal/error.h"
#include "shoal/group.h"
#include "tests/support/world.h"

namespace shoal::failed_group_test {
namespace {

using test::world;
using ::testing::HasSubstr;

// Its operations have 300 ms.
Group fresh() {
  auto group = test::fresh_group();
  state_of(group)->progress->timeout_ms = 300;
  return group;
}

bool late() {
  return world().rank() == world().size() - 1;
}

std::string error_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    return error.what();
  }
  return "(nothing was thrown)";
}

// All but the last rank call `act` in vain, write to their tensor, and find it untouched once the last one has called
// it. A transport of messages may have all that the last one needs: then `act` is right, which it returns, and the next
// call fails.
void expect_over(const std::function<bool(const Group&, at::Tensor)>& act) {
  for (const int64_t numel : {1, 400000}) {
    for (const bool shared : {false, true}) {
      SCOPED_TRACE(numel);
      const auto group = fresh();
      auto tensor = shared ? group.allocate(numel, at::kFloat) : at::empty({numel});
      tensor.fill_(world().rank() + 1);
      world().group().barrier().wait();
      if (!late()) {
        EXPECT_THAT(error_of([&] { act(group, tensor); }), ::testing::AnyOf(HasSubstr("timeout"), HasSubstr("failed")));
        tensor.fill_(1000);
      }
      world().group().barrier().wait();
      if (late()) {
        const auto begin = Clock::now();
        bool done = false;
        const auto text = error_of([&] {
          EXPECT_TRUE(act(group, tensor)) << "data of a rank that has left";
          done = true;
          group.barrier().wait();
        });
        EXPECT_THAT(text, HasSubstr("failed"));
        EXPECT_LT(Clock::now() - begin, std::chrono::seconds(3)) << text;
        EXPECT_TRUE(done || (tensor == world().rank() + 1).all().item<bool>()) << "data of a rank that has left";
      }
      world().group().barrier().wait();
      if (!late()) {
        EXPECT_TRUE((tensor == 1000).all().item<bool>()) << "written after the error";
      }
    }
  }
}

class FailedGroup : public ::testing::Test {
 protected:
  void SetUp() override {
    if (world().size() == 1) GTEST_SKIP() << "one rank waits for nobody";
    if (world().group().transport() == "mpi") GTEST_SKIP() << "docs/deviations.md";
  }
};

TEST_F(FailedGroup, an_all_reduce_that_timed_out_is_over_on_all_ranks) {
  expect_over([](const Group& group, const at::Tensor& tensor) {
    group.all_reduce(tensor).wait();
    return (tensor == group.size() * (group.size() + 1) / 2).all().item<bool>();
  });
}

TEST_F(FailedGroup, an_all_gather_that_timed_out_is_over_on_all_ranks) {
  expect_over([](const Group& group, const at::Tensor& tensor) {
    auto all = at::empty({tensor.numel() * group.size()});
    group.all_gather(all, tensor).wait();
    return all.equal(at::arange(1, group.size() + 1, at::kFloat).repeat_interleave(tensor.numel()));
  });
}

TEST_F(FailedGroup, a_broadcast_that_timed_out_is_over_on_all_ranks) {
  expect_over([](const Group& group, const at::Tensor& tensor) {
    group.broadcast(tensor, group.size() - 1).wait();
    return (tensor == group.size()).all().item<bool>();
  });
}

TEST_F(FailedGroup, a_receive_that_timed_out_is_over) {
  const auto group = fresh();
  auto tensor = at::full({1000}, 5.0);
  world().group().barrier().wait();
  if (world().rank() == 0) {
    EXPECT_THAT(error_of([&] { group.recv(tensor, world().size() - 1).wait(); }), HasSubstr("detected by rank 0"));
    tensor.fill_(1000);
  }
  world().group().barrier().wait();
  if (late()) {
    const auto text = error_of([&] {
      group.send(tensor, 0).wait();
      group.barrier().wait();
    });
    EXPECT_NE(text, "(nothing was thrown)");
  }
  world().group().barrier().wait();
  if (world().rank() == 0) {
    EXPECT_TRUE((tensor == 1000).all().item<bool>());
  }
}

// Ranks that wait for each other in different groups find it out in the store, of which the transport does not know.
// Before the tests of the backend, whose thread might make the missing call.
TEST_F(FailedGroup, a_difference_between_groups_is_told_to_ranks_that_come_later) {
  const auto first = fresh(), second = fresh();
  for (const auto* group : {&first, &second}) state_of(*group)->progress->timeout_ms = 20000;
  auto tensor = first.allocate(100000, at::kFloat).fill_(world().rank() + 1);
  world().group().barrier().wait();
  if (late()) {
    auto other = at::ones({1});
    EXPECT_NE(error_of([&] { second.all_reduce(other).wait(); }), "(nothing was thrown)");
  } else {
    EXPECT_NE(error_of([&] { first.all_reduce(tensor).wait(); }), "(nothing was thrown)");
    tensor.fill_(1000);
  }
  world().group().barrier().wait();
  if (late()) {
    EXPECT_NE(error_of([&] { first.all_reduce(tensor).wait(); }), "(nothing was thrown)");
  }
  world().group().barrier().wait();
  EXPECT_TRUE((tensor == (late() ? world().size() : 1000)).all().item<bool>());
}

TEST_F(FailedGroup, an_abort_is_told_to_all_ranks) {
  for (const int64_t numel : {1, 400000}) {
    const auto group = fresh();
    const auto backend = make_backend(group, std::chrono::seconds(60));
    const auto begin = Clock::now();
    if (world().rank() == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      backend->abort();
      EXPECT_THROW(group.barrier().wait(), CommError);
    } else {
      std::vector<at::Tensor> tensors{at::ones({numel})};
      const auto work = backend->allreduce(tensors, {});
      std::string text = "(nothing was thrown)";
      try {
        work->wait();
      } catch (const std::exception& error) {
        text = error.what();
      }
      EXPECT_NE(text, "(nothing was thrown)");
      if (group.transport() != "gloo") {
        EXPECT_THAT(text, HasSubstr("rank 0 has aborted the process group"));
      }
    }
    EXPECT_LT(Clock::now() - begin, std::chrono::seconds(5));
    world().group().barrier().wait();
  }
}

// Attempts are numbered on each rank for itself.
TEST_F(FailedGroup, a_subgroup_that_timed_out_can_be_made_again) {
  std::vector<int> everyone(static_cast<size_t>(world().size()));
  std::iota(everyone.begin(), everyone.end(), 0);
  const auto attempt = [&](Milliseconds limit) {
    return error_of([&] {
      const auto group = world().group().subgroup(everyone, limit);
      auto tensor = at::full({3}, group.rank() + 1);
      group.all_reduce(tensor).wait();
      EXPECT_EQ(tensor[0].item<int>(), group.size() * (group.size() + 1) / 2);
    });
  };
  const auto number = std::to_string(world().size() - 1);
  for (int early = 0; early < 2 && !late(); ++early) {
    EXPECT_THAT(attempt(Milliseconds(100)), HasSubstr("within 0.1 s: rank " + number + " has not made this group"));
  }
  world().group().barrier().wait();
  const auto begin = Clock::now();
  for (int stale = 0; stale < 2 && late(); ++stale) {
    EXPECT_THAT(attempt(std::chrono::seconds(20)),
                HasSubstr("rank 0 gave it up after 0.1 s, before rank " + number + " came"));
  }
  EXPECT_EQ(attempt(std::chrono::seconds(20)), "(nothing was thrown)");
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(10));
}

// done() ends loops of programs that ask nothing else.
TEST_F(FailedGroup, work_that_has_failed_is_done) {
  const auto group = fresh();
  if (!late()) {
    auto tensor = at::ones({8});
    auto work = group.all_reduce(tensor);
    const auto begin = Clock::now();
    while (!work.done() && Clock::now() - begin < std::chrono::seconds(10)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_LT(Clock::now() - begin, std::chrono::seconds(8));
    EXPECT_THROW(work.wait(), CommError);
  }
  world().group().barrier().wait();
}

}  // namespace
}  // namespace shoal::failed_group_test
