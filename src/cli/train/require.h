#pragma once
// UsageErrors for values of options, which name the option and the values that it takes.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <vector>

#include "shoal/error.h"

namespace shoal::cli {

inline void require_one_of(const char* option, const std::string& value, const std::vector<std::string>& choices) {
  if (std::find(choices.begin(), choices.end(), value) != choices.end()) return;
  throw UsageError(fmt::format("{} {}: not in this version; available: {}", option, value, fmt::join(choices, ", ")));
}

template <class T>
void require_at_least(const char* option, T value, T least) {
  if (value < least) throw UsageError(fmt::format("{} {}: give at least {}", option, value, least));
}

template <class T>
void require_at_most(const char* option, T value, T most) {
  if (value > most) throw UsageError(fmt::format("{} {}: give at most {}", option, value, most));
}

}  // namespace shoal::cli
