// Every collective compared with its definition, on 1 to 4 real ranks.

#include "shoal/group.h"

#include <fmt/format.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numeric>

#include "comm/group/group_state.h"
#include "shoal/error.h"
#include "tests/support/refusal.h"
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

// Such views share memory with a tensor of other values.
TEST(Group, conjugate_and_negated_views_arrive_as_their_values) {
  const auto& group = test::group();
  const int size = group.size(), rank = group.rank(), next = (rank + 1) % size;
  const auto value = [](int of) { return c10::complex<float>(static_cast<float>(of + 1), 5); };
  const auto conj = [&](int of) { return at::conj(at::full({4}, value(of), at::kComplexFloat)); };
  const auto right = [&](const at::Tensor& tensor, int of) {
    return tensor.eq(at::Scalar(c10::complex<float>(static_cast<float>(of + 1), -5))).all().item<bool>();
  };
  const auto arrives = [](int64_t numel) { return at::zeros({numel}, at::kComplexFloat); };
  auto all = arrives(4 * size);
  group.all_gather(all, conj(rank)).wait();
  for (int of = 0; of < size; ++of) EXPECT_TRUE(right(all.narrow(0, 4 * of, 4), of)) << all;
  auto root = rank == 0 ? conj(0) : arrives(4);
  group.broadcast(root, 0).wait();
  EXPECT_TRUE(right(root, 0)) << root;
  auto part = arrives(4);
  group.scatter(part, rank == 0 ? std::vector<at::Tensor>(size, conj(3)) : std::vector<at::Tensor>(), 0).wait();
  EXPECT_TRUE(right(part, 3)) << part;
  if (size > 1) {
    auto sending = group.send(conj(rank), next);
    group.recv(part, (rank + size - 1) % size).wait();
    sending.wait();
    EXPECT_TRUE(right(part, (rank + size - 1) % size)) << part;
  }
  const auto negated = at::imag(at::conj(at::full({1}, c10::complex<float>(1, 3), at::kComplexFloat)));  // -3
  ASSERT_TRUE(negated.is_neg() && negated.is_contiguous());
  auto sum = at::zeros({1});
  group.reduce_scatter(sum, size == 1 ? negated : at::full({size}, -3.0)).wait();
  EXPECT_EQ(sum.item<float>(), -3.F * static_cast<float>(size));
  // Results would have to be written with other values than they have.
  EXPECT_THROW(group.all_reduce(negated), UsageError);
  EXPECT_THROW(group.all_gather(at::conj(all), part), UsageError);
  const auto text = test::refusal<UsageError>([&] { group.reduce(negated, 0).wait(); });
  EXPECT_NE(text.find("tensor.resolve_conj().resolve_neg()"), std::string::npos) << text;
  EXPECT_EQ(group.all_reduce(1.0), size);  // and can continue
}

// It is contiguous, whatever its strides.
TEST(Group, an_element_of_a_column_is_moved_and_summed) {
  const auto& group = test::group();
  const int size = group.size(), rank = group.rank(), next = (rank + 1) % size;
  const auto table = at::zeros({4, 2});
  const auto cell = table.narrow(0, 1, 1).select(1, 0).fill_(rank + 1);
  ASSERT_EQ(cell.stride(0), 2);
  auto all = at::zeros({size});
  group.all_gather(all, cell).wait();
  EXPECT_TRUE(at::equal(all, at::arange(1, size + 1, at::kFloat)));
  if (size > 1) {
    auto received = at::zeros({1});
    auto sending = group.send(cell, next);
    group.recv(received, (rank + size - 1) % size).wait();
    sending.wait();
    EXPECT_EQ(received.item<int>(), (rank + size - 1) % size + 1);
  }
  group.broadcast(cell, size - 1).wait();
  EXPECT_EQ(cell.item<int>(), size);
  group.all_reduce(cell).wait();
  EXPECT_EQ(cell.item<int>(), size * size);
  const std::vector<at::Tensor> parts(static_cast<size_t>(size), cell);
  std::vector<at::Tensor> arrive;
  for (int of = 0; of < size; ++of) arrive.push_back(at::zeros({4, 2}).narrow(0, 1, 1).select(1, 0));
  issue(group, {.op = Op::all_to_all, .inputs = parts, .outputs = arrive, .label = {}}).wait();
  EXPECT_EQ(arrive[static_cast<size_t>(next)].item<int>(), size * size);
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

TEST(Group, subgroups_number_their_ranks_anew) {
  const int ranks = group().size();
  std::vector<int> mine;
  for (int rank = group().rank() % 2; rank < ranks; rank += 2) mine.push_back(rank);
  const auto half = group().subgroup(mine);
  EXPECT_EQ(half.size(), static_cast<int>(mine.size()));
  EXPECT_EQ(half.world_rank(half.rank()), group().rank());
  auto tensor = at::full({1}, group().rank(), at::kLong);
  half.all_reduce(tensor).wait();
  EXPECT_EQ(tensor.item<int64_t>(), std::accumulate(mine.begin(), mine.end(), 0));
  EXPECT_EQ(group().by_host().size(), ranks);
}

// An early rank must not close its end before a late one has connected.
TEST(Group, may_go_as_soon_as_it_is_made) {
  std::vector<int> everyone(group().size());
  std::iota(everyone.begin(), everyone.end(), 0);
  for (int i = 0; i < 30; ++i) group().subgroup(everyone);
}

TEST(Group, may_go_as_soon_as_its_last_operation_is_done) {
  std::vector<int> everyone(group().size());
  std::iota(everyone.begin(), everyone.end(), 0);
  for (int i = 0; i < 30; ++i) {
    const auto part = at::full({64}, group().rank(), at::kByte);
    auto all = at::empty({64 * group().size()}, at::kByte);
    group().subgroup(everyone).all_gather(all, part).wait();
    for (int rank = 0; rank < group().size(); ++rank) EXPECT_EQ(all[64 * rank].item<int>(), rank);
  }
}

// A rank that is ahead of the others keeps one or two groups a little longer.
TEST(Group, leaves_nothing_behind_when_all_ranks_have_let_go_of_it) {
  std::vector<int> everyone(group().size());
  std::iota(everyone.begin(), everyone.end(), 0);
  const auto descriptors_after = [&](int groups) {
    for (int i = 0; i < groups; ++i) group().subgroup(everyone).barrier().wait();
    group().barrier().wait();
    const std::filesystem::directory_iterator entries("/proc/self/fd");
    return std::distance(begin(entries), end(entries));
  };
  const auto before = descriptors_after(5);
  EXPECT_LT(descriptors_after(40) - before, 40);
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

TEST(Group, refuses_reductions_that_the_dtype_does_not_have) {
  EXPECT_THROW(group().all_reduce(at::ones({3}, at::kInt), ReduceOp::avg), UsageError);
  EXPECT_THROW(group().all_reduce(at::ones({3}, at::kBool), ReduceOp::avg), UsageError);
  EXPECT_THROW(group().all_reduce(at::ones({3}), ReduceOp::bxor), UsageError);
  EXPECT_THROW(group().reduce(at::ones({3}, at::kUInt16), 0), UsageError);
  const auto part = at::ones({3}, at::kComplexFloat);
  EXPECT_THROW(group().reduce_scatter(part, part.repeat({group().size()})), UsageError);
  if (group().rank() == 0) {  // the others' next call is its next call, too
    const Call premultiplied{.op = Op::all_reduce,
                             .reduce = ReduceOp::premul_sum,
                             .factor = 2,
                             .inputs = {at::ones({3}, at::kInt)},
                             .outputs = {},
                             .label = {}};
    EXPECT_THROW(issue(group(), premultiplied), UsageError);
  }
  const auto sum = at::ones({3});
  group().all_reduce(sum).wait();
  EXPECT_TRUE(at::equal(sum, at::full({3}, static_cast<double>(group().size()))));
}

TEST(Group, allocate_gives_aligned_zeros) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    const auto memory = group().allocate(77, at::TensorOptions(dtype));
    EXPECT_EQ(memory.numel(), 77);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.data_ptr()) % 128, 0U);
    EXPECT_EQ(memory.abs().sum().item<double>(), 0);
  }
}

TEST(CallLog, records_what_passes_through_the_handle) {
  auto log = std::make_shared<CallLog>();
  const auto recorded = group().recorded(log);
  recorded.all_reduce(at::ones({256}), ReduceOp::max, {7, 2, "test"}).wait();
  group().barrier().wait();
  recorded.broadcast(at::ones({10}, at::kDouble), 0).wait();
  const auto records = log->records();
  ASSERT_EQ(records.size(), 2U);
  EXPECT_EQ(records[0].op, Op::all_reduce);
  EXPECT_EQ(records[0].reduce, ReduceOp::max);
  EXPECT_EQ(records[0].bytes, 1024);
  EXPECT_EQ(records[0].label.step, 7);
  EXPECT_EQ(records[0].label.bucket, 2);
  EXPECT_EQ(records[0].group, "world");
  EXPECT_GE(records[0].finished, records[0].issued);
  EXPECT_EQ(log->bytes(Op::broadcast), 80);
  EXPECT_EQ(log->count(Op::barrier), 0);
}

TEST(Agree, names_the_first_difference_and_both_ranks) {
  std::vector<std::string> items = {"a float32 [3]", "b float32 [4]", "c float32 [5]"};
  agree(group(), "the model", items);
  if (group().size() == 1) return;
  const int odd = group().size() - 1;
  if (group().rank() == odd) items[1] = "b float32 [5]";
  try {
    agree(group(), "the model", items);
    FAIL() << "no error";
  } catch (const DisagreeError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("rank 0 has b float32 [4], rank " + std::to_string(odd) + " has b float32 [5]"),
              std::string::npos)
        << text;
  }
  if (group().rank() == odd) items = {"a float32 [3]"};
  EXPECT_THROW(agree(group(), "the model", items), DisagreeError);
}

TEST(Coalesce, broadcasts_any_mixture_in_chunks) {
  auto log = std::make_shared<CallLog>();
  const auto recorded = group().recorded(log);
  const double value = group().rank() + 1;
  std::vector<at::Tensor> tensors = {at::full({10}, value),
                                     at::full({3, 4}, value).t(),
                                     at::full({}, value),
                                     at::full({0}, value),
                                     at::full({5}, value, at::kDouble),
                                     at::full({2, 3, 4, 4}, value).contiguous(at::MemoryFormat::ChannelsLast)};
  broadcast_coalesced(recorded, tensors, 0, {}, /*chunk_bytes=*/64);
  for (const auto& tensor : tensors) EXPECT_TRUE(at::equal(tensor, at::ones_like(tensor)));
  // floats: 40 + (48, 64 > rest) ... : {10}, {3,4} + {} , {2,3,4,4}; doubles: {5}
  EXPECT_EQ(log->count(Op::broadcast), 4);
}

TEST(Coalesce, sums_sparse_tensors_of_ranks_that_have_one) {
  const int ranks = group().size();
  const bool has = group().rank() % 2 == 0;
  at::Tensor sparse;
  auto expected = at::zeros({6, 2});
  for (int rank = 0; rank < ranks; rank += 2) {
    expected[rank % 6] += rank + 1;
    expected[5] += 1;
  }
  if (has) {
    auto dense = at::zeros({6, 2});
    dense[group().rank() % 6] += group().rank() + 1;
    dense[5] += 1;
    sparse = dense.to_sparse(1);
  }
  const auto result = all_reduce_sparse(group(), sparse, {6, 2}, at::TensorOptions(at::kFloat), 0.5, {});
  EXPECT_EQ(result.present, (ranks + 1) / 2);
  EXPECT_DOUBLE_EQ(result.weight, 0.5 * ranks);
  EXPECT_TRUE(at::equal(result.sum.to_dense(), expected));
  EXPECT_FALSE(all_reduce_sparse(group(), {}, {6, 2}, at::TensorOptions(at::kFloat), 1, {}).sum.defined());
}

TEST(Coalesce, a_dense_tensor_among_sparse_ones_makes_the_sum_dense) {
  const int last = group().size() - 1;
  auto expected = at::zeros({6, 2});
  for (int rank = 0; rank <= last; ++rank) expected[rank % 6] += rank + 1;
  auto own = at::zeros({6, 2});
  own[group().rank() % 6] += group().rank() + 1;
  for (const bool dense : {true, false}) {
    const auto passed = dense && group().rank() == last ? own : own.to_sparse(1);
    const auto result = all_reduce_sparse(group(), passed, {6, 2}, at::TensorOptions(at::kFloat), 1, {});
    EXPECT_EQ(result.present, group().size());
    EXPECT_EQ(result.sum.is_sparse(), !dense);
    EXPECT_TRUE(at::equal(dense ? result.sum : result.sum.to_dense(), expected));
  }
}

TEST(Coalesce, sparse_tensors_of_different_kinds_are_refused_on_all_ranks) {
  if (group().size() == 1) GTEST_SKIP() << "one rank agrees with itself";
  const int odd = group().size() - 1;
  const auto sum_of = [](const at::Tensor& sparse) {
    return all_reduce_sparse(group(), sparse, sparse.sizes(), sparse.values().options(), 1, {}).sum;
  };
  const auto common = at::ones({4, 2}).to_sparse(1);
  const std::pair<at::Tensor, std::string> others[] = {
      {at::ones({2000, 2}).to_sparse(1), "Float [2000, 2], sparse dimensions: 1"},
      {at::ones({4, 2}).to_sparse(2), "Float [4, 2], sparse dimensions: 2"},
      {at::ones({4, 2}, at::kDouble).to_sparse(1), "Double [4, 2], sparse dimensions: 1"}};
  for (const auto& [other, text] : others) {
    try {
      sum_of(group().rank() == odd ? other : common);
      ADD_FAILURE() << "no error, but " << text;
    } catch (const DisagreeError& error) {
      EXPECT_NE(
          std::string(error.what())
              .find("rank 0 has Float [4, 2], sparse dimensions: 1, rank " + std::to_string(odd) + " has " + text),
          std::string::npos)
          << error.what();
    }
    EXPECT_TRUE(at::equal(sum_of(common).to_dense(), at::full({4, 2}, static_cast<double>(group().size()))));
  }
}

// Gloo writes without MSG_NOSIGNAL: in a thread that takes SIGPIPE, a rank that has ended would end this one without a word.
TEST(Group, no_thread_of_gloo_takes_sigpipe) {
  if (group().transport() != "gloo") GTEST_SKIP() << "over Gloo";
  group().barrier().wait();
  int threads = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm") >> std::ws, name);
    if (name.find("gloo") == std::string::npos) continue;
    ++threads;
    std::ifstream status(task.path() / "status");
    std::string line;
    while (std::getline(status, line) && line.rfind("SigBlk:", 0) != 0) continue;
    const auto blocked = std::stoull(line.substr(line.find('\t') + 1), nullptr, 16);
    EXPECT_NE(blocked & (1ULL << (SIGPIPE - 1)), 0U) << name;
  }
  EXPECT_GT(threads, 0);
}

// Whole numbers whose sums are exact in every order, beyond a byte where the dtype has more.
at::Tensor whole_numbers(int rank, at::ScalarType dtype) {
  const auto small = at::arange(7, at::kLong).add(rank) % 3;
  const bool wide = dtype != at::kChar && dtype != at::kByte && dtype != at::kBool && dtype != at::kBFloat16;
  return (wide ? small * 200 - 201 : small).to(dtype);
}

TEST(Group, tensors_of_every_dtype_are_reduced_and_moved) {
  const auto& group = test::group();
  for (const auto dtype : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kShort,
                           at::kChar, at::kByte, at::kBool}) {
    SCOPED_TRACE(toString(dtype));
    auto sum = whole_numbers(0, dtype), most = sum.clone();
    for (int rank = 1; rank < group.size(); ++rank) {
      sum = sum + whole_numbers(rank, dtype);
      most = at::maximum(most, whole_numbers(rank, dtype));
    }
    const auto own = whole_numbers(group.rank(), dtype);
    auto values = own.clone();
    group.all_reduce(values).wait();
    EXPECT_TRUE(at::equal(values, sum));
    values = own.clone();
    group.all_reduce(values, ReduceOp::max).wait();
    EXPECT_TRUE(at::equal(values, most));
    values = own.clone();
    group.reduce(values, 0).wait();
    EXPECT_TRUE(group.rank() != 0 || at::equal(values, sum));
    auto part = at::zeros({7}, dtype);
    group.reduce_scatter(part, own.repeat({group.size()})).wait();
    EXPECT_TRUE(at::equal(part, sum));
    values = own.clone();
    group.broadcast(values, group.size() - 1).wait();
    EXPECT_TRUE(at::equal(values, whole_numbers(group.size() - 1, dtype)));
    auto all = at::zeros({7 * group.size()}, dtype);
    group.all_gather(all, own).wait();
    for (int rank = 0; rank < group.size(); ++rank) {
      EXPECT_TRUE(at::equal(all.slice(0, 7 * rank, 7 * (rank + 1)), whole_numbers(rank, dtype)));
    }
  }
}

TEST(Group, tensors_of_dtypes_that_have_no_sum_are_moved) {
  const auto& group = test::group();
  const int size = group.size(), rank = group.rank();
  for (const auto dtype : {at::kComplexFloat, at::kComplexDouble, at::kUInt16, at::kUInt32, at::kFloat8_e4m3fn}) {
    SCOPED_TRACE(toString(dtype));
    const auto of = [&](int from) { return at::full({5}, from + 1.0).to(dtype); };
    const auto same = [](const at::Tensor& a, const at::Tensor& b) {
      return at::equal(a.view(at::kByte), b.view(at::kByte));
    };
    const auto new_tensor = [&](int64_t numel) { return at::full({numel}, 9.0).to(dtype); };
    std::vector<at::Tensor> ranks;
    for (int from = 0; from < size; ++from) ranks.push_back(of(from));
    auto values = of(rank);
    group.broadcast(values, size - 1).wait();
    EXPECT_TRUE(same(values, of(size - 1)));
    auto all = new_tensor(5 * size);
    group.all_gather(all, of(rank)).wait();
    EXPECT_TRUE(same(all, at::cat(ranks)));
    auto exchanged = new_tensor(5 * size);
    group.all_to_all(exchanged, at::cat(std::vector<at::Tensor>(size, of(rank)))).wait();
    EXPECT_TRUE(same(exchanged, at::cat(ranks)));
    std::vector<at::Tensor> gathered;
    for (int from = 0; rank == 0 && from < size; ++from) gathered.push_back(new_tensor(5));
    group.gather(gathered, of(rank), 0).wait();
    for (size_t from = 0; from < gathered.size(); ++from) EXPECT_TRUE(same(gathered[from], ranks[from]));
    auto part = new_tensor(5);
    group.scatter(part, rank == 0 ? ranks : std::vector<at::Tensor>(), 0).wait();
    EXPECT_TRUE(same(part, of(rank)));
  }
}

TEST(Group, a_sum_of_bools_is_a_bool) {
  auto flags = at::ones({3}, at::kBool);
  group().all_reduce(flags).wait();
  EXPECT_TRUE(at::equal(flags.view(at::kByte), at::ones({3}, at::kByte)));
  auto part = at::ones({1}, at::kBool);
  group().reduce_scatter(part, at::ones({group().size()}, at::kBool)).wait();
  EXPECT_EQ(part.view(at::kByte).item<uint8_t>(), 1);
}

}  // namespace
}  // namespace shoal::group_test
