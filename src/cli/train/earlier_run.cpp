#include "cli/train/earlier_run.h"

#include <charconv>
#include <filesystem>
#include <system_error>

#include "checkpoint/folder.h"
#include "shoal/error.h"

namespace shoal::cli {

std::optional<int64_t> latest_step(const std::string& save) {
  std::error_code ignored;
  const auto latest = std::filesystem::path(save) / "latest";
  if (!std::filesystem::exists(latest, ignored)) return std::nullopt;
  try {
    const auto name = find_checkpoint(latest).filename().string();
    int64_t step = -1;
    std::from_chars(name.data() + name.rfind('-') + 1, name.data() + name.size(), step);
    return step;
  } catch (const CheckpointError&) {  // it names nothing that is there
    return std::nullopt;
  }
}

bool name_latest_again(const std::string& save, int64_t step) {
  try {
    const FolderLock lock(save);
    set_latest(save, step);
    return true;
  } catch (const CheckpointError&) {
    return false;
  }
}

}  // namespace shoal::cli
