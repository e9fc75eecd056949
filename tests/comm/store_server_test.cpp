#include "comm/store/store_server.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <stdexcept>
#include <string>

#include "comm/store/store.h"

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

}  // namespace
}  // namespace shoal::store_server_test
