#pragma once
// Message format of the tcp transport.

#include <cstdint>

#include "comm/agreement/fingerprint.h"

namespace shoal::tcp {

enum class Kind : uint32_t {
  enter = 1,     // the sender has called collective `number`: an Entry follows, and perhaps its data
  part = 2,      // the next segment of collective `number`
  announce = 3,  // the sender has message `number` for the receiver; the text of its label follows
  ready = 4,     // the receiver of message `number` has a place for it
  message = 5,   // the data of message `number`
  fault = 6,     // the ranks have called different things; a sentence follows, and nothing more
  leave = 7,     // the sender has failed and takes no part any more; a sentence follows, and nothing more. tag: the
                 // world rank that caused it, or -1
};

// In the byte order of the sender, which must be the receiver's.
struct Frame {
  static constexpr uint32_t expected_magic = 0x53485450;
  uint32_t magic = expected_magic;
  Kind kind = Kind::fault;
  uint64_t number = 0;
  uint64_t bytes = 0;  // that follow
  // Of an announced message:
  uint64_t size = 0;
  int32_t tag = 0;
  int32_t dtype = 0;
};

// What ranks compare before any data are changed.
struct Entry {
  Fingerprint print;
  double factor;    // of ReduceOp::premul_sum
  uint64_t listed;  // 2 * ranks for operations whose parts may differ in size, else 0; so many numbers follow:
                    // bytes that the sender sends to each rank, then bytes that it expects from each
  uint64_t data;    // bytes of data that follow these
};

// Data of this size travel with the entry. Larger ones are sent once all ranks have entered, for which there is a
// place.
constexpr int64_t bytes_with_entry = int64_t{8} << 10;

}  // namespace shoal::tcp
