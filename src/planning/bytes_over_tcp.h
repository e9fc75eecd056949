#pragma once
// Bytes that crossed sockets, for reports.

#include <cstdint>

namespace shoal {

// Bytes of payload that this process has received over the TCP connections that it has now. The sum over the ranks is
// what they have sent each other, on one host or several, with the few bytes that the job's store has answered; not
// what other programs send, nor what went over connections that are closed.
int64_t bytes_over_tcp();

}  // namespace shoal
