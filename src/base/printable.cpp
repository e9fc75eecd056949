#include "base/printable.h"

#include <cstdint>

namespace shoal {
namespace {

// Length in bytes of the character at `begin`; 0: not printable.
size_t length_of_character(const std::string& text, size_t begin) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const auto first = byte(begin);
  if (first < 0x80) return first >= 0x20 && first != 0x7f ? 1 : 0;
  const size_t length = first >= 0xc2 && first < 0xe0   ? 2
                        : (first & 0xf0) == 0xe0        ? 3
                        : first >= 0xf0 && first < 0xf5 ? 4
                                                        : 0;
  if (length == 0 || begin + length > text.size()) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(begin + i) & 0xc0) != 0x80) return 0;
  }
  // Overlong forms, surrogates, and what lies beyond the last character.
  const auto second = length > 1 ? byte(begin + 1) : 0;
  const bool invalid = (first == 0xe0 && second < 0xa0) || (first == 0xed && second >= 0xa0) ||
                       (first == 0xf0 && second < 0x90) || (first == 0xf4 && second >= 0x90);
  const bool control = first == 0xc2 && byte(begin + 1) < 0xa0;  // the second set, which has its own escape character
  return control || invalid ? 0 : length;
}

}  // namespace

std::string printable(const std::string& text) {
  constexpr const char* digits = "0123456789abcdef";
  std::string shown;
  for (size_t begin = 0; begin < text.size();) {
    const auto length = length_of_character(text, begin);
    if (length > 0) {
      shown.append(text, begin, length);
      begin += length;
      continue;
    }
    const auto byte = static_cast<uint8_t>(text[begin++]);
    shown += {'\\', 'x', digits[byte >> 4], digits[byte & 15]};
  }
  return shown;
}

}  // namespace shoal
