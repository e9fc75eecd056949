#pragma once
// Lists of ranks as short text, for names.

#include <string>
#include <string_view>
#include <vector>

namespace shoal {

// Single ranks, "FIRST-LAST", and "FIRST-LAST/STEP", with commas: "0-511", "0-504/8", "0,1,7".
std::string rank_list(const std::vector<int>& ranks);

// The ranks of such a text; -1 in place of what is none. It may be anybody's: no list of more than `most` ranks.
std::vector<int> parse_rank_list(std::string_view text, int most);

}  // namespace shoal
