#pragma once
// Ranks on several hosts of this machine: process namespaces with a /proc of their own, forked from a test, which holds
// the job's store. The first process of each tells who has ended there, as launchers do. All are on loopback.

#include <ATen/Parallel.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "comm/membership/join_table.h"
#include "comm/rendezvous/socket.h"
#include "comm/store/job_store.h"
#include "comm/store/store_server.h"
#include "shoal/world.h"
#include "tests/support/forked_ranks.h"

namespace shoal::test {

class ForkedHosts {
 public:
  // Whether this system lets a process make namespaces.
  static bool possible() {
    const pid_t child = fork();
    if (child == 0) std::_Exit(unshare(CLONE_NEWPID | CLONE_NEWNS) == 0 ? 0 : 1);
    int status = 1;
    waitpid(child, &status, 0);
    return status == 0;
  }

  // Runs `body` on hosts.size() hosts with so many ranks each, which may be none. later: by host, processes that may
  // join the job, numbered from ranks() on; they wait for bring().
  ForkedHosts(std::vector<int> hosts, const std::function<std::string(const World&)>& body,
              const WorldOptions& options = {}, std::vector<int> later = {})
      : hosts_(std::move(hosts)), later_(std::move(later)), inits_(hosts_.size()) {
    later_.resize(hosts_.size());
    for (const int count : hosts_) ranks_ += count;
    processes_ = std::accumulate(later_.begin(), later_.end(), ranks_);
    shared_ = static_cast<Shared*>(mmap(nullptr, sizeof(Shared) * static_cast<size_t>(processes_),
                                        PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    if (shared_ == MAP_FAILED) throw std::bad_alloc();
    int next = ranks_;
    StorePlace place("127.0.0.1", 0);
    port_ = place.port();
    const Descriptor own(open("/proc/self/ns/pid", O_RDONLY | O_CLOEXEC));
    int first = 0;
    for (size_t host = 0; host < hosts_.size(); ++host) {
      if (unshare(CLONE_NEWPID) != 0) throw std::runtime_error("no namespace of processes can be made");
      inits_[host] = fork();
      std::vector<int> numbers(static_cast<size_t>(hosts_[host] + later_[host]));
      std::iota(numbers.begin(), numbers.begin() + hosts_[host], first);
      std::iota(numbers.begin() + hosts_[host], numbers.end(), next);
      if (inits_[host] == 0) be_host(numbers, place.port(), body, options);
      setns(own.number(), CLONE_NEWPID);
      first += hosts_[host];
      next += later_[host];
    }
    store_.emplace(std::move(place));
  }
  ~ForkedHosts() {
    kill_all();
    for (const pid_t init : inits_) {
      if (init > 0) waitpid(init, nullptr, 0);
    }
    munmap(shared_, sizeof(Shared) * static_cast<size_t>(processes_));
  }
  ForkedHosts(const ForkedHosts&) = delete;
  ForkedHosts& operator=(const ForkedHosts&) = delete;

  int ranks() const { return ranks_; }
  int port() const { return port_; }  // of the store
  void signal(int rank, int number) { shared_[rank].signal = number; }
  // All of its ranks at once, of which nobody there can tell.
  void kill_host(int host) {
    if (inits_[static_cast<size_t>(host)] > 0) kill(inits_[static_cast<size_t>(host)], SIGKILL);
  }
  void lose_store() { store_.reset(); }
  // Lets a process come to the job.
  void bring(int number) { shared_[number].part = Part::comes; }
  // What it has returned so far, if it has ended.
  std::optional<std::string> text_of(int number) const {
    return shared_[number].over ? std::optional<std::string>(shared_[number].text) : std::nullopt;
  }

  // What each process has returned; a status of SIGKILL for those that died with their host. Those that have not ended
  // after `limit_seconds` are killed, with the text "overdue".
  std::vector<RankEnded> wait(double limit_seconds) {
    for (int number = ranks_; number < processes_; ++number) {
      auto waits = Part::waits;
      shared_[number].part.compare_exchange_strong(waits, Part::never);
    }
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(limit_seconds);
    const auto all_ended = [&] {
      for (auto& init : inits_) {
        if (init > 0 && waitpid(init, nullptr, WNOHANG) == init) init = 0;
      }
      return std::all_of(inits_.begin(), inits_.end(), [](pid_t init) { return init == 0; });
    };
    bool overdue = false;
    while (!all_ended()) {
      if (std::chrono::steady_clock::now() > end && !std::exchange(overdue, true)) kill_all();
      usleep(5000);
    }
    std::vector<RankEnded> ended(static_cast<size_t>(processes_));
    for (int rank = 0; rank < processes_; ++rank) {
      const auto& one = shared_[rank];
      ended[rank].status = one.over ? one.status : SIGKILL;
      ended[rank].text = one.over ? one.text : overdue ? "overdue" : "";
    }
    store_.reset();  // its threads must not be there when the test forks
    return ended;
  }

 private:
  enum class Part { waits, comes, never };  // of a process that may join
  struct Shared {
    std::atomic<Part> part;
    std::atomic<int> signal;  // to send
    std::atomic<bool> over;
    int status;
    char text[4096];
  };

  void kill_all() {
    for (size_t host = 0; host < hosts_.size(); ++host) kill_host(static_cast<int>(host));
  }

  [[noreturn]] void be_host(const std::vector<int>& numbers, int port,
                            const std::function<std::string(const World&)>& body, const WorldOptions& options) {
    const bool made = unshare(CLONE_NEWNS) == 0 && mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
                      mount("proc", "/proc", "proc", 0, nullptr) == 0;
    if (!made) std::_Exit(1);
    std::vector<pid_t> pids;
    for (const int number : numbers) {
      const pid_t pid = fork();
      if (pid == 0) be_rank(number, port, body, options);
      pids.push_back(pid);
    }
    JobStore store(2, 1, "127.0.0.1", port);  // as a launcher has one
    store.begin({});
    size_t living = numbers.size();
    while (living > 0) {
      for (const int late : store.overdue()) {
        const auto found = std::find(numbers.begin(), numbers.end(), late);
        if (found != numbers.end()) shared_[late].signal = SIGKILL;
      }
      for (size_t local = 0; local < numbers.size(); ++local) {
        auto& one = shared_[numbers[local]];
        if (const int number = one.signal.exchange(0); number != 0 && !one.over) kill(pids[local], number);
        if (one.over || waitpid(pids[local], &one.status, WNOHANG) != pids[local]) continue;
        one.over = true;
        if (numbers[local] < ranks_ || one.part == Part::comes) store.report_end(numbers[local]);
        --living;
      }
      usleep(2000);
    }
    store.leave();
    while (!store.may_end()) usleep(1000);
    std::_Exit(0);
  }

  [[noreturn]] void be_rank(int rank, int port, const std::function<std::string(const World&)>& body,
                            WorldOptions options) {
    while (rank >= ranks_ && shared_[rank].part == Part::waits) usleep(500);
    if (shared_[rank].part == Part::never) std::_Exit(0);
    if (rank >= ranks_) setenv(newcomer_variable, std::to_string(rank).c_str(), 1);
    if (processes_ > ranks_)
      setenv(join_variable, join_over_hosts({ranks_, most_ranks_, "127.0.0.1", port}, "").c_str(), 1);
    std::string text;
    try {
      at::set_num_threads(1);
      for (const auto& [name, value] : {std::pair<const char*, std::string>{"RANK", std::to_string(rank)},
                                        {"WORLD_SIZE", std::to_string(std::max(ranks_, rank + 1))},
                                        {"MASTER_ADDR", "127.0.0.1"},
                                        {"MASTER_PORT", std::to_string(port)},
                                        {"TORCHELASTIC_USE_AGENT_STORE", "True"}}) {
        setenv(name, value.c_str(), 1);
      }
      options.rendezvous_timeout_seconds = 60;
      text = body(init(options));
    } catch (const std::exception& error) {
      text = fmt::format("error: {}", error.what());
    }
    std::snprintf(shared_[rank].text, sizeof shared_[rank].text, "%s", text.c_str());
    std::_Exit(0);
  }

  static constexpr int most_ranks_ = 6;  // of a job that others may join

  std::vector<int> hosts_;
  std::vector<int> later_;
  int ranks_ = 0;
  int processes_ = 0;
  int port_ = 0;
  std::vector<pid_t> inits_;
  Shared* shared_ = nullptr;
  std::optional<StoreServer> store_;
};

}  // namespace shoal::test
