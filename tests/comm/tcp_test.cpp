// Collectives of the tcp transport without sockets: all ranks of a group in one thread, whose parts travel in any
// order.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <torch/types.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <thread>

#include "comm/tcp/collective.h"
#include "comm/tcp/link.h"
#include "comm/tcp/messages.h"
#include "shoal/error.h"
#include "tests/comm/tcp_ranks.h"

namespace shoal::tcp_test {
namespace {

using tcp::Collective;
using Ranks = test::TcpRanks;

Call make_call(Op op, std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs = {}, int peer = -1) {
  Call call;
  call.op = op;
  call.peer = peer;
  call.inputs = std::move(inputs);
  call.outputs = std::move(outputs);
  return call;
}

at::Tensor numbers(int64_t count, int rank, int part = 0) {
  static const auto sines = at::arange(2'000'000, at::kDouble).mul_(0.001).sin_();  // once: most of the tests' time
  return sines.narrow(0, 0, count).add(rank + 100 * part);
}

// Sizes in numbers of 8 bytes: with and without data in entries, fewer than there are ranks, several chunks.
const std::vector<int64_t> counts{1, 3, 1000, 1024, 1025, 32768 * 2, 300001};

// `check` gets the calls after the operation, and the bytes that each rank has sent.
template <class Make, class Check>
void for_all_sizes(const Make& make, const Check& check) {
  for (int size = 2; size <= 5; ++size) {
    for (const auto count : counts) {
      const uint64_t seeds = count < 100'000 ? 3 : 1;
      for (uint64_t seed = 0; seed < seeds; ++seed) {
        SCOPED_TRACE(std::to_string(size) + " ranks, " + std::to_string(count) + " numbers, seed " +
                     std::to_string(seed));
        std::vector<Call> calls;
        for (int rank = 0; rank < size; ++rank) calls.push_back(make(rank, size, count));
        Ranks ranks(calls, seed);
        ASSERT_TRUE(ranks.run()) << "ranks wait for each other";
        check(calls, ranks.sent(), count);
      }
    }
  }
}

at::Tensor sum_in_order(int size, int64_t count, int part = 0) {
  auto sum = numbers(count, 0, part);
  for (int rank = 1; rank < size; ++rank) sum.add_(numbers(count, rank, part));
  return sum;
}

TEST(Tcp, all_reduce_adds_in_the_order_of_ranks_and_sends_twice_the_least_share) {
  for_all_sizes([](int rank, int, int64_t count) { return make_call(Op::all_reduce, {numbers(count, rank)}); },
                [](const std::vector<Call>& calls, const std::vector<int64_t>& sent, int64_t count) {
                  const auto size = static_cast<int64_t>(calls.size());
                  const auto wanted = sum_in_order(static_cast<int>(size), count);
                  for (const auto& call : calls) EXPECT_TRUE(call.inputs[0].equal(wanted));
                  // Small tensors go to everybody. Shares of others differ by 64 bytes at most.
                  const double bytes = 8.0 * static_cast<double>(count);
                  const double each =
                      bytes <= tcp::bytes_with_entry ? (size - 1) * bytes : 2 * (size - 1) * bytes / size;
                  for (const auto rank : sent) EXPECT_NEAR(rank, each, bytes <= tcp::bytes_with_entry ? 0 : 64 * size);
                });
}

TEST(Tcp, reduce_leaves_the_sum_on_its_root) {
  for_all_sizes(
      [](int rank, int size, int64_t count) { return make_call(Op::reduce, {numbers(count, rank)}, {}, size - 1); },
      [](const std::vector<Call>& calls, const std::vector<int64_t>&, int64_t count) {
        EXPECT_TRUE(calls.back().inputs[0].equal(sum_in_order(static_cast<int>(calls.size()), count)));
      });
}

TEST(Tcp, reduce_scatter_gives_each_rank_its_part_and_sends_each_part_once) {
  for_all_sizes(
      [](int rank, int size, int64_t count) {
        std::vector<at::Tensor> parts;
        for (int part = 0; part < size; ++part) parts.push_back(numbers(count, rank, part));
        return make_call(Op::reduce_scatter, {at::cat(parts)}, {at::zeros({count}, at::kDouble)});
      },
      [](const std::vector<Call>& calls, const std::vector<int64_t>& sent, int64_t count) {
        const auto size = static_cast<int>(calls.size());
        for (int rank = 0; rank < size; ++rank) {
          EXPECT_TRUE(calls[rank].outputs[0].equal(sum_in_order(size, count, rank)));
          EXPECT_EQ(sent[rank], (size - 1) * count * 8);
        }
      });
}

TEST(Tcp, broadcast_copies_the_root_and_others_pass_it_on) {
  for_all_sizes([](int rank, int, int64_t count) { return make_call(Op::broadcast, {numbers(count, rank)}, {}, 1); },
                [](const std::vector<Call>& calls, const std::vector<int64_t>& sent, int64_t count) {
                  for (const auto& call : calls) EXPECT_TRUE(call.inputs[0].equal(numbers(count, 1)));
                  const auto size = static_cast<int64_t>(calls.size());
                  EXPECT_LE(sent[1], count * 8 > tcp::bytes_with_entry ? 2 * (size - 1) * (count * 8 / size + 64)
                                                                       : (size - 1) * count * 8);
                });
}

TEST(Tcp, gathers_scatters_and_exchanges_send_to_whom_it_concerns) {
  for_all_sizes(
      [](int rank, int size, int64_t count) {
        return make_call(Op::all_gather, {numbers(count, rank)}, {at::zeros({size * count}, at::kDouble)});
      },
      [](const std::vector<Call>& calls, const std::vector<int64_t>& sent, int64_t count) {
        const auto size = static_cast<int>(calls.size());
        for (int rank = 0; rank < size; ++rank) {
          for (int from = 0; from < size; ++from) {
            EXPECT_TRUE(calls[rank].outputs[0].narrow(0, from * count, count).equal(numbers(count, from)));
          }
          EXPECT_EQ(sent[rank], (size - 1) * count * 8);
        }
      });
  // One tensor per rank, of sizes of their own: rank r sends p + 1 times `count` numbers to rank p.
  for_all_sizes(
      [](int rank, int size, int64_t count) {
        auto call = make_call(Op::all_to_all, {});
        for (int other = 0; other < size; ++other) {
          call.inputs.push_back(numbers((other + 1) * count, rank, other));
          call.outputs.push_back(at::zeros({(rank + 1) * count}, at::kDouble));
        }
        return call;
      },
      [](const std::vector<Call>& calls, const std::vector<int64_t>&, int64_t count) {
        for (int rank = 0; rank < static_cast<int>(calls.size()); ++rank) {
          for (int from = 0; from < static_cast<int>(calls.size()); ++from) {
            EXPECT_TRUE(calls[rank].outputs[from].equal(numbers((rank + 1) * count, from, rank)));
          }
        }
      });
  for_all_sizes(
      [](int rank, int size, int64_t count) {
        auto call = make_call(Op::scatter, {}, {at::zeros({count}, at::kDouble)}, 0);
        for (int other = 0; rank == 0 && other < size; ++other) call.inputs.push_back(numbers(count, 0, other));
        return call;
      },
      [](const std::vector<Call>& calls, const std::vector<int64_t>& sent, int64_t count) {
        for (int rank = 0; rank < static_cast<int>(calls.size()); ++rank) {
          EXPECT_TRUE(calls[rank].outputs[0].equal(numbers(count, 0, rank)));
          EXPECT_TRUE(rank == 0 || sent[rank] == 0);
        }
      });
}

// Memory for values of others does not grow with the tensor, and hardly with the number of ranks.
TEST(Tcp, a_rank_keeps_four_chunks_of_each_other_rank_at_most) {
  EXPECT_EQ(tcp::staging_bytes(2), 4 << 18);
  EXPECT_EQ(tcp::staging_bytes(4), 3 * 4 << 18);
  EXPECT_LE(tcp::staging_bytes(100), 8 << 20);
}

TEST(Tcp, different_calls_are_named_by_every_rank_before_data_change) {
  std::vector<Call> calls;
  for (int rank = 0; rank < 3; ++rank) {
    calls.push_back(make_call(Op::all_reduce, {at::ones({rank == 2 ? 5 : 4})}));
  }
  Ranks ranks(calls, 0);
  const std::vector<int> world_ranks{10, 11, 12};
  const std::unique_ptr<std::byte[]> staging(new std::byte[tcp::staging_bytes(3)]);
  std::vector<std::string> said;
  for (int rank = 0; rank < 3; ++rank) {
    auto own = Collective(calls[rank], 0, rank, world_ranks, staging.get());
    try {
      own.begin(ranks.entries(rank));
    } catch (const DisagreeError& error) {
      said.emplace_back(error.what());
    }
    EXPECT_EQ(calls[rank].inputs[0].sum().item<int64_t>(), rank == 2 ? 5 : 4);
  }
  ASSERT_EQ(said.size(), 3U);
  EXPECT_EQ(said, std::vector<std::string>(3, said[0]));
  EXPECT_NE(said[0].find("12"), std::string::npos) << said[0];
}

// An entry that is damaged anywhere is refused, or is one that a rank might send.
TEST(Tcp, damaged_entries_are_refused_and_parts_of_another_size_too) {
  const auto call = make_call(Op::all_reduce, {numbers(100, 0)});
  const std::vector<int> world_ranks{10, 11};
  const std::unique_ptr<std::byte[]> staging(new std::byte[tcp::staging_bytes(2)]);
  const auto sound = Collective(call, 0, 0, world_ranks, staging.get()).entry(1);
  std::mt19937 random(1);
  int refused = 0;
  for (int trial = 0; trial < 20000; ++trial) {
    auto bytes = sound;
    for (auto changes = random() % 4 + 1; changes > 0; --changes)
      bytes[random() % sizeof(tcp::Entry)] ^= 1 << random() % 8;
    if (random() % 4 == 0) bytes.resize(random() % bytes.size());
    try {
      const auto entry = tcp::read_entry(bytes, 2);
      EXPECT_LE(entry.data, bytes.size());
    } catch (const std::runtime_error&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 5000);
  const auto large = make_call(Op::all_reduce, {numbers(10000, 0)});
  Ranks ranks({large, large}, 0);
  auto own = Collective(large, 0, 0, world_ranks, staging.get());
  own.begin(ranks.entries(0));
  EXPECT_THROW(own.place_for(1, 12345), std::runtime_error);
  EXPECT_THROW(own.place_for(0, 40000), std::runtime_error) << "nothing comes from this rank itself";
}

// Both ends of a connection, of which one takes whatever comes.
class Pair : public tcp::Receiver {
 public:
  Pair() {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) != 0) throw std::runtime_error("pair");
    here.emplace(Descriptor(ends[0]), 1);
    there.emplace(Descriptor(ends[1]), 0);
  }
  std::optional<std::byte*> accept(int, const tcp::Frame& frame) override {
    memory_.resize(frame.bytes);
    return memory_.data();
  }
  void arrived(int, const tcp::Frame&) override { frames.push_back(memory_); }

  std::optional<tcp::Link> here;
  std::optional<tcp::Link> there;
  std::vector<std::vector<std::byte>> frames;

 private:
  std::vector<std::byte> memory_;
};

// After a failure a caller may write to its tensors while a part of one is still to be sent.
TEST(Tcp, what_a_caller_writes_after_a_failure_is_not_sent) {
  for (const size_t bytes : {size_t{512} << 10, size_t{4} << 20}) {
    Pair pair;
    std::vector<std::byte> data(bytes, std::byte{1});
    int sent = 0;
    for (int i = 0; i < 2; ++i) {
      pair.here->put({.kind = tcp::Kind::part, .bytes = bytes}, data.data(), [&] { ++sent; });
    }
    pair.here->flush();
    ASSERT_EQ(sent, 0) << "the connection takes more than this test is made for";
    pair.here->take_data_back();
    std::fill(data.begin(), data.end(), std::byte{2});
    pair.here->put({.kind = tcp::Kind::fault}, "why");
    for (int i = 0; i < 1000; ++i) {
      pair.here->flush();
      pair.there->receive(pair);
    }
    const bool is_small = bytes < size_t{1} << 20;
    ASSERT_EQ(pair.frames.size(), is_small ? 2U : 0U) << "a large frame is cut off, one that has not begun never sent";
    EXPECT_NE(pair.there->ended(), is_small);
    if (!is_small) continue;
    EXPECT_EQ(pair.frames[0], std::vector<std::byte>(bytes, std::byte{1}));
    EXPECT_EQ(pair.frames[1].size(), 3U) << "the sentence follows";
  }
}

// The system's own limit, which others have set on the socket, would end the connection.
TEST(Tcp, a_peer_that_takes_no_data_for_a_while_is_waited_for) {
  const Descriptor listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  ASSERT_EQ(bind(listener.number(), any, size), 0);
  ASSERT_EQ(listen(listener.number(), 1), 0);
  ASSERT_EQ(getsockname(listener.number(), any, &size), 0);
  Descriptor sender(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int limit = 1000;
  ASSERT_EQ(setsockopt(sender.number(), IPPROTO_TCP, TCP_USER_TIMEOUT, &limit, sizeof limit), 0);
  ASSERT_EQ(connect(sender.number(), any, size), 0);
  ASSERT_EQ(fcntl(sender.number(), F_SETFL, O_NONBLOCK), 0);
  const Descriptor receiver(accept4(listener.number(), nullptr, nullptr, SOCK_CLOEXEC));

  tcp::Link link(std::move(sender), 1);
  const std::vector<std::byte> data(size_t{32} << 20, std::byte{1});
  link.put({.kind = tcp::Kind::part, .bytes = data.size()}, data.data(), nullptr);
  for (int i = 0; i < 40; ++i) {
    link.flush();
    link.look_at_peer(std::chrono::seconds(1));
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  ASSERT_FALSE(link.idle()) << "the connection takes more than this test is made for";
  EXPECT_FALSE(link.broken());
  std::vector<std::byte> received(sizeof(tcp::Frame) + data.size());
  size_t got = 0;
  while (got < received.size() && !link.broken()) {
    link.flush();
    const auto bytes = recv(receiver.number(), received.data() + got, received.size() - got, MSG_DONTWAIT);
    if (bytes > 0) got += static_cast<size_t>(bytes);
  }
  EXPECT_EQ(got, received.size());
  EXPECT_TRUE(link.idle());
}

TEST(Tcp, announcements_of_several_ranks_may_be_half_read_at_once) {
  std::vector<std::unique_ptr<tcp::Link>> links(3);
  const std::vector<int> world_ranks{0, 1, 2};
  tcp::Messages messages(links, 0, world_ranks);
  const tcp::Frame ninety{.kind = tcp::Kind::announce, .bytes = 90};
  const tcp::Frame more{.kind = tcp::Kind::announce, .bytes = 95};
  auto* first = messages.accept(1, ninety);
  auto* second = messages.accept(2, more);
  std::memset(second, 'b', 95);
  std::memset(first, 'a', 90);
  EXPECT_EQ(std::count(second, second + 95, std::byte{'b'}), 95);
}

}  // namespace
}  // namespace shoal::tcp_test
