// Gossip channels: the last rank shows versions of buffers, the others read them.

#include <sys/time.h>
#include <torch/types.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <random>
#include <thread>

#include "comm/gossip/channel.h"
#include "comm/gossip/connection.h"
#include "comm/gossip/frame.h"
#include "comm/gossip/shared_channel.h"
#include "comm/group/group_state.h"
#include "comm/rendezvous/host.h"
#include "comm/rendezvous/peer_socket.h"
#include "comm/rendezvous/world_state.h"
#include "shoal/error.h"
#include "tests/comm/gossip_disturbances.h"
#include "tests/support/world.h"

namespace shoal::gossip_channel_test {
namespace {

using Limit = GossipChannel::Limit;
constexpr Limit patience{20000}, moment{60};

using test::CutGreeting;
using test::Interruptions;

const Group& group() {
  return test::world().group();
}

int source() {
  return group().size() - 1;
}

bool reads() {
  return group().rank() != source();
}

// All values of a version equal its number. limit: how long readers of the version before the last are waited for,
// which lose versions after it.
void show(GossipChannel& channel, int64_t version, Limit limit = patience) {
  if (reads()) return;
  std::vector<int> readers(group().size() - 1);
  std::iota(readers.begin(), readers.end(), 0);
  channel.draft(0, limit).fill_(static_cast<double>(version));
  channel.publish(0, version, readers);
}

void show_all(GossipChannel& channel, std::initializer_list<int64_t> versions) {
  for (const auto version : versions) show(channel, version);
}

Reading read(GossipChannel& channel, int64_t version, Limit limit = patience) {
  double value = 0;
  auto reading = channel.read(0, version, source(), limit,
                              [&](const at::Tensor& values) { value = values.sum().item<double>() / 1000; });
  if (reading.arrival == Arrival::here) {
    EXPECT_EQ(static_cast<double>(reading.version), value);
  }
  return reading;
}

// The ranks act one after the other.
class Channel : public testing::Test {
 protected:
  std::unique_ptr<GossipChannel> channel = open_gossip_channel(group(), {{.numel = 1000}});
  static void meet() { group().barrier().wait(); }
  ~Channel() override { meet(); }
};

#define EXPECT_READ(reading, kind, number)   \
  do {                                       \
    const auto found = reading;              \
    EXPECT_EQ(found.arrival, Arrival::kind); \
    EXPECT_EQ(found.version, number);        \
  } while (false)

TEST_F(Channel, DEC01_a_version_is_read_by_all_that_wait_for_it) {
  for (int64_t version = 1; version < 20; ++version) {
    show(*channel, version);
    if (reads()) EXPECT_READ(read(*channel, version), here, version);
  }
}

// A source may be one step ahead: it shows the next version while others look for this one. A rank that is interrupted
// in its look must not find the next one instead.
TEST_F(Channel, DEC01_a_source_that_is_a_step_ahead_changes_no_value) {
  std::vector<int> others;
  for (int rank = 0; rank < group().size(); ++rank) {
    if (rank != group().rank()) others.push_back(rank);
  }
  // Without the second look, 40,000 steps of 4 ranks found a newer version 2 to 20 times.
  const int64_t steps = channel->address().starts_with(shared_memory) ? 15'000 : 500;
  int64_t newer = 0;
  const auto no_use = [](const at::Tensor&) {};
  {
    const Interruptions interruptions;
    for (int64_t version = 1; version <= steps; ++version) {
      channel->draft(0, patience);
      channel->publish(0, version, others);
      for (const int other : others) newer += channel->read(0, version, other, patience, no_use).version - version;
    }
  }
  EXPECT_EQ(newer, 0);
}

TEST_F(Channel, DEC17_who_has_found_a_newer_version_finds_the_one_it_wants_in_the_next_step) {
  show_all(*channel, {1, 2});
  // Nobody reads yet. The first two versions must have been sent after this time, or the third is not sent at all.
  show(*channel, 3, std::chrono::seconds(1));
  meet();
  if (reads()) {
    // Over sockets the newest version may still be in flight, and versions that arrive together may replace earlier
    // ones.
    const auto first = read(*channel, 1);
    EXPECT_EQ(first.arrival, Arrival::here);
    EXPECT_READ(read(*channel, 2), here, 2);
    EXPECT_READ(read(*channel, 3), here, 3);
  }
  meet();
  show(*channel, 4);
  if (reads()) EXPECT_READ(read(*channel, 4), here, 4);
}

TEST_F(Channel, DEC17_the_last_version_of_a_late_source_is_read_once_and_nobody_waits_for_it_again) {
  show_all(*channel, {1, 2});
  if (reads()) {
    EXPECT_READ(read(*channel, 2), here, 2);
    EXPECT_READ(read(*channel, 3, moment), late, 0);  // has been read
    const auto start = std::chrono::steady_clock::now();
    EXPECT_READ(read(*channel, 4), late, 0);
    EXPECT_LT(std::chrono::steady_clock::now() - start, patience / 4) << "it has been waited for in vain";
  }
  meet();
  show_all(*channel, {3, 4});
  meet();
  if (reads()) {
    while (read(*channel, 4, moment).version != 4) {
      // The third has arrived before the fourth. It is what the next read of the fourth gives again, until another
      // version is read.
      read(*channel, 3, moment);
    }
    EXPECT_READ(read(*channel, 5, moment), late, 0);
  }
  meet();
  show(*channel, 5);
  if (reads()) {
    while (read(*channel, 5).arrival != Arrival::here) {
    }
  }
  meet();
  if (reads()) {
    const auto start = std::chrono::steady_clock::now();
    EXPECT_READ(read(*channel, 6, moment), late, 0);
    EXPECT_GE(std::chrono::steady_clock::now() - start, moment) << "it had caught up";
  }
}

TEST_F(Channel, DEC17_what_a_source_has_shown_before_it_left_can_be_read_and_no_more) {
  show_all(*channel, {1, 2});
  if (!reads()) channel->leave();
  if (reads()) {
    EXPECT_READ(read(*channel, 1), here, 1);
    EXPECT_READ(read(*channel, 2), here, 2);
    EXPECT_READ(read(*channel, 3), gone, 0);
    EXPECT_TRUE(channel->gone(source(), 3));
    EXPECT_FALSE(channel->lost(source()));
    EXPECT_FALSE(channel->gone(source(), 2));
  }
}

// A mean that cannot be completed, because one source has left, is started over.
double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// The stop lasts until all ranks start afresh; versions shown before stay readable.
TEST_F(Channel, DEC17_nobody_waits_for_a_source_that_does_not_go_on) {
  show(*channel, 1);
  if (reads()) EXPECT_READ(read(*channel, 1), here, 1);
  EXPECT_FALSE(channel->stopped(source()).has_value());
  meet();
  const auto start = Clock::now();
  if (!reads()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    channel->stop(1, 7);
  } else {
    EXPECT_READ(read(*channel, 2), late, 0);
    EXPECT_LT(seconds_since(start), 5);
    const auto stop = channel->stopped(source());
    ASSERT_TRUE(stop.has_value());
    EXPECT_EQ(stop->version, 1);
    EXPECT_EQ(stop->reason, 7);
  }
  meet();
  channel->start_afresh(4);
  EXPECT_FALSE(channel->stopped(source()).has_value());
  if (!reads()) std::this_thread::sleep_for(std::chrono::milliseconds(300));
  show(*channel, 5);
  if (reads()) EXPECT_READ(read(*channel, 5), here, 5);
}

TEST_F(Channel, DEC17_a_version_can_be_read_again_until_another_is) {
  show_all(*channel, {1, 2});
  if (!reads()) return;
  for (int again = 0; again < 3; ++again) EXPECT_READ(read(*channel, 1), here, 1);
  for (int again = 0; again < 3; ++again) EXPECT_READ(read(*channel, 2), here, 2);
}

// For longer than a host may be silent: the host answers in its place, and the buffers between the two are full.
TEST_F(Channel, DEC17_a_rank_that_stands_still_for_long_is_late_and_not_lost) {
  if (group().size() != 2 || channel->address().starts_with(shared_memory)) GTEST_SKIP() << "no sockets between two";
  const auto large = open_gossip_channel(group(), {{.numel = 8 << 20}});
  const auto show_large = [&](int64_t version) {
    large->draft(0, moment).fill_(static_cast<double>(version));
    large->publish(0, version, {0});
  };
  const auto no_use = [](const at::Tensor&) {};
  if (reads()) {
    EXPECT_READ(large->read(0, 1, source(), patience, no_use), here, 1);
    CutGreeting greeting;
    std::raise(SIGSTOP);
    greeting.expect_second_call();
  } else {
    show_large(1);
    const auto& reader = state_of(group())->world->meeting.peers[0].process;
    while (state_of(reader) != ProcessState::stopped) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    show_large(2);
    std::this_thread::sleep_for(longest_silence + std::chrono::seconds(3));
    kill(reader.pid, SIGCONT);
  }
  meet();
  EXPECT_FALSE(large->gone(1 - group().rank(), 3));
  EXPECT_FALSE(large->lost(1 - group().rank()));
  if (reads()) {
    EXPECT_READ(large->read(0, 2, source(), patience, no_use), here, 2);
  }
  meet();
}

// Calls a channel as somebody who has read the store and knows the channel's key but not the job's secret: sends
// nothing, random bytes, a rank's message, or only its beginning.
Descriptor call_as_stranger(const std::string& address, int number) {
  const auto blank = address.find(' ');
  const auto colon = address.rfind(':', blank);
  const auto place = resolve(address.substr(0, colon), std::stoi(address.substr(colon + 1)));
  auto caller = make_socket(place, SOCK_STREAM);
  if (!connect_to(caller, place)) ADD_FAILURE() << "stranger " << number << " does not get through";
  std::string said;
  std::mt19937 random(number);
  if (number % 4 == 1) {
    for (int length = number % 300; length > 0; --length) said += static_cast<char>(random());
  } else if (number % 4 > 1) {
    const auto add = [&](Frame frame) {
      frame.source = static_cast<uint32_t>(source());
      if (frame.key == 0) frame.key = std::stoull(address.substr(blank + 1));
      said.append(reinterpret_cast<const char*>(&frame), sizeof frame);
    };
    add({.kind = FrameKind::hello});
    add({.kind = FrameKind::values, .version = 1000000, .bytes = 4000});
    said.append(4000, 'x');
    add({.kind = FrameKind::bye, .version = 0});
    if (number % 4 == 3) said.resize(10);
  }
  [[maybe_unused]] const auto sent = send(caller.number(), said.data(), said.size(), MSG_NOSIGNAL);
  return caller;
}

// The others call by hand what a channel calls first, and leave before it is open.
TEST_F(Channel, memory_of_one_that_not_all_ranks_open_is_free_once_they_have_let_go_of_it) {
  if (group().size() == 1 || !channel->address().starts_with(shared_memory)) GTEST_SKIP() << "no shared memory";
  const auto fresh = test::fresh_group();
  const auto& world = *state_of(fresh)->world;
  auto& memory = *world.memory;
  const Label label{-1, -1, "gossip buffers"};
  auto places = at::zeros({fresh.size(), 2}, at::kLong);
  const auto own = at::zeros({2}, at::kLong);
  for (int round = 0; round < 2; ++round) {  // an allocation frees what earlier tests have left
    fresh.all_gather(places, own, label).wait();
    fresh.barrier(label).wait();
    memory.free(memory.allocate(1));
  }
  meet();
  if (fresh.rank() == 0) {
    const auto before = memory.bytes_in_use();
    EXPECT_THROW(open_gossip_channel(fresh, {{.numel = 1000}}), CommError);
    EXPECT_GT(memory.bytes_in_use(), before);
    meet();
    meet();
    memory.free(memory.allocate(1));
    EXPECT_LE(memory.bytes_in_use(), before);
  } else {
    std::vector<int> ranks(fresh.size() - 1);
    std::iota(ranks.begin(), ranks.end(), 1);
    const auto others = fresh.subgroup(ranks);
    auto* block = memory.allocate(1);
    const auto place = *memory.locate(block, 1);
    own[0] = static_cast<int64_t>(place.arena);
    own[1] = static_cast<int64_t>(place.offset);
    fresh.all_gather(places, own, label).wait();
    others.barrier().wait();
    if (fresh.rank() == 1) state_of(fresh)->progress->transport->abandon({"rank 1 has left the group", 1});
    auto* opened = memory.peer(world.meeting.peers[0].page)
                       ->at({static_cast<uint32_t>(places[0][0].item<int64_t>()),
                             static_cast<uint64_t>(places[0][1].item<int64_t>())});
    meet();
    reinterpret_cast<std::atomic<uint32_t>*>(opened)->fetch_sub(1);  // its number of users
    meet();
    memory.free(block);
  }
}

TEST_F(Channel, strangers_are_not_heard) {
  if (group().size() == 1 || channel->address().starts_with(shared_memory)) GTEST_SKIP() << "nobody can call";
  ASSERT_TRUE(state_of(group())->world->placement.job.has_secret()) << "the launcher makes one";
  std::thread strangers([&] {
    std::vector<Descriptor> open;
    for (int number = 0; number < 1000; ++number) {
      auto caller = call_as_stranger(channel->address(), number);
      if (number % 4 == 0 || number % 8 == 3) open.push_back(std::move(caller));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
  });
  for (int64_t version = 1; version < 100; ++version) {
    show(*channel, version);
    if (reads()) EXPECT_READ(read(*channel, version), here, version);
    meet();
  }
  strangers.join();
  show(*channel, 100);
  if (reads()) {
    EXPECT_READ(read(*channel, 100), here, 100);
    EXPECT_FALSE(channel->gone(source(), 101));
  }
}

// A rank is called for the first time while strangers occupy all places that a channel has for visitors.
TEST_F(Channel, strangers_do_not_keep_a_rank_out) {
  if (group().size() == 1 || channel->address().starts_with(shared_memory)) GTEST_SKIP() << "nobody can call";
  std::vector<Descriptor> open;
  for (int number = 0; number < 400; ++number) open.push_back(call_as_stranger(channel->address(), 4 * number));
  meet();
  show(*channel, 1);
  if (reads()) EXPECT_READ(read(*channel, 1), here, 1);
  meet();
}

}  // namespace
}  // namespace shoal::gossip_channel_test
