#include "cli/train/threads.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

#include "base/environment.h"
#include "base/print_to_stderr.h"
#include "base/processors.h"
#include "comm/rendezvous/world_state.h"
#include "launch/rank_variables.h"

namespace shoal::cli {
namespace {

// OpenMP binds its threads by itself: the affinity of this one is then a place of its own.
bool openmp_binds() {
  const auto environment = process_environment();
  const auto bind = environment("OMP_PROC_BIND");
  const bool binds = bind && *bind != "false" && *bind != "FALSE";
  return binds || environment("OMP_PLACES") || environment("GOMP_CPU_AFFINITY");
}

int threads_of_rank(const TrainOptions& options, int cores) {
  return options.threads > 0 || has_openmp_threads(process_environment()) ? options.threads : cores;
}

std::vector<int> other_processes_of_host(const WorldState& state) {
  const auto& peers = state.meeting.peers;
  const auto& own = peers[state.placement.rank];
  std::vector<int> others;
  for (const auto& peer : peers) {
    if (peer.host == own.host && peer.process.pid != own.process.pid) others.push_back(peer.process.pid);
  }
  return others;
}

// Threads that wait for each other's cores make steps slower by far.
void tell_too_many_threads(int ranks, int cores) {
  const int threads = at::get_num_threads();
  if (threads <= cores) return;
  print_to_stderr(
      "shoal: {} rank(s) of {} threads, with {} core(s) for each rank, which makes steps slow: give --threads {}, or "
      "set OMP_NUM_THREADS\n",
      ranks, threads, cores, cores);
}

}  // namespace

int threads_per_rank(const TrainOptions& options, int ranks) {
  return threads_of_rank(options, std::max(1, (openmp_binds() ? processors_of_host() : processors()) / ranks));
}

void set_threads(const TrainOptions& options, const World& world) {
  const int cores = openmp_binds() ? std::max(1, processors_of_host() / world.local_size())
                                   : share_of_processors(other_processes_of_host(*cell_of(world)->state));
  if (const int threads = threads_of_rank(options, cores); threads > 0) at::set_num_threads(threads);
  if (world.rank() == 0) tell_too_many_threads(world.local_size(), cores);
}

}  // namespace shoal::cli
