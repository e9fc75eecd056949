#pragma once
// Message format of gossip over sockets.

#include <cstdint>

namespace shoal {

enum class FrameKind : uint32_t {
  hello = 1,   // first on a connection: names the sender
  values = 2,  // a version of a buffer; its values follow
  taken = 3,   // the version of the buffer, and older ones, are no longer needed
  bye = 4,     // the version was the sender's last one
  lost = 5,    // the connection to the rank in `buffer` has ended; `version` is the key of that rank's channel
  stop = 6,    // the sender stops after the version, for the reason in `buffer`
};

// Frame in the byte order of the sender, which must be the receiver's.
struct Frame {
  static constexpr uint32_t expected_magic = 0x5348474f;
  uint32_t magic = expected_magic;
  FrameKind kind = FrameKind::hello;
  uint32_t source = 0;  // rank of the group
  uint32_t buffer = 0;
  int64_t version = 0;
  uint64_t bytes = 0;  // size of the values that follow
  uint64_t key = 0;    // key of the receiver's channel, with which strangers are refused
};

}  // namespace shoal
