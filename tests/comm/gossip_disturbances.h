#pragma once
// Interruptions of a thread that gossips, and connections that end in a greeting.

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <chrono>
#include <csignal>
#include <thread>

#include "comm/gossip/connection.h"
#include "comm/gossip/frame.h"
#include "comm/rendezvous/handshake.h"
#include "comm/rendezvous/host.h"
#include "comm/rendezvous/peer_socket.h"

namespace shoal::test {

// While it lives, this thread stands still for a moment every now and then, wherever it is.
class Interruptions {
 public:
  Interruptions() {
    struct sigaction pause {};
    pause.sa_handler = [](int) { std::this_thread::sleep_for(std::chrono::microseconds(50)); };
    pause.sa_flags = SA_RESTART;
    sigaction(SIGALRM, &pause, &former_);
    set(150);
  }
  ~Interruptions() {
    set(0);
    sigaction(SIGALRM, &former_, nullptr);
  }
  Interruptions(const Interruptions&) = delete;
  Interruptions& operator=(const Interruptions&) = delete;

 private:
  static void set(int microseconds) {
    const itimerval timer{.it_interval = {0, microseconds}, .it_value = {0, microseconds}};
    setitimer(ITIMER_REAL, &timer, nullptr);
  }
  struct sigaction former_ {};
};

// A rank's first message to another; the other ends the connection before it has answered.
class CutGreeting {
 public:
  CutGreeting() {
    connection_.put({.kind = FrameKind::hello});
    EXPECT_TRUE(advance());
  }
  // The rank calls once more, and is heard.
  void expect_second_call() {
    { const auto ended = accepted(); }
    EXPECT_TRUE(advance()) << "calls again";
    const auto called = accepted();
    Handshake handshake(job_, Handshake::Side::called, key);
    for (int turn = 0; turn < 4; ++turn) {
      handshake.advance(called);
      EXPECT_TRUE(advance());
    }
    EXPECT_EQ(handshake.advance(called), Handshake::State::done);
    EXPECT_TRUE(connection_.idle()) << "the message is sent";
  }

 private:
  static constexpr uint64_t key = 7;
  bool advance() { return connection_.advance(place_of(listening_), job_, key); }
  Descriptor accepted() const {
    Descriptor socket(accept4(listening_.number(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    EXPECT_TRUE(socket.open());
    return socket;
  }

  const JobIdentity job_{"night", "0123456789abcdef0123456789abcdef"};
  const Descriptor listening_ = listen_for_peers("127.0.0.1");
  OutgoingConnection connection_;
};

}  // namespace shoal::test
