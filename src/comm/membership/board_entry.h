#pragma once
// Entry of a member of an elastic job on the board that the others read.

#include <cstdint>

#include "comm/membership/membership.h"
#include "comm/shm/notice.h"

namespace shoal {

constexpr int most_board_members = 1024;

// Its card, the store that it has made for a generation, and whether it has done with the job.
struct BoardEntry {
  MemberCard card{};
  uint64_t store_of = 0;     // number of the generation; 0: none
  int store_descriptor = 0;  // of its memory, in the member's process
  uint64_t store_nonce = 0;
  bool left = false;
  bool gave_up = false;  // the job, as it has waited in vain for members that live
  int lost_with = 0;     // members that it knew to live when it found them too few to go on; 0: it has not
};

shm::Notice::Words to_words(const BoardEntry& entry);
BoardEntry from_words(const shm::Notice::Words& words);

// Without the lists, for those who look often.
uint64_t card_number(const shm::Notice::Words& words);
bool has_left(const shm::Notice::Words& words);

}  // namespace shoal
