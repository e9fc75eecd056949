// Handshake at the start of a connection.

#include "comm/rendezvous/handshake.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <random>

namespace shoal::handshake_test {
namespace {

using Side = Handshake::Side;
using State = Handshake::State;

const JobIdentity job("night", "0123456789abcdef0123456789abcdef");

struct Ends {
  Ends() {
    int fds[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds), 0);
    caller = Descriptor(fds[0]);
    called = Descriptor(fds[1]);
  }
  Descriptor caller, called;
};

std::string heard(const Descriptor& socket) {
  char bytes[1000];
  const auto count = read(socket.number(), bytes, sizeof bytes);
  return {bytes, static_cast<size_t>(std::max<ssize_t>(0, count))};
}
void say(const Descriptor& socket, const std::string& text) {
  EXPECT_EQ(write(socket.number(), text.data(), text.size()), static_cast<ssize_t>(text.size()));
}

std::pair<State, State> meet(const JobIdentity& of_caller, const JobIdentity& of_called, uint64_t channel = 7) {
  const Ends ends;
  Handshake caller(of_caller, Side::caller, 7), called(of_called, Side::called, channel);
  for (int turn = 0; turn < 4; ++turn) {
    caller.advance(ends.caller);
    called.advance(ends.called);
  }
  return {caller.advance(ends.caller), called.advance(ends.called)};
}

TEST(Handshake, processes_of_one_job_know_each_other) {
  EXPECT_EQ(meet(job, job), std::pair(State::done, State::done));
  const JobIdentity open("night", "");
  EXPECT_EQ(meet(open, open), std::pair(State::done, State::done)) << "and without a secret nothing is asked";
}

TEST(Handshake, others_are_refused) {
  for (const auto& other :
       {JobIdentity("night", "another secret, as long"), JobIdentity("day", "0123456789abcdef0123456789abcdef")}) {
    EXPECT_EQ(meet(other, job).second, State::refused);
    EXPECT_NE(meet(job, other).first, State::done) << "by the caller, too";
  }
  EXPECT_EQ(meet(job, job, 8).second, State::refused) << "of another channel";
}

TEST(Handshake, what_was_recorded_serves_nobody) {
  std::string challenge, proof, answer;
  {  // between two that know each other
    const Ends first, second;
    Handshake caller(job, Side::caller, 7), called(job, Side::called, 7);
    called.advance(second.called);
    say(first.called, challenge = heard(second.caller));
    caller.advance(first.caller);
    say(second.caller, proof = heard(first.called));
    EXPECT_EQ(called.advance(second.called), State::done);
    say(first.called, answer = heard(second.caller));
    EXPECT_EQ(caller.advance(first.caller), State::done);
  }
  const Ends replayed;
  Handshake called(job, Side::called, 7);
  say(replayed.caller, proof);
  EXPECT_EQ(called.advance(replayed.called), State::refused);
  const Ends imposter;
  Handshake caller(job, Side::caller, 7);
  say(imposter.called, challenge + answer);
  EXPECT_EQ(caller.advance(imposter.caller), State::refused);
}

// The caller's own proof, sent back to it, is not the other end's.
TEST(Handshake, an_echo_is_refused) {
  const Ends ends;
  Handshake caller(job, Side::caller, 7);
  say(ends.called, std::string(32, 'c'));
  caller.advance(ends.caller);
  say(ends.called, heard(ends.called).substr(32));
  EXPECT_EQ(caller.advance(ends.caller), State::refused);
}

TEST(Handshake, bytes_that_mean_nothing_are_refused_and_few_of_them_are_waited_for) {
  std::mt19937 random(1);
  for (int length = 0; length < 200; ++length) {
    const Ends ends;
    Handshake called(job, Side::called, 7);
    std::string bytes;
    for (int i = 0; i < length; ++i) bytes += static_cast<char>(random());
    say(ends.caller, bytes);
    EXPECT_EQ(called.advance(ends.called), length < 64 ? State::under_way : State::refused);
    EXPECT_EQ(called.listens(), length < 64);
  }
}

}  // namespace
}  // namespace shoal::handshake_test
