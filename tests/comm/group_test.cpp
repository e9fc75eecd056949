// Every collective compared with its definition, on 1 to 4 real ranks.

#include "shoal/group.h"

#include <fmt/format.h>

#include <limits>
#include <utility>
#include <vector>

#include "comm/group/group_state.h"
#include "shoal/error.h"
#include "tests/support/world.h"

namespace shoal::group_test {
namespace {

using test::group;

// Element i of rank r's input: different on every rank and at every index.
at::Tensor input(int rank, int64_t numel, at::ScalarType dtype = at::kFloat) {
  return (at::arange(numel, at::kDouble) + 100 * rank + 1).to(dtype);
}

at::Tensor sum_of_inputs(int64_t numel, at::ScalarType dtype = at::kFloat) {
  auto sum = at::zeros({numel}, at::kDouble);
  for (int rank = 0; rank < group().size(); ++rank) sum += input(rank, numel, at::kDouble);
  return sum.to(dtype);
}

TEST(Group, all_reduce_sums_over_ranks_in_every_dtype) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kLong, at::kInt, at::kHalf, at::kBFloat16}) {
    for (const int64_t numel : {1, 7, 1000}) {
      // Small integers, so that 16-bit sums are exact.
      auto tensor = at::full({numel}, group().rank() + 1, dtype);
      group().all_reduce(tensor).wait();
      const int64_t ranks = group().size();
      EXPECT_TRUE(at::equal(tensor, at::full({numel}, ranks * (ranks + 1) / 2, dtype))) << dtype << " " << numel;
    }
  }
}

TEST(Group, a_work_that_is_dropped_is_waited_for_and_harms_nothing) {
  for (int round = 0; round < 3; ++round) {
    double memory[1000];  // freed after this round
    const auto tensor = at::from_blob(memory, {1000}, at::kDouble);
    tensor.copy_(input(group().rank(), 1000, at::kDouble));
    static_cast<void>(group().all_reduce(tensor));
    EXPECT_TRUE(at::equal(tensor, sum_of_inputs(1000, at::kDouble)));
    auto part = at::empty({10}, at::kDouble);
    static_cast<void>(group().reduce_scatter(part, at::ones({10 * group().size()}, at::kDouble)));
    EXPECT_TRUE(at::equal(part, at::full({10}, static_cast<double>(group().size()), at::kDouble)));
    // Replaced by another work.
    auto work = group().broadcast(tensor, 0);
    work = group().barrier();
    work.wait();
  }
  if (group().size() > 1) {
    auto message = at::full({5}, 7.0);
    if (group().rank() == 0) static_cast<void>(group().send(message, 1));
    if (group().rank() == 1) static_cast<void>(group().recv(message.zero_(), 0));
    EXPECT_EQ(message.sum().item<double>(), 35);
  }
}

TEST(Group, a_work_that_an_exception_passes_goes_on_in_the_background) {
  for (int round = 0; round < 3; ++round) {
    try {
      auto work = group().all_reduce(at::ones({100000}));
      if (group().rank() == 0) throw std::runtime_error("something else");
      work.wait();
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "something else");
    }
    auto sum = at::ones({3});
    group().all_reduce(sum).wait();
    EXPECT_EQ(sum[0].item<double>(), group().size());
  }
}

TEST(Group, all_reduce_knows_its_operations) {
  const int64_t ranks = group().size();
  const auto reduced = [&](ReduceOp op) {
    auto tensor = at::full({3}, group().rank() + 1, at::kDouble);
    group().all_reduce(tensor, op).wait();
    return tensor[1].item<double>();
  };
  EXPECT_EQ(reduced(ReduceOp::min), 1);
  EXPECT_EQ(reduced(ReduceOp::max), ranks);
  EXPECT_EQ(reduced(ReduceOp::product), std::tgamma(ranks + 1));
  EXPECT_NEAR(reduced(ReduceOp::avg), (ranks + 1) / 2.0, 1e-12);
}

TEST(Group, a_mean_is_right_where_the_sum_is_beyond_the_range) {
  const int ranks = group().size();
  const double greatest = (ranks + ranks % 2) * 0.5, halves = ranks - greatest;  // how many ranks have it
  const std::vector<std::pair<at::ScalarType, double>> most{{at::kDouble, 0x1.fffffffffffffp1023},
                                                            {at::kFloat, 0x1.fffffep127},
                                                            {at::kHalf, 65504},
                                                            {at::kBFloat16, 0x1.fep127}};
  for (const auto& [dtype, limit] : most) {
    auto tensor = at::full({2000}, -limit, dtype);
    tensor.narrow(0, 0, 3).fill_(0.1);
    tensor.narrow(0, 3, 3).fill_(group().rank() % 2 == 0 ? limit : limit / 2);
    tensor.narrow(0, 6, 2).fill_(group().rank() == 0 ? -std::numeric_limits<double>::infinity() : limit);
    const auto before = tensor.clone();
    group().all_reduce(tensor, ReduceOp::avg).wait();
    const double mean = (limit / ranks) * greatest + (limit / ranks) * (halves / 2);
    EXPECT_NEAR(tensor[3].item<double>() / mean, 1, 1e-2) << dtype;
    EXPECT_EQ(tensor[6].item<double>(), -std::numeric_limits<double>::infinity()) << dtype;
    if (group().transport() == "gloo") {
      EXPECT_TRUE(tensor.narrow(0, 8, 1992).isfinite().all().item<bool>()) << dtype;
    } else {
      EXPECT_TRUE(at::equal(tensor.narrow(0, 0, 3), before.narrow(0, 0, 3))) << dtype << ": equal values stay";
      EXPECT_TRUE(at::equal(tensor.narrow(0, 8, 1992), before.narrow(0, 8, 1992))) << dtype;
    }
  }
}

TEST(Group, a_mean_of_the_smallest_16_bit_numbers_has_all_digits) {
  for (const double value : {17 * 0x1p-24, 2 * 0x1p-24}) {
    auto tensor = at::full({20}, value, at::kHalf);
    group().all_reduce(tensor, ReduceOp::avg).wait();
    EXPECT_TRUE(at::equal(tensor, at::full({20}, value, at::kHalf))) << tensor[0].item<double>() / value;
  }
}

TEST(Group, reduce_gives_the_root_the_sum) {
  for (int root = 0; root < group().size(); ++root) {
    auto tensor = input(group().rank(), 9);
    group().reduce(tensor, root).wait();
    if (group().rank() == root) {
      EXPECT_TRUE(at::equal(tensor, sum_of_inputs(9)));
    }
  }
}

TEST(Group, reduce_scatter_gives_each_rank_its_part) {
  const int64_t part = 5;
  auto output = at::empty({part});
  group().reduce_scatter(output, input(group().rank(), part * group().size())).wait();
  EXPECT_TRUE(at::equal(output, sum_of_inputs(part * group().size()).narrow(0, part * group().rank(), part)));
}

TEST(Group, all_gather_concatenates_in_rank_order) {
  auto output = at::empty({4 * group().size()});
  group().all_gather(output, input(group().rank(), 4)).wait();
  for (int rank = 0; rank < group().size(); ++rank) {
    EXPECT_TRUE(at::equal(output.narrow(0, 4 * rank, 4), input(rank, 4)));
  }
}

TEST(Group, broadcast_gives_every_rank_the_roots_tensor) {
  for (int root = 0; root < group().size(); ++root) {
    auto tensor = input(group().rank(), 6);
    group().broadcast(tensor, root).wait();
    EXPECT_TRUE(at::equal(tensor, input(root, 6)));
  }
}

TEST(Group, gather_and_scatter_are_inverse) {
  const int root = group().size() - 1;
  std::vector<at::Tensor> all;
  if (group().rank() == root) {
    for (int rank = 0; rank < group().size(); ++rank) all.push_back(at::empty({3}));
  }
  group().gather(all, input(group().rank(), 3), root).wait();
  for (int rank = 0; rank < static_cast<int>(all.size()); ++rank) EXPECT_TRUE(at::equal(all[rank], input(rank, 3)));
  auto back = at::empty({3});
  group().scatter(back, all, root).wait();
  EXPECT_TRUE(at::equal(back, input(group().rank(), 3)));
}

TEST(Group, all_to_all_transposes) {
  const int64_t ranks = group().size();
  auto output = at::empty({2 * ranks});
  group().all_to_all(output, input(group().rank(), 2 * ranks)).wait();
  for (int rank = 0; rank < ranks; ++rank) {
    EXPECT_TRUE(at::equal(output.narrow(0, 2 * rank, 2), input(rank, 2 * ranks).narrow(0, 2 * group().rank(), 2)));
  }
}

TEST(Group, all_to_all_refuses_inputs_and_outputs_that_share_memory) {
  const int64_t ranks = group().size();
  if (ranks == 1) GTEST_SKIP() << "nothing moves";
  const auto memory = at::zeros({3 * ranks});
  const auto parts = [&](int64_t begin) { return memory.narrow(0, begin, 2 * ranks).split(2); };
  const auto exchange = [](std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs) {
    issue(group(), {.op = Op::all_to_all, .inputs = std::move(inputs), .outputs = std::move(outputs), .label = {}})
        .wait();
  };
  EXPECT_THROW(exchange({memory.narrow(0, 0, ranks)}, {memory.narrow(0, 0, ranks)}), UsageError);
  EXPECT_THROW(exchange({memory.narrow(0, 0, ranks)}, {memory.narrow(0, ranks - 1, ranks)}), UsageError);
  EXPECT_THROW(exchange(parts(0), parts(0)), UsageError);
  EXPECT_THROW(exchange(parts(0), parts(ranks)), UsageError);
  // Neighbours in memory, and one tensor for all ranks.
  exchange({memory.narrow(0, 0, ranks).fill_(1)}, {memory.narrow(0, ranks, ranks)});
  const std::vector<at::Tensor> same(ranks, memory.narrow(0, 0, 2).fill_(2));
  exchange(same, memory.narrow(0, ranks, 2 * ranks).split(2));
  EXPECT_TRUE((memory.narrow(0, ranks, 2 * ranks) == 2).all().item<bool>());
  // What a rank sends to itself may stay where it is.
  std::vector<at::Tensor> from(same);
  std::vector<at::Tensor> to = memory.narrow(0, ranks, 2 * ranks).split(2);
  from[static_cast<size_t>(group().rank())] = to[static_cast<size_t>(group().rank())].fill_(2);
  exchange(from, to);
  EXPECT_TRUE((memory.narrow(0, ranks, 2 * ranks) == 2).all().item<bool>());
}

// What a rank sends lies where something else arrives.
TEST(Group, inputs_in_the_memory_of_outputs_are_read_before_they_are_overwritten) {
  const int64_t ranks = group().size();
  const int rank = group().rank();
  const auto call = [](Op op, int root, std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs) {
    issue(group(), {.op = op, .peer = root, .inputs = std::move(inputs), .outputs = std::move(outputs), .label = {}})
        .wait();
  };
  for (const int64_t numel : {10, 300000}) {
    for (const bool shared : {false, true}) {
      SCOPED_TRACE(fmt::format("{} {}", numel, shared));
      const auto memory = shared ? group().allocate(numel * (ranks + 1), at::kFloat) : at::zeros({numel * (ranks + 1)});
      const auto whole = memory.narrow(0, 0, numel * ranks);
      const auto part = [&](int64_t of) { return memory.narrow(0, numel * of, numel); };
      const auto in_order = at::arange(1, ranks + 1, at::kFloat).repeat_interleave(numel);
      const auto sum = at::full({numel}, static_cast<double>(ranks * (ranks + 1) / 2 + 10 * ranks * rank));
      const auto fill = [&] { whole.copy_(in_order.mul(10).add(rank - 9)); };  // part q of rank r: 10 q + r + 1
      const auto list = whole.split(numel);
      // The first part, and one that lies across two parts or behind them.
      for (const int64_t begin : {int64_t{0}, numel / 2}) {
        const auto own = memory.narrow(0, begin, numel);
        group().all_gather(whole, own.fill_(rank + 1)).wait();
        EXPECT_TRUE(at::equal(whole, in_order));
        call(Op::all_gather, -1, {own.fill_(rank + 1)}, list);
        EXPECT_TRUE(at::equal(whole, in_order));
        fill();
        group().reduce_scatter(own, whole).wait();
        EXPECT_TRUE(at::equal(own, sum));
        fill();
        call(Op::reduce_scatter, -1, list, {own});
        EXPECT_TRUE(at::equal(own, sum));
        own.fill_(rank + 1);
        call(Op::gather, 0, {own}, rank == 0 ? list : std::vector<at::Tensor>());
        EXPECT_TRUE(rank != 0 || at::equal(whole, in_order));
        whole.copy_(in_order);
        const auto last = part(ranks - 1);
        call(Op::scatter, 0, rank == 0 ? list : std::vector<at::Tensor>(), {rank == 0 ? last : own});
        EXPECT_TRUE((rank == 0 ? last : own).eq(rank + 1).all().item<bool>());
      }
      // Its own part at its own place is not copied.
      const auto own = part(rank);
      group().all_gather(whole, own.fill_(rank + 1)).wait();
      EXPECT_TRUE(at::equal(whole, in_order));
      fill();
      group().reduce_scatter(own, whole).wait();
      EXPECT_TRUE(at::equal(own, sum));
    }
  }
}

TEST(Group, send_and_recv_go_round_a_ring) {
  const int ranks = group().size();
  if (ranks == 1) GTEST_SKIP() << "a rank cannot send to itself";
  auto received = at::empty({8});
  auto sending = group().send(input(group().rank(), 8), (group().rank() + 1) % ranks, 3);
  group().recv(received, (group().rank() + ranks - 1) % ranks, 3).wait();
  sending.wait();
  EXPECT_TRUE(at::equal(received, input((group().rank() + ranks - 1) % ranks, 8)));
}

TEST(Group, sending_to_itself_is_an_error) {
  EXPECT_THROW(group().send(at::ones({2}), group().rank()), UsageError);
  EXPECT_THROW(group().recv(at::ones({2}), group().rank()), UsageError);
}

TEST(Group, barrier_and_empty_tensors_finish) {
  group().barrier().wait();
  const auto none = at::empty({0});
  auto one = at::ones({1});
  group().all_reduce(none).wait();
  group().reduce_scatter(at::empty({0}), none).wait();
  group().all_gather(at::empty({0}), none).wait();
  group().broadcast(none, 0).wait();
  group().all_to_all(at::empty({0}), none).wait();
  const std::vector<at::Tensor> parts(group().rank() == 0 ? group().size() : 0, none);
  group().gather(parts, none, 0).wait();
  group().scatter(at::empty({0}), parts, 0).wait();
  if (group().size() > 1 && group().rank() == 0) group().send(none, 1).wait();
  if (group().rank() == 1) group().recv(none, 0).wait();
  group().all_reduce(one).wait();
  EXPECT_EQ(one.item<float>(), group().size());
}

TEST(Group, messages_may_be_received_in_another_order_than_they_were_sent) {
  if (group().size() == 1) GTEST_SKIP() << "a rank cannot send to itself";
  constexpr int count = 40;
  for (const int64_t numel : {1, 1000, 300000}) {
    for (const bool shared : {false, true}) {
      std::vector<at::Tensor> tensors;
      std::vector<Work> works;
      for (int tag = 0; tag < count; ++tag) {
        auto& tensor = tensors.emplace_back(shared ? group().allocate(numel, at::kFloat) : at::zeros({numel}));
        if (group().rank() == 0) works.push_back(group().send(tensor.fill_(tag + 1), 1, tag));
      }
      for (int tag = count - 1; tag >= 0 && group().rank() == 1; --tag) {
        group().recv(tensors[tag], 0, tag).wait();
        ASSERT_TRUE((tensors[tag] == tag + 1).all().item<bool>()) << tag;
      }
      for (auto& work : works) work.wait();
    }
  }
}

TEST(Group, work_owns_its_tensors) {
  auto tensor = at::ones({1 << 16});
  auto alias = tensor;
  auto work = group().all_reduce(std::exchange(tensor, {}));
  work.wait();
  EXPECT_EQ(alias.sum().item<float>(), static_cast<float>(group().size()) * (1 << 16));
  EXPECT_TRUE(work.done());
}

TEST(Group, refuses_wrong_arguments) {
  EXPECT_THROW(group().all_reduce(at::ones({4, 4}).t()), UsageError);
  EXPECT_THROW(group().broadcast(at::ones({1}), group().size()), UsageError);
  EXPECT_THROW(group().all_gather(at::ones({1}), at::ones({7})), UsageError);
  EXPECT_THROW(group().send(at::ones({1}), (group().rank() + 1) % group().size(), -1), UsageError);
  std::vector<at::Tensor> parts(group().size(), at::ones({3}));
  parts.back() = at::ones({1});
  EXPECT_THROW(group().gather(parts, at::ones({3}), group().rank()), UsageError);
  EXPECT_THROW(group().scatter(at::ones({3}), parts, group().rank()), UsageError);
  EXPECT_THROW(group().gather({}, at::ones({3}), group().rank()), UsageError);
  EXPECT_THROW(group().subgroup({0, 0}), UsageError);
  EXPECT_THROW(group().subgroup({group().size()}), UsageError);
  group().barrier().wait();  // and can continue
}

}  // namespace
}  // namespace shoal::group_test
