// BEY09: if ranks call different things, all of them report it before any data are changed: on the host transport, and
// on Gloo and MPI with --check-agreement. Without it, ranks that wait find out.

#include <gmock/gmock.h>

#include <functional>
#include <thread>

#include "comm/backend/backend.h"
#include "comm/group/group_state.h"
#include "comm/rendezvous/world_state.h"
#include "shoal/error.h"
#include "shoal/group.h"
#include "tests/support/world.h"

namespace shoal::disagree_test {
namespace {

using test::world;
using ::testing::HasSubstr;

bool odd_one() {
  return world().rank() == world().size() - 1;
}

// Whether the transport looks at every message by itself.
bool compares_messages() {
  const auto transport = world().group().transport();
  return transport == "host" || transport == "tcp";
}

// Whether ranks compare calls before any data are changed.
bool compares_first() {
  return compares_messages() || state_of(world().group())->world->options.check_agreement;
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Every rank calls `act`. All must throw DisagreeError with the same sentence, which contains `parts`, and `data` must
// not change.
void expect_named(const std::function<void(const Group&, at::Tensor)>& act, const std::vector<std::string>& parts) {
  for (const int64_t numel : {4, 1000, 400000}) {
    for (const bool shared : {false, true}) {
      const auto group = test::fresh_group();
      auto tensor = shared ? group.allocate(numel, at::kFloat) : at::empty({numel});
      tensor.fill_(world().rank() + 1);
      std::string text = "(nothing was thrown)";
      world().group().barrier().wait();
      const auto start = Clock::now();
      try {
        act(group, tensor);
        if (!compares_first()) group.barrier().wait();  // one rank's completed work, before another one comes
      } catch (const DisagreeError& error) {
        text = error.what();
      }
      EXPECT_LT(seconds_since(start), compares_first() ? 2 : 4);
      for (const auto& part : parts) EXPECT_THAT(text, HasSubstr(part)) << "numel " << numel;
      if (compares_first()) {
        EXPECT_TRUE((tensor == world().rank() + 1).all().item<bool>()) << "data were touched";
      }
      EXPECT_THROW(group.barrier(), CommError) << "the group is unusable now";
      const auto sentence = text.substr(0, text.find(" (detected"));
      auto hash = at::full({1}, static_cast<int64_t>(std::hash<std::string>()(sentence)), at::kLong);
      auto lowest = hash.clone();
      world().group().all_reduce(lowest, ReduceOp::min).wait();
      EXPECT_EQ(lowest.item<int64_t>(), hash.item<int64_t>()) << "ranks say different things: " << sentence;
    }
  }
}

class Disagreement : public ::testing::Test {
 protected:
  void SetUp() override {
    if (world().size() == 1) GTEST_SKIP() << "one rank agrees with itself";
  }
};

TEST_F(Disagreement, BEY09_names_different_operations) {
  expect_named(
      [](const Group& group, const at::Tensor& tensor) {
        if (odd_one()) {
          group.broadcast(tensor, 0).wait();
        } else {
          group.all_reduce(tensor).wait();
        }
      },
      {"different operations as #0", "rank 0 called all_reduce(sum", "called broadcast("});
}

TEST_F(Disagreement, BEY09_names_different_shapes) {
  expect_named(
      [](const Group& group, const at::Tensor& tensor) {
        group.all_reduce(odd_one() ? tensor.narrow(0, 0, tensor.numel() - 1) : tensor).wait();
      },
      {"rank 0 called all_reduce(sum, ", " x Float)"});
}

TEST_F(Disagreement, BEY09_names_a_call_that_is_empty_on_one_rank) {
  expect_named(
      [](const Group& group, const at::Tensor& tensor) {
        auto part = tensor.narrow(0, 0, odd_one() ? 0 : 1);
        group.all_reduce(part).wait();
        auto next = tensor.narrow(0, 1, 1);
        group.all_reduce(next).wait();
      },
      {"rank 0 called all_reduce(sum, 1 x Float)", "called all_reduce(sum, 0 x Float)"});
}

TEST_F(Disagreement, BEY09_names_different_dtypes_of_equal_size) {
  expect_named([](const Group& group,
                  const at::Tensor& tensor) { group.all_reduce(odd_one() ? tensor.view(at::kInt) : tensor).wait(); },
               {"x Float)", "x Int)"});
  expect_named(
      [](const Group& group, const at::Tensor& tensor) {
        group.all_reduce(tensor.view(odd_one() ? at::kHalf : at::kBFloat16)).wait();
      },
      {"x Half)", "x BFloat16)"});
}

TEST_F(Disagreement, BEY09_names_different_reductions) {
  expect_named(
      [](const Group& group, const at::Tensor& tensor) {
        group.all_reduce(tensor, odd_one() ? ReduceOp::max : ReduceOp::sum).wait();
      },
      {"all_reduce(sum", "all_reduce(max"});
}

TEST_F(Disagreement, BEY09_names_different_roots) {
  expect_named([](const Group& group, const at::Tensor& tensor) { group.broadcast(tensor, odd_one() ? 1 : 0).wait(); },
               {"root 0", "root 1"});
}

TEST_F(Disagreement, BEY09_names_operations_that_traded_places) {
  expect_named(
      [](const Group& group, const at::Tensor& tensor) {
        const Label first{3, 0, "gradients of fc1.weight"};
        const Label second{3, 1, "gradients of fc2.weight"};
        auto other = tensor.clone();
        auto a = group.all_reduce(tensor, ReduceOp::sum, odd_one() ? second : first);
        auto b = group.all_reduce(other, ReduceOp::sum, odd_one() ? first : second);
        a.wait();
        b.wait();
      },
      {"step 3, bucket 0: gradients of fc1.weight", "step 3, bucket 1: gradients of fc2.weight"});
}

TEST_F(Disagreement, BEY09_names_an_operation_that_one_rank_left_out) {
  expect_named(
      [](const Group& group, const at::Tensor& tensor) {
        if (!odd_one()) group.all_reduce(tensor.clone(), ReduceOp::sum, {1, 0, "fc1"}).wait();
        group.all_reduce(tensor, ReduceOp::sum, {1, 1, "fc2"}).wait();
      },
      {"bucket 0: fc1", "bucket 1: fc2"});
}

TEST_F(Disagreement, BEY09_names_an_operation_that_one_rank_added) {
  expect_named(
      [](const Group& group, const at::Tensor& tensor) {
        if (odd_one()) group.all_reduce(tensor.clone(), ReduceOp::sum, {1, 0, "extra"}).wait();
        group.all_reduce(tensor, ReduceOp::sum, {1, 0, "loss"}).wait();
      },
      {"bucket 0: extra", "bucket 0: loss"});
}

void expect_different_groups_named() {
  const auto first = test::fresh_group();
  const auto second = test::fresh_group();
  for (const auto* group : {&first, &second}) {
    auto sum = at::ones({4});
    group->all_reduce(sum).wait();
    ASSERT_EQ(sum[0].item<float>(), group->size());
  }
  auto tensor = at::full({1000}, world().rank() + 1.0);
  std::string text = "(nothing was thrown)";
  world().group().barrier().wait();
  const auto start = Clock::now();
  try {
    (odd_one() ? second : first).all_reduce(tensor, ReduceOp::sum, {3, 0, "loss"}).wait();
  } catch (const DisagreeError& error) {
    text = error.what();
  }
  EXPECT_LT(seconds_since(start), 2);
  EXPECT_THAT(text, HasSubstr("ranks wait for each other in different groups: rank 0 waits in group '" + first.name()));
  EXPECT_THAT(text, HasSubstr("rank " + std::to_string(world().size() - 1) + " waits in group '" + second.name()));
  EXPECT_THAT(text, HasSubstr("step 3, bucket 0: loss"));
  if (compares_first()) {
    EXPECT_TRUE((tensor == world().rank() + 1.0).all().item<bool>()) << "data were touched";
  }
}

// No group sees the difference; each rank waits for the others. Repeated, because the first rank to notice releases
// groups that others still wait in.
TEST_F(Disagreement, BEY09_names_different_groups) {
  if (world().group().transport() == "mpi") GTEST_SKIP() << "MPI waits at its end for what is not finished";
  for (int i = 0; i < 4; ++i) expect_different_groups_named();
}

// Rank 0 only looks whether the first one is finished, and would go on.
TEST_F(Disagreement, BEY09_a_wait_with_a_limit_is_no_difference) {
  if (!state_of(world().group())->progress->transport->checks_agreement()) {
    GTEST_SKIP() << "calls are compared before they start, so both groups need one order";
  }
  const auto first = test::fresh_group();
  const auto second = test::fresh_group();
  auto one = at::ones({1}), other = at::ones({1});
  world().group().barrier().wait();
  if (world().rank() == 0) {
    auto work = first.all_reduce(one);
    EXPECT_FALSE(work.wait_for(std::chrono::milliseconds(2500)));
    second.all_reduce(other).wait();
    work.wait();
  } else {
    second.all_reduce(other).wait();
    first.all_reduce(one).wait();
  }
  EXPECT_EQ(one.item<float>(), world().size());
  EXPECT_EQ(other.item<float>(), world().size());
}

// While the thread lives it might call what another rank waits for; after that it cannot.
TEST_F(Disagreement, BEY09_names_different_groups_after_a_thread_that_has_ended) {
  if (world().group().transport() == "mpi") GTEST_SKIP() << "MPI waits at its end for what is not finished";
  std::thread([] { world().group().barrier().wait(); }).join();
  expect_different_groups_named();
}

// It may give the group to a thread that has not called anything yet, and whose call another rank waits for.
TEST_F(Disagreement, BEY09_a_thread_that_makes_a_group_counts_as_one_that_calls) {
  if (world().group().transport() == "mpi") GTEST_SKIP() << "MPI may be without calls from several threads";
  world().group().barrier().wait();
  const auto& activity = state_of(world().group())->world->activity;
  EXPECT_FALSE(activity.several_threads());
  std::thread([&] {
    const auto of_two_threads = test::fresh_group();
    EXPECT_TRUE(activity.several_threads());
  }).join();
  EXPECT_FALSE(activity.several_threads());
}

// No waiting rank sees the difference: the root of a small broadcast is done once it has sent the bytes, and then waits
// elsewhere.
TEST_F(Disagreement, BEY09_names_an_operation_that_one_rank_has_done) {
  if (world().group().transport() == "mpi") GTEST_SKIP() << "MPI waits at its end for what is not finished";
  const auto first = test::fresh_group();
  const auto second = test::fresh_group();
  std::string text = "(nothing was thrown)";
  world().group().barrier().wait();
  const auto start = Clock::now();
  try {
    if (odd_one()) {
      auto mine = at::ones({4});
      first.broadcast(mine, first.rank(), {5, -1, "what I have"}).wait();
      second.barrier().wait();
    } else {
      first.all_gather(at::empty({4 * first.size()}), at::ones({4}), {5, -1, "what all have"}).wait();
    }
  } catch (const DisagreeError& error) {
    text = error.what();
  }
  EXPECT_LT(seconds_since(start), 4);
  EXPECT_THAT(text, HasSubstr("different operations as #0"));
  EXPECT_THAT(text, HasSubstr("all_gather(4 x Float), step 5: what all have"));
  EXPECT_THAT(text, HasSubstr("called broadcast(4 x Float, root"));
}

// The late rank is told when it comes.
TEST_F(Disagreement, BEY09_a_rank_that_comes_late_is_told_too) {
  const auto group = test::fresh_group();
  std::string text = "(nothing was thrown)";
  world().group().barrier().wait();
  const auto start = Clock::now();
  if (world().rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(3500));
  try {
    auto tensor = at::ones({100});
    odd_one() ? group.all_gather(at::empty({100 * group.size()}), tensor).wait() : group.all_reduce(tensor).wait();
  } catch (const DisagreeError& error) {
    text = error.what();
  }
  EXPECT_LT(seconds_since(start), 7);
  EXPECT_THAT(text, HasSubstr("different operations as #0"));
  EXPECT_THAT(text, HasSubstr("called all_reduce(sum, 100 x Float)"));
  EXPECT_THAT(text, HasSubstr("called all_gather(100 x Float)"));
}

// More operations are in flight than a rank publishes or remembers.
TEST_F(Disagreement, BEY09_names_the_first_of_many_operations) {
  const auto group = test::fresh_group();
  std::string text = "(nothing was thrown)";
  world().group().barrier().wait();
  std::vector<at::Tensor> tensors;
  std::vector<Work> works;
  try {
    if (odd_one()) {
      group.barrier().wait();
    } else {
      for (int64_t i = 0; i < 40; ++i) {
        works.push_back(group.all_reduce(tensors.emplace_back(at::ones({10})), ReduceOp::sum, {1, i, "one of many"}));
      }
      for (auto& work : works) work.wait();
    }
  } catch (const DisagreeError& error) {
    text = error.what();
  }
  EXPECT_THAT(text, HasSubstr("different operations as #0"));
  EXPECT_THAT(text, HasSubstr("bucket 0: one of many"));
  EXPECT_THAT(text, HasSubstr("called barrier"));
}

// A rank that is late by more than that, in any order of work, is merely late.
TEST_F(Disagreement, BEY09_a_rank_that_is_late_is_no_difference) {
  const auto first = test::fresh_group();
  const auto second = test::fresh_group();
  auto a = at::ones({4});
  auto b = at::ones({4});
  if (odd_one()) std::this_thread::sleep_for(std::chrono::milliseconds(2500));
  auto works = std::pair(first.all_reduce(a), second.all_reduce(b));
  (odd_one() ? works.second : works.first).wait();
  (odd_one() ? works.first : works.second).wait();
  EXPECT_EQ(a[0].item<float>() + b[0].item<float>(), 2 * world().size());
}

// Half as many elements of twice the size have as many bytes.
TEST_F(Disagreement, BEY09_names_different_dtypes_of_equal_bytes) {
  expect_named([](const Group& group,
                  const at::Tensor& tensor) { group.all_reduce(odd_one() ? tensor.view(at::kDouble) : tensor).wait(); },
               {"x Float)", "x Double)"});
}

TEST_F(Disagreement, BEY09_names_different_parts_of_a_gather) {
  expect_named(
      [](const Group& group, const at::Tensor& tensor) {
        const auto part = odd_one() ? tensor.narrow(0, 0, tensor.numel() / 2) : tensor;
        group.all_gather(at::empty({part.numel() * group.size()}), part.contiguous()).wait();
      },
      {"all_gather(", "rank 0 called"});
}

TEST_F(Disagreement, BEY09_names_a_barrier_beside_a_collective) {
  expect_named([](const Group& group,
                  const at::Tensor& tensor) { odd_one() ? group.barrier().wait() : group.all_reduce(tensor).wait(); },
               {"rank 0 called all_reduce(sum", "called barrier"});
}

TEST_F(Disagreement, BEY09_names_different_steps) {
  expect_named(
      [](const Group& group, const at::Tensor& tensor) {
        group.all_reduce(tensor, ReduceOp::sum, {odd_one() ? 8 : 7, 0, "fc1"}).wait();
      },
      {"step 7, bucket 0: fc1", "step 8, bucket 0: fc1"});
}

class DisagreementMessages : public Disagreement {
 protected:
  void SetUp() override {
    Disagreement::SetUp();
    if (!compares_messages()) GTEST_SKIP() << "not on " << world().group().transport();
  }
};

TEST_F(DisagreementMessages, BEY09_names_unequal_parts_that_do_not_fit) {
  const auto group = test::fresh_group();
  const auto backend = make_backend(group);
  std::vector<std::vector<at::Tensor>> outputs(1);
  for (int rank = 0; rank < group.size(); ++rank) {
    const bool larger = rank == group.rank() && odd_one();  // than the other ranks expect
    outputs[0].push_back(at::zeros({rank + (larger ? 2 : 1)}));
  }
  std::vector<at::Tensor> mine{at::ones_like(outputs[0][group.rank()])};
  try {
    backend->allgather(outputs, mine, {})->wait(c10d::kUnsetTimeout);
    FAIL() << "nothing was thrown";
  } catch (const DisagreeError& error) {
    EXPECT_THAT(error.what(), HasSubstr("which expects"));
  }
  EXPECT_EQ(outputs[0][0].sum().item<float>(), 0);
}

// The rank that is told first ends its connections, which the others must not see before they are told.
TEST_F(DisagreementMessages, BEY09_names_a_message_that_does_not_fit_its_receiver) {
  for (int i = 0; i < 10; ++i) {
    const auto group = test::fresh_group();
    auto tensor = at::ones({10});
    std::string text;
    try {
      if (group.rank() == 0) group.send(tensor, 1).wait();
      if (group.rank() == 1) group.recv(at::zeros({11}), 0).wait();
      group.barrier().wait();
    } catch (const DisagreeError& error) {
      text = error.what();
    }
    EXPECT_THAT(text, HasSubstr("rank 0 sends 40 bytes"));
    EXPECT_THAT(text, HasSubstr("rank 1 expects 44 bytes"));
  }
}

}  // namespace
}  // namespace shoal::disagree_test
