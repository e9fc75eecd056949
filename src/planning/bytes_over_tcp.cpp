#include "planning/bytes_over_tcp.h"

#include <linux/tcp.h>  // the C library's own tcp_info lacks the bytes
#include <netinet/in.h>
#include <sys/socket.h>

#include <charconv>
#include <cstddef>
#include <filesystem>
#include <string>
#include <system_error>

namespace shoal {

int64_t bytes_over_tcp() {
  int64_t sum = 0;
  std::error_code fault;
  for (auto entry = std::filesystem::directory_iterator("/proc/self/fd", fault); !fault && entry != end(entry);
       entry.increment(fault)) {
    const auto name = entry->path().filename().string();
    int file = -1;
    std::from_chars(name.data(), name.data() + name.size(), file);
    tcp_info info{};
    socklen_t size = sizeof info;
    if (getsockopt(file, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) continue;  // no connection
    if (size >= offsetof(tcp_info, tcpi_bytes_received) + sizeof info.tcpi_bytes_received) {
      sum += static_cast<int64_t>(info.tcpi_bytes_received);
    }
  }
  return sum;
}

}  // namespace shoal
