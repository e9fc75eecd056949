#pragma once
// Text from elsewhere on its way to a terminal.

#include <string>

namespace shoal {

// Control characters, line ends among them, and what is not UTF-8 as \xNN: nothing in it moves the cursor, changes
// colours or begins a line of its own.
std::string printable(const std::string& text);

}  // namespace shoal
