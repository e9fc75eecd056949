#include "launch/rank_variables.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "base/environment.h"
#include "base/processors.h"
#include "launch/leftovers.h"

namespace shoal {
namespace {

int threads_per_rank(int ranks) {
  return std::max(1, processors() / ranks);
}

}  // namespace

bool has_openmp_threads(const Environment& environment) {
  const auto text = environment("OMP_NUM_THREADS").value_or("");
  const auto begin = std::min(text.find_first_not_of(' '), text.size());
  int threads = 0;
  const auto end = std::from_chars(text.data() + begin, text.data() + text.size(), threads).ptr;
  const bool whole =
      end == text.data() + text.size() || *end == ' ' || *end == ',';  // numbers for nested teams may follow
  return whole && threads > 0;
}

Variables rank_variables(const LaunchOptions& options, const RankPlace& place, const JobNames& job,
                         const Newcomers& newcomers) {
  const auto number = std::to_string(place.rank);
  const auto ranks = std::to_string(std::max(place.first_ranks, place.rank + 1));
  Variables list = {{"RANK", number},
                    {"LOCAL_RANK", std::to_string(place.local)},
                    {"ROLE_RANK", number},
                    {"GROUP_RANK", std::to_string(options.node)},
                    {"WORLD_SIZE", ranks},
                    {"LOCAL_WORLD_SIZE", std::to_string(std::max(options.ranks, place.local + 1))},
                    {"ROLE_WORLD_SIZE", ranks},
                    {"MASTER_ADDR", options.address},
                    {"MASTER_PORT", std::to_string(job.port)},
                    {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                    {"TORCHELASTIC_RESTART_COUNT", "0"},
                    {"TORCHELASTIC_MAX_RESTARTS", "0"},
                    {"TORCHELASTIC_RUN_ID", job.run},
                    {job_variable, job.id}};
  if (!job.secret.empty()) list.emplace_back("SHOAL_SECRET", job.secret);
  newcomers.add_variables(place.rank, list);
  if (options.min_ranks > 0)
    list.emplace_back(least_variable, fmt::format("{} {} {}", options.min_ranks, job.port, job.id));
  if (!options.flight_recorder.empty()) list.emplace_back("SHOAL_FLIGHT_RECORDER", options.flight_recorder);
  // Python would write into a pipe once it has 8 KiB, and lose them where it is killed.
  if (options.prefix_output && !process_environment()("PYTHONUNBUFFERED")) list.emplace_back("PYTHONUNBUFFERED", "1");
  if (options.threads > 0 || !has_openmp_threads(process_environment())) {
    const int threads = options.threads > 0 ? options.threads : threads_per_rank(options.ranks);
    list.emplace_back("OMP_NUM_THREADS", std::to_string(threads));
  }
  return list;
}

}  // namespace shoal
