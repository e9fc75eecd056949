// Host transport with many operations, groups and threads at a time, and as a c10d backend.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>
#include <chrono>
#include <functional>
#include <future>
#include <limits>
#include <numeric>
#include <optional>
#include <set>
#include <thread>

#include "comm/backend/backend.h"
#include "comm/group/group_state.h"
#include "comm/rendezvous/world_state.h"
#include "comm/shm/wait.h"
#include "shoal/error.h"
#include "tests/comm/busy_cores.h"
#include "tests/comm/host_inputs.h"

namespace shoal::test::host_backend_test {
namespace {

TEST(Host, many_operations_are_in_flight_and_waited_for_in_any_order) {
  // More than the ring of announcements can hold.
  std::vector<at::Tensor> tensors;
  std::vector<Work> works;
  for (int i = 0; i < 100; ++i) {
    tensors.push_back(in_memory(own(i * 37 + 1, at::kFloat, i), i % 3 == 0 ? Memory::staged : Memory::shared));
    works.push_back(group().all_reduce(tensors.back()));
  }
  for (int i = 0; i < 100; ++i) {
    const int at = (i * 37 + 11 * group().rank()) % 100;
    works[at].wait();
    EXPECT_TRUE(at::equal(tensors[at], naive(all_inputs(at * 37 + 1, at::kFloat, at), ReduceOp::sum)));
  }
}

TEST(Host, many_messages_with_one_tag_arrive_in_order) {
  if (group().size() == 1) GTEST_SKIP() << "nobody to send to";
  const int next = (group().rank() + 1) % group().size();
  const int previous = (group().rank() + group().size() - 1) % group().size();
  constexpr int count = 1000;
  std::vector<Work> sent;
  for (int i = 0; i < count; ++i) sent.push_back(group().send(at::full({1}, i, at::kInt), next));
  auto received = at::empty({1}, at::kInt);
  for (int i = 0; i < count; ++i) {
    group().recv(received, previous).wait();
    ASSERT_EQ(received.item<int>(), i);
  }
  for (auto& work : sent) work.wait();
}

TEST(Host, two_groups_are_used_at_the_same_time_in_opposite_order) {
  std::vector<int> everyone(group().size());
  std::iota(everyone.begin(), everyone.end(), 0);
  const auto a = group().subgroup(everyone);
  const auto b = group().subgroup({everyone.rbegin(), everyone.rend()});
  for (int i = 0; i < 50; ++i) {
    auto x = in_memory(own(1000, at::kFloat, i), i % 2 == 0 ? Memory::staged : Memory::shared);
    auto y = in_memory(own(70000, at::kFloat, i + 1), Memory::staged);
    auto in_a = a.all_reduce(x);
    auto in_b = b.all_reduce(y);
    // Even ranks wait for one operation first, odd ranks for the other.
    if (group().rank() % 2 == 0) in_a.wait();
    in_b.wait();
    in_a.wait();
    EXPECT_TRUE(at::equal(x, naive(all_inputs(1000, at::kFloat, i), ReduceOp::sum)));
  }
}

TEST(Host, two_threads_use_a_group_each) {
  std::vector<int> everyone(group().size());
  std::iota(everyone.begin(), everyone.end(), 0);
  const auto a = group().subgroup(everyone);
  const auto b = group().subgroup(everyone);
  const auto work = [](const Group& of) {
    for (int i = 0; i < 200; ++i) {
      auto x = at::full({300}, 1.0F);
      of.all_reduce(x).wait();
      EXPECT_EQ(x[299].item<float>(), of.size());
    }
  };
  std::thread other([&] { work(a); });
  work(b);
  other.join();
}

TEST(HostBackend, takes_parts_of_unequal_sizes) {
  if (group().size() == 1) GTEST_SKIP() << "one part";
  const auto backend = make_backend(group());
  const int size = group().size();
  const auto part_size = [](int rank) { return rank == 1 ? 0 : 5 + 70001 * rank; };
  std::vector<std::vector<at::Tensor>> outputs(1);
  std::vector<std::vector<at::Tensor>> inputs(1);
  for (int rank = 0; rank < size; ++rank) {
    outputs[0].push_back(at::zeros({part_size(rank)}));
    inputs[0].push_back(own(part_size(rank), at::kFloat, rank));
  }
  std::vector<at::Tensor> mine{own(part_size(group().rank()), at::kFloat)};
  backend->allgather(outputs, mine, {})->wait(c10d::kUnsetTimeout);
  for (int rank = 0; rank < size; ++rank)
    EXPECT_TRUE(at::equal(outputs[0][rank], input(rank, part_size(rank), at::kFloat)));

  std::vector<at::Tensor> reduced{at::zeros({part_size(group().rank())})};
  backend->reduce_scatter(reduced, inputs, {})->wait(c10d::kUnsetTimeout);
  EXPECT_TRUE(
      at::equal(reduced[0], naive(all_inputs(part_size(group().rank()), at::kFloat, group().rank()), ReduceOp::sum)));

  // Rank r sends i + r elements to rank i.
  std::vector<int64_t> to;
  std::vector<int64_t> from;
  for (int rank = 0; rank < size; ++rank) {
    to.push_back(rank + group().rank());
    from.push_back(rank + group().rank());
  }
  auto input_tensor = own(std::accumulate(to.begin(), to.end(), int64_t{0}), at::kDouble);
  auto output_tensor = at::zeros({std::accumulate(from.begin(), from.end(), int64_t{0})}, at::kDouble);
  backend->alltoall_base(output_tensor, input_tensor, from, to, {})->wait(c10d::kUnsetTimeout);
  int64_t at = 0;
  for (int rank = 0; rank < size; ++rank) {
    int64_t begin = 0;
    for (int before = 0; before < group().rank(); ++before) begin += before + rank;
    int64_t total = 0;
    for (int any = 0; any < size; ++any) total += any + rank;
    EXPECT_TRUE(at::equal(output_tensor.narrow(0, at, from[rank]),
                          input(rank, total, at::kDouble).narrow(0, begin, from[rank])));
    at += from[rank];
  }
}

TEST(HostBackend, has_coalesced_forms_and_futures) {
  const auto backend = make_backend(group());
  std::vector<at::Tensor> tensors{own(10, at::kFloat), own(100000, at::kFloat), own(3, at::kFloat)};
  const auto work = backend->allreduce_coalesced(tensors, {});
  const auto future = work->getFuture();
  future->waitAndThrow();
  EXPECT_TRUE(work->isCompleted());
  EXPECT_TRUE(work->isSuccess());
  EXPECT_EQ(future->value().toTensorList().size(), 3);
  for (const auto& tensor : tensors) {
    EXPECT_TRUE(at::equal(tensor, naive(all_inputs(tensor.numel(), at::kFloat), ReduceOp::sum)));
  }
  std::vector<at::Tensor> outputs{at::zeros({2 * group().size()}), at::zeros({5 * group().size()})};
  std::vector<at::Tensor> inputs{own(2, at::kFloat), own(5, at::kFloat)};
  backend->allgather_into_tensor_coalesced(outputs, inputs, {})->wait(c10d::kUnsetTimeout);
  EXPECT_TRUE(at::equal(outputs[1], at::cat(all_inputs(5, at::kFloat))));
  backend->reduce_scatter_tensor_coalesced(inputs, outputs, {})->wait(c10d::kUnsetTimeout);
  backend->barrier({})->wait(c10d::kUnsetTimeout);
}

TEST(HostBackend, the_caller_goes_on_while_a_future_is_waited_for) {
  const auto backend = make_backend(group());
  for (int i = 0; i < 20; ++i) {
    std::vector<at::Tensor> first{own(200000, at::kFloat, i)};
    std::vector<at::Tensor> second{own(300, at::kFloat, i)};
    const auto work = backend->allreduce(first, {});
    const auto future = work->getFuture();
    backend->allreduce(second, {})->wait(c10d::kUnsetTimeout);
    work->isCompleted();  // either answer is right; it must not wait
    future->waitAndThrow();
    EXPECT_TRUE(at::equal(first[0], naive(all_inputs(200000, at::kFloat, i), ReduceOp::sum)));
    EXPECT_TRUE(at::equal(second[0], naive(all_inputs(300, at::kFloat, i), ReduceOp::sum)));
  }
}

// A callback waits for a future, whose callback waits for another one, and so on.
TEST(HostBackend, callbacks_of_futures_wait_for_other_futures) {
  std::vector<int> everyone(group().size());
  std::iota(everyone.begin(), everyone.end(), 0);
  const auto nested = make_backend(group().subgroup(everyone));
  const auto backend = make_backend(group());
  const std::function<at::Tensor(int)> sum_of = [&](int depth) {
    std::vector<at::Tensor> tensors{own(1000, at::kFloat, depth)};
    const auto future = nested->allreduce(tensors, {})->getFuture();
    std::promise<void> done;
    future->addCallback([&, depth](c10::ivalue::Future&) {
      if (depth > 0) sum_of(depth - 1);
      done.set_value();
    });
    done.get_future().wait();
    return tensors[0];
  };
  for (int i = 0; i < 20; ++i) {
    std::promise<at::Tensor> promise;
    std::vector<at::Tensor> first{own(300, at::kFloat, i)};
    backend->allreduce(first, {})->getFuture()->addCallback(
        [&](c10::ivalue::Future&) { promise.set_value(sum_of(3)); });
    std::vector<at::Tensor> second{own(300, at::kFloat, i)};
    backend->allreduce(second, {})->wait(c10d::kUnsetTimeout);
    auto result = promise.get_future();
    ASSERT_EQ(result.wait_for(std::chrono::seconds(30)), std::future_status::ready);
    EXPECT_TRUE(at::equal(result.get(), naive(all_inputs(1000, at::kFloat, 3), ReduceOp::sum)));
    EXPECT_TRUE(at::equal(second[0], naive(all_inputs(300, at::kFloat, i), ReduceOp::sum)));
  }
}

TEST(HostBackend, a_work_may_outlive_its_backend) {
  for (int i = 0; i < 20; ++i) {
    auto backend = make_backend(group());
    std::vector<at::Tensor> first{own(1000, at::kFloat, i)};
    std::vector<at::Tensor> second{own(300, at::kFloat, i)};
    auto asked_before = backend->allreduce(first, {});
    auto asked_after = backend->allreduce(second, {});
    const auto early = asked_before->getFuture();
    backend.reset();
    asked_before.reset();
    const auto late = asked_after->getFuture();
    asked_after.reset();
    early->waitAndThrow();
    late->waitAndThrow();
    EXPECT_TRUE(at::equal(first[0], naive(all_inputs(1000, at::kFloat, i), ReduceOp::sum)));
    EXPECT_TRUE(at::equal(second[0], naive(all_inputs(300, at::kFloat, i), ReduceOp::sum)));
  }
}

// A slower peer still uses memory that a faster one has released.
TEST(HostTransport, memory_of_unfinished_operations_is_not_given_to_others_when_their_group_goes) {
  if (group().size() == 1) GTEST_SKIP() << "no peers";
  std::vector<int> all(group().size());
  std::iota(all.begin(), all.end(), 0);
  constexpr int64_t numel = 100000;
  std::optional<Group> doomed = group().subgroup(all);
  const auto start_and_drop = [&] {
    try {
      const auto work = doomed->all_reduce(doomed->allocate(numel, at::kFloat).fill_(1));
      throw std::runtime_error("nobody waits for it");
    } catch (const std::runtime_error&) {  // NOLINT(bugprone-empty-catch): thrown above
    }
    doomed.reset();
  };
  at::Tensor fresh;
  if (group().rank() == 0) {
    start_and_drop();
    fresh = group().allocate(numel, at::kFloat);
  }
  group().barrier().wait();
  if (group().rank() != 0) start_and_drop();
  group().barrier().wait();
  if (group().rank() == 0) {
    EXPECT_EQ(fresh.count_nonzero().item<int64_t>(), 0);
  }
}

TEST(HostTransport, memory_of_a_group_that_was_awaited_in_vain_is_free_once_all_have_given_up) {
  if (group().size() == 1) GTEST_SKIP() << "one rank awaits nobody";
  const auto& world = state_of(group())->world;
  auto& memory = *world->memory;
  for (int round = 0; round < 2; ++round) {  // an allocation frees what earlier groups have left
    group().barrier().wait();
    memory.free(memory.allocate(1));
  }
  group().barrier().wait();
  if (group().rank() == 0) {
    std::vector<int> all(group().size());
    std::iota(all.begin(), all.end(), 0);
    const auto before = memory.bytes_in_use();
    EXPECT_THROW(make_group_state(world, "awaited in vain", all, Milliseconds(50)), CommError);
    EXPECT_GT(memory.bytes_in_use(), before);  // a late rank may open it
    memory.free_retired();
    EXPECT_LE(memory.bytes_in_use(), before);
  }
  group().barrier().wait();
}

TEST(HostBackend, receives_from_any_source) {
  if (group().size() == 1) GTEST_SKIP() << "nobody sends";
  constexpr int64_t numel = 200000;  // several pieces
  if (group().rank() != 0) {
    group().send(input(group().rank(), numel, at::kFloat), 0, 3).wait();
    return;
  }
  std::set<int> sources;
  for (int i = 1; i < group().size(); ++i) {
    auto received = at::empty({numel});
    auto work = group().recv(received, any_source, 3);
    while (!work.wait_for(std::chrono::milliseconds(5))) {
    }
    EXPECT_TRUE(at::equal(received, input(work.source(), numel, at::kFloat)));
    sources.insert(work.source());
  }
  EXPECT_EQ(static_cast<int>(sources.size()), group().size() - 1);
}

TEST(HostBackend, of_a_recorded_group_ends_once_its_messages_are_read) {
  if (group().size() == 1) GTEST_SKIP() << "nobody to send to";
  const auto now = [] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  };
  const auto backend = make_backend(group().recorded(std::make_shared<CallLog>()));
  group().barrier().wait();
  double ended = 0, read = 0;
  if (group().rank() == 0) {
    group().send(at::ones({200000}), 1).wait();
    backend->shutdown();
    ended = now();
  } else if (group().rank() == 1) {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    read = now();
    group().recv(at::empty({200000}), 0).wait();
  }
  const auto times = group().all_reduce(std::vector<double>{ended, read});
  EXPECT_GE(times[0], times[1]);
}

TEST(HostBackend, an_operation_has_a_timeout_of_its_own) {
  if (group().size() == 1) GTEST_SKIP() << "nobody is late";
  std::vector<int> all(group().size());
  std::iota(all.begin(), all.end(), 0);
  for (const auto& tensor : {at::ones({3}), at::ones({3}).to_sparse()}) {
    const auto backend = make_backend(group().subgroup(all));
    if (group().rank() == 0) {
      std::vector<at::Tensor> tensors{tensor};
      c10d::AllreduceOptions options;
      options.timeout = std::chrono::milliseconds(300);
      try {
        backend->allreduce(tensors, options)->wait(std::chrono::milliseconds(0));
        FAIL() << "nothing was thrown";
      } catch (const CommError& error) {
        EXPECT_THAT(error.what(), testing::HasSubstr("not finished within the timeout of 0.3 s"));
      }
    }
    group().barrier().wait();
  }
}

TEST(HostBackend, buffers_are_reused) {
  const auto backend = make_backend(group());
  auto buffer = backend->allocateTensor(100000, at::kFloat);
  const auto* data = buffer.data_ptr();
  auto other = backend->allocateTensor(100000, at::kFloat);
  EXPECT_NE(other.data_ptr(), data);
  buffer.reset();
  buffer = backend->allocateTensor(99900, at::kFloat);
  EXPECT_EQ(buffer.data_ptr(), data);
  buffer.fill_(1);
  std::vector<at::Tensor> tensors{buffer};
  backend->allreduce(tensors, {})->wait(c10d::kUnsetTimeout);
  EXPECT_EQ(buffer[99899].item<float>(), group().size());
}

// Polls of a wait that lasts for longer than any spin.
TEST(Host, waits_do_not_poll_while_other_programs_want_the_cores) {
  if (group().size() > 1) GTEST_SKIP() << "one process sees it";
  if (!BusyCores::seen()) GTEST_SKIP() << "this system does not tell, or gives this process some cores only";
  auto& memory = *state_of(group())->world->memory;
  const BusyCores busy;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  int fewest = std::numeric_limits<int>::max();
  while (fewest > 4 && std::chrono::steady_clock::now() < end) {
    int polls = 0;
    shm::wait_until(memory, /*may_spin=*/true, std::chrono::milliseconds(5), [&] {
      ++polls;
      return false;
    });
    fewest = std::min(fewest, polls);
  }
  EXPECT_LE(fewest, 4);
}

TEST(HostBackend, premultiplied_sum) {
  const auto backend = make_backend(group());
  for (const int64_t numel : {3, 200000}) {
    std::vector<at::Tensor> tensors{own(numel, at::kDouble)};
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::makePreMulSum(0.5 + group().rank());
    backend->allreduce(tensors, options)->wait(c10d::kUnsetTimeout);
    auto expected = at::zeros({numel}, at::kDouble);
    for (int rank = 0; rank < group().size(); ++rank) expected += input(rank, numel, at::kDouble) * (0.5 + rank);
    EXPECT_TRUE(at::allclose(tensors[0], expected, 1e-14));
  }
}

}  // namespace
}  // namespace shoal::test::host_backend_test
