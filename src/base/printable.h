#pragma once
// Untrusted text for a terminal.

#include <string>

namespace shoal {

// Replaces control characters, including line ends, and invalid UTF-8 by \xNN, so that the text cannot move the cursor,
// change colours or begin a line.
std::string printable(const std::string& text);

}  // namespace shoal
