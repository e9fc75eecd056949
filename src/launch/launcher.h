#pragma once
// Launcher of the ranks of a job on this host.

#include <functional>
#include <string>
#include <vector>

namespace shoal {

struct LaunchOptions {
  int ranks = 2;
  std::vector<std::string> command{};  // program and arguments; looked up in PATH
  // Instead of a command: runs in a process forked from this one, which saves loading libtorch per rank, and returns
  // the exit code. Threads of this process do not exist there, and libraries have read their variables already.
  std::function<int()> body{};
  std::string address = "127.0.0.1";  // address of the store: with several nodes, of node 0 as all reach it
  int port = 0;                       // port of the store; 0: any free one, of one node
  int nodes = 1;                      // hosts, on each of which a launcher starts `ranks` ranks
  int node = 0;                       // this one; its ranks are node * ranks to (node + 1) * ranks - 1
  int threads = 0;                    // OMP_NUM_THREADS of each rank; 0: the value in this process's environment, or
                                      // without one this host's cores divided by the ranks, at least 1
  bool prefix_output = true;          // "[rank] " before every line; false: ranks write to our own streams
  std::string flight_recorder{};      // folder for the ranks' flight recorders; empty: none
  bool keep_going = false;            // a rank's failure does not end the others
  int min_ranks = 0;                  // of an elastic job: the others go on while so many ranks have not failed; 0: a
                                      // rank's failure ends the others. With several nodes the ranks count themselves
  int most_ranks = 0;         // of an elastic job that newcomers may join, while it runs, on all nodes; 0: nobody can
  bool join = false;          // this node comes to such a job, of several nodes at the start, with `ranks` newcomers
  int max_restarts = 0;       // ranks that are started in place of failed ones, with most_ranks
  double grace_seconds = 6;   // time for the others to report what they noticed, after the first failure
  double stop_seconds = 120;  // time for the ranks to save their state, after SIGINT, SIGTERM or SIGHUP;
                              // infinity: no limit
  std::function<std::string()> when_lost{};  // of an elastic job: what else to say once no rank is left

  // UsageError lists all faults.
  void validate() const;
};

// Runs the command once per rank with torchrun's environment variables, and hosts the ranks' store, so that no rank's
// death closes it. The ranks share a secret (SHOAL_SECRET): the one in this process's environment, else a new one.
// Blocks until all ranks have ended. Whatever happens to this process (watcher.h), neither the ranks nor their
// descendants are left behind: they are killed, also where the ranks end well, but for those that have left the rank's
// process group and have another environment.
//
// The first rank that fails is named on standard error; the others get the grace time, then SIGTERM, then SIGKILL; with
// keep_going they run on, with min_ranks as long as enough are left and none has given the job up. With most_ranks, a
// process that is to join the job (SHOAL_JOIN, see World::joining()) is started in place of a rank that has failed, and
// on SIGUSR2, with the next free number as its rank; what becomes of it does not concern the job until it is admitted.
// With `join` all ranks of this node are such processes. A rank that a signal has stopped is named, too.
//
// Returns 0, or the first failure's exit code (128 + number for a signal; with keep_going only if all have failed, with
// min_ranks only if too few were left or, with several nodes, all of this one have failed, or for a failure after which
// no rank has ended well; 1 for one on another node). SIGINT, SIGTERM and SIGHUP (unless nohup has it ignored) reach
// the ranks as SIGINT and start the stop time; a further SIGINT or SIGTERM, at least a second later, kills them. The
// code is then 130 if all ranks end with 0, 130 or by SIGINT, otherwise that of the first which does not. If nobody
// reads the output any more (EPIPE), the ranks are told to stop in the same way. SIGTSTP stops the ranks, and this
// process until it is continued.
//
// With flight recorders, prints their verdict on standard error when a rank has failed, and on SIGUSR1. With several
// nodes, each host runs a launcher; that of node 0 holds the store, and stays until the others have ended. They share a
// secret only if SHOAL_SECRET gives all of them one. UsageError for wrong options, a program that cannot be started, a
// port in use, or output that cannot be written. Installs signal handlers while it runs; call it from one thread.
int launch(const LaunchOptions& options);

}  // namespace shoal
