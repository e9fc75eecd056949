#pragma once
// Message format of gossip over sockets.

#include <cstdint>

namespace shoal {

enum class FrameKind : uint32_t {
  hello = 1,   // first on a connection: who speaks
  values = 2,  // a version of a buffer; its bytes follow
  taken = 3,   // the version of the buffer, and older ones, are needed no more
  bye = 4,     // the version was the last one
  lost = 5,    // the connection to the rank in `buffer` has ended, the one whose channel has the key in `version`
  stop = 6,    // it does not go on after the version, for the reason in `buffer`
};

// In the byte order of the sender, which must be the receiver's.
struct Frame {
  static constexpr uint32_t expected_magic = 0x5348474f;
  uint32_t magic = expected_magic;
  FrameKind kind = FrameKind::hello;
  uint32_t source = 0;  // rank of the group
  uint32_t buffer = 0;
  int64_t version = 0;
  uint64_t bytes = 0;  // that follow
  uint64_t key = 0;    // of the receiver's channel, so that strangers are not heard
};

}  // namespace shoal
