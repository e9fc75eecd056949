#include "cli/train/outputs.h"

#include <fmt/format.h>

#include <chrono>
#include <filesystem>
#include <system_error>
#include <thread>
#include <utility>

#include "checkpoint/folder.h"
#include "checkpoint/on_all_ranks.h"
#include "cli/train/feed.h"
#include "cli/writable.h"
#include "shoal/detail/clock.h"
#include "shoal/error.h"

namespace shoal::cli {
namespace {

// Saving looks for earlier checkpoints there.
void require_readable_run(const std::string& save) {
  if (save.empty()) return;
  try {
    has_checkpoint(save);
  } catch (const CheckpointError& error) {
    throw UsageError(fmt::format("--save: {}", error.what()));
  }
}

// NFS may remember for a while that a folder was not there; it asks the server once the one around it is opened.
bool comes_into_sight(const std::string& path) {
  constexpr std::chrono::seconds patience(2);
  const auto end = Clock::now() + patience;
  std::error_code ignored;
  while (!std::filesystem::exists(path, ignored)) {
    if (Clock::now() > end) return false;
    std::filesystem::path around;
    for (const auto& part : std::filesystem::absolute(path, ignored)) {
      around /= part;
      const std::filesystem::directory_iterator opened(around, ignored);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  return true;
}

// Not made: rank 0 has made it, where it is the same.
void require_shared_save(const std::string& save) {
  if (!comes_into_sight(save)) {
    throw UsageError(fmt::format(
        "--save: {}, which rank 0 has made, is not there; all ranks need the same folder, on several hosts in a shared "
        "file system, and for a relative path in the same working directory",
        save));
  }
  require_writable_folder("--save", save);
}

}  // namespace

void check_outputs(const TrainOptions& options) {
  auto read = data_files(options);
  const auto topology = options.strategy_options.find("topology_file");
  if (topology != options.strategy_options.end()) read.emplace_back(topology->second);
  require_writable_folder("--trace", options.trace);
  require_writable_folder("--save", options.save);
  require_readable_run(options.save);
  for (const auto& [option, path] : {std::pair("--json", options.json), std::pair("--metrics", options.metrics)}) {
    require_not_read(option, path, read);
    require_no_rank_file(option, path, options.trace, ".json");
    require_no_rank_file(option, path, options.flight_recorder, ".flight");
    if (!options.save.empty()) {
      for (const auto* saved : {"/latest", "/model.safetensors"})
        require_two_files(option, path, "--save", options.save + saved);
    }
    require_writable_file(option, path);
  }
  require_not_standard_output("--metrics", options.metrics);
  require_two_files("--metrics", options.metrics, "--json", options.json);
}

void check_outputs(const TrainOptions& options, const Group& group) {
  const auto check = [&] {
    group.rank() == 0 ? check_outputs(options) : require_writable_folder("--trace", options.trace);
  };
  if (options.chosen().synchronization == Synchronization::independent) return check();
  const char* subject = "what shoal train writes";
  on_all_ranks(group, subject, check);
  if (group.size() == 1 || options.save.empty()) return;
  on_all_ranks(group, subject, [&] { require_shared_save(options.save); });
}

}  // namespace shoal::cli
