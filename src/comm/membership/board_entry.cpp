#include "comm/membership/board_entry.h"

namespace shoal {
namespace {

// Number, grown, generation of the store, its descriptor, left, lost_with, its nonce, gave_up, members, base; lists as
// bits.
constexpr size_t number_word = 0;
constexpr size_t left_word = 4;
constexpr size_t fixed_words = 8;
constexpr size_t list_words = most_board_members / 64;
static_assert(fixed_words + 2 * list_words <= shm::Notice::count);

void write_list(shm::Notice::Words& words, size_t at, const MemberList& members) {
  for (const int member : members) words[at + member / 64] |= uint64_t{1} << (member % 64);
}

MemberList read_list(const shm::Notice::Words& words, size_t at) {
  MemberList members;
  for (int member = 0; member < most_board_members; ++member) {
    if ((words[at + member / 64] >> (member % 64) & 1) != 0) members.push_back(member);
  }
  return members;
}

}  // namespace

shm::Notice::Words to_words(const BoardEntry& entry) {
  shm::Notice::Words words{entry.card.number,
                           entry.card.grown,
                           entry.store_of,
                           static_cast<uint64_t>(entry.store_descriptor),
                           entry.left ? uint64_t{1} : 0,
                           static_cast<uint64_t>(entry.lost_with),
                           entry.store_nonce,
                           entry.gave_up ? uint64_t{1} : 0};
  write_list(words, fixed_words, entry.card.members);
  write_list(words, fixed_words + list_words, entry.card.base);
  return words;
}

BoardEntry from_words(const shm::Notice::Words& words) {
  return {.card = {.number = words[number_word],
                   .grown = words[1],
                   .members = read_list(words, fixed_words),
                   .base = read_list(words, fixed_words + list_words)},
          .store_of = words[2],
          .store_descriptor = static_cast<int>(words[3]),
          .store_nonce = words[6],
          .left = words[left_word] != 0,
          .gave_up = words[7] != 0,
          .lost_with = static_cast<int>(words[5])};
}

uint64_t card_number(const shm::Notice::Words& words) {
  return words[number_word];
}

bool has_left(const shm::Notice::Words& words) {
  return words[left_word] != 0;
}

}  // namespace shoal
