#pragma once
// Lists of words as the system wants them.

#include <string>
#include <vector>

namespace shoal::test {

// Pointers to the words, and a null behind them. The words must outlive them.
inline std::vector<char*> pointers_to(const std::vector<std::string>& words) {
  std::vector<char*> list;
  for (const auto& word : words) list.push_back(const_cast<char*>(word.c_str()));
  list.push_back(nullptr);
  return list;
}
std::vector<char*> pointers_to(std::vector<std::string>&&) = delete;

}  // namespace shoal::test
