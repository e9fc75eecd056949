#include "comm/store/store_server.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "comm/store/store.h"
#include "tests/support/refusal.h"

namespace shoal::store_server_test {
namespace {

constexpr const char* loopback = "127.0.0.1";

void append(std::string& bytes, uint64_t value, size_t size) {
  bytes.append(reinterpret_cast<const char*>(&value), size);
}

// In the protocol of c10d's store: a greeting, then questions whether a key is there.
std::string questions(int count) {
  std::string bytes(1, '\0');
  append(bytes, 0x3C85F7CE, 4);
  for (int i = 0; i < count; ++i) {
    bytes += '\5';
    append(bytes, 1, 8);
    append(bytes, 3, 8);
    bytes += "key";
  }
  return bytes;
}

// Asks, and is gone before the answers, as a rank that is killed: the kernel resets the connection.
void ask_and_go(int port) {
  const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  inet_pton(AF_INET, loopback, &address.sin_addr);
  if (connect(socket, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) throw std::runtime_error("refused");
  const auto bytes = questions(2000);
  EXPECT_GT(send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL), 0);
  const linger at_once{1, 0};
  setsockopt(socket, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
  close(socket);
}

// SIGPIPE would end the process that serves the store, which is rank 0 or the launcher.
TEST(StoreServer, outlives_ranks_that_end_before_they_have_their_answer) {
  const StoreServer server(StorePlace(loopback, 0));
  for (int i = 0; i < 1500; ++i) ask_and_go(server.port());
  const auto store = connect_store(loopback, server.port(), 30);
  store_set(*store, "key", "value");
  EXPECT_EQ(store_try_get(*store, "key"), "value");
}

// c10d's server would call itself for five minutes.
TEST(StoreServer, an_address_that_its_own_host_does_not_reach_is_refused_at_once) {
  const int child = fork();
  if (child == 0) {
    const bool down = unshare(CLONE_NEWNET) == 0 || unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0;
    if (!down) std::_Exit(2);
    const auto said = test::refusal([] { StorePlace(loopback, 0); });
    std::_Exit(said.find("does not reach its own address 127.0.0.1:") != std::string::npos ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  if (WEXITSTATUS(status) == 2) GTEST_SKIP() << "no network namespaces";
  EXPECT_EQ(status, 0);
}

TEST(StoreServer, its_own_name_is_asked_for_again_until_the_limit) {
  const auto seconds = [](const char* name, int limit) {
    const auto begin = std::chrono::steady_clock::now();
    const auto said = test::refusal([&] { StorePlace(name, 0, std::chrono::seconds(limit)); });
    EXPECT_NE(said.find(std::string("cannot resolve the address '") + name), std::string::npos) << said;
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  EXPECT_GE(seconds("shoal-0..none", 1), 1);
  EXPECT_LT(seconds("shoal-0..none", 0), 1);
  // What can never be a name is not waited for.
  EXPECT_LT(seconds("[::1]", 30), 15);
  EXPECT_LT(seconds("10.0.0.300", 30), 15);
}

}  // namespace
}  // namespace shoal::store_server_test
