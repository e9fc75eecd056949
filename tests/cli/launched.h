#pragma once
// Jobs of `shoal launch`, and what they have printed.

#include <string>
#include <vector>

#include "tests/support/processes.h"
#include "tests/support/temp_folder.h"

namespace shoal::test {

inline Ended launch(std::vector<std::string> arguments, double limit = 60) {
  arguments.insert(arguments.begin(), {SHOAL, "launch"});
  return run(arguments, limit);
}

inline bool contains(const Ended& ended, const std::string& text) {
  return ended.output.find(text) != std::string::npos;
}

// Of a shell that has started a launcher: waits until as many ranks as files have made theirs, so that it handles
// signals.
inline std::string until_up(const TempFolder& folder, int ranks) {
  return "until [ $(ls " + folder.path().string() + " | grep -c up) = " + std::to_string(ranks) +
         " ]; do sleep 0.05; done; ";
}

}  // namespace shoal::test
