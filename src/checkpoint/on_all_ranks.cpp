#include "checkpoint/on_all_ranks.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/printable.h"
#include "comm/group/text.h"
#include "shoal/error.h"

namespace shoal {

void on_all_ranks(const Group& group, const std::string& subject, const std::function<void()>& work) {
  std::string failure;  // one character for its kind, then the text
  try {
    work();
  } catch (const CommError&) {
    throw;
  } catch (const UsageError& error) {
    failure = std::string("u") + error.what();
  } catch (const std::exception& error) {
    failure = std::string("c") + error.what();
  }
  const auto failures = all_gather_text(group, failure, {-1, -1, subject});
  const auto first = std::find_if(failures.begin(), failures.end(), [](const auto& text) { return !text.empty(); });
  if (first == failures.end()) return;
  const auto rank = group.world_rank(static_cast<int>(first - failures.begin()));
  const auto text =
      group.size() == 1 ? first->substr(1) : fmt::format("rank {}: {}", rank, printable(first->substr(1)));
  if (first->front() == 'u') throw UsageError(text);
  throw CheckpointError(text);
}

}  // namespace shoal
