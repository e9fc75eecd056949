#include "comm/store/job_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "base/without_signals.h"
#include "comm/membership/patience.h"
#include "comm/store/store.h"
#include "comm/store/store_server.h"

namespace shoal {
namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr int limit_of_calls = 2;        // seconds
constexpr const char* generation = "0";  // of the ranks: this launcher does not start a job again
constexpr const char* failure_key = "shoal/launchers/failure";
constexpr std::chrono::milliseconds look_every(500);
constexpr std::chrono::seconds limit_to_leave(5);

std::string key_of(const char* what, int node) {
  return fmt::format("shoal/launchers/{}/{}", what, node);
}

}  // namespace

struct JobStore::State {
  struct Report {
    std::string key;
    std::string text;
    bool once;  // the first report of all nodes counts
  };
  struct Other {
    int node;
    std::string beat{};
    bool left = false;
    Patience patience;
  };

  State(int all, int own, std::string at, int of, std::chrono::milliseconds silent)
      : nodes(all), node(own), address(std::move(at)), port(of), silence(silent) {}

  void report(Report one) {
    if (nodes == 1) return;
    const std::lock_guard lock(mutex);
    reports.push_back(std::move(one));
    changed.notify_all();
  }

  // Whoever waits for this launcher sees by its beat that it lives.
  void run() {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait_for(lock, look_every, [this] { return stop || !reports.empty(); });
      if (stop) return;
      lock.unlock();
      try {
        if (!client) {
          client = connect_store(address, port, limit_of_calls, job);
          client->set_limit(std::chrono::seconds(limit_of_calls));
        }
        send();
        look(*client);
        lock.lock();
      } catch (const std::exception&) {
        client.reset();
        lock.lock();
        changed.wait_for(lock, look_every, [this] { return stop; });
      }
    }
  }

  void send() {
    std::unique_lock lock(mutex);
    while (!reports.empty()) {
      const auto one = reports.front();
      lock.unlock();
      one.once ? static_cast<void>(store_set_once(*client, one.key, one.text)) : store_set(*client, one.key, one.text);
      client->check({one.key});  // a set has no answer
      lock.lock();
      reports.pop_front();
      told_to_leave = told_to_leave || one.key == key_of("left", node);
    }
  }

  void look(c10d::Store& store) {
    store_set(store, key_of("beat", node), std::to_string(++beats));
    auto text = store_try_get(store, failure_key).value_or("");
    bool all_over = true;
    for (auto& other : others) {
      other.left = other.left || store.check({key_of("left", other.node)});
      auto beat = store_try_get(store, key_of("beat", other.node)).value_or("");
      if (std::exchange(other.beat, beat) != beat) other.patience.restart();
      all_over = all_over && (other.left || other.patience.over());
    }
    const std::lock_guard lock(mutex);
    failure = std::move(text);
    others_over = all_over;
  }

  const int nodes;
  const int node;
  const std::string address;
  int port;
  const std::chrono::milliseconds silence;
  std::optional<StorePlace> place{};
  JobIdentity job{};
  std::optional<StoreServer> server{};

  StorePtr client{};            // of the thread, as are these
  std::vector<Other> others{};  // on node 0
  uint64_t beats = 0;

  std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  std::deque<Report> reports;
  std::string failure;
  bool others_over = false;
  bool told_to_leave = false;
  std::optional<SteadyClock::time_point> leaves;
  bool stop = false;
  std::thread thread;
};

JobStore::JobStore(int nodes, int node, const std::string& address, int port, std::chrono::milliseconds silence)
    : state_(new State(nodes, node, address, port, silence)) {
  if (node > 0) return;
  state_->place.emplace(address, port);
  state_->port = state_->place->port();
}

JobStore::~JobStore() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->stop = true;
  }
  state_->changed.notify_all();
  if (state_->thread.joinable()) state_->thread.join();
}

int JobStore::port() const {
  return state_->port;
}

void JobStore::begin(const JobIdentity& job) {
  quiet_c10d();
  state_->job = job;
  if (state_->place) state_->server.emplace(std::move(*state_->place), job);
  state_->place.reset();
  if (state_->nodes == 1) return;
  for (int other = 1; state_->node == 0 && other < state_->nodes; ++other) {
    state_->others.push_back({.node = other, .patience = Patience(state_->silence, std::chrono::seconds(5))});
  }
  const WithoutSignals in_the_thread;
  state_->thread = std::thread([state = state_.get()] { state->run(); });
}

void JobStore::report_failure(const std::string& text) {
  if (state_->server) state_->server->report_failure(text);
  state_->report({first_failure_key(generation), text, true});
  state_->report({failure_key, text, true});
}

std::string JobStore::failure_elsewhere() const {
  const std::lock_guard lock(state_->mutex);
  return state_->failure;
}

void JobStore::report_end(int rank) {
  state_->report({ended_key(generation, rank), "ended", false});
}

void JobStore::leave() {
  state_->report({key_of("left", state_->node), "left", false});
  const std::lock_guard lock(state_->mutex);
  state_->leaves = SteadyClock::now();
}

bool JobStore::may_end() const {
  const std::lock_guard lock(state_->mutex);
  if (state_->nodes == 1) return true;
  if (state_->server) return state_->others_over && state_->told_to_leave;
  return state_->told_to_leave || SteadyClock::now() > *state_->leaves + limit_to_leave;
}

}  // namespace shoal
