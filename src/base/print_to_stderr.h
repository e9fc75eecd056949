#pragma once
// Messages for people on standard error, on which nothing else may depend.

#include <fmt/format.h>

#include <string_view>
#include <utility>

namespace shoal {

// Writes the text as it is. What cannot be written, to a full disk or a terminal or pipe whose other end is gone, is
// lost: nothing is thrown, and no SIGPIPE ends the process.
void write_to_stderr(std::string_view text);

// For fmt::print(stderr, ...), which throws.
template <class... Arguments>
void print_to_stderr(fmt::format_string<Arguments...> text, Arguments&&... arguments) {
  write_to_stderr(fmt::format(text, std::forward<Arguments>(arguments)...));
}

}  // namespace shoal
