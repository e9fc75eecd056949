#include "comm/store/job_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <iterator>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

#include "base/start_thread.h"
#include "base/without_signals.h"
#include "comm/membership/patience.h"
#include "comm/store/authenticated_store.h"
#include "comm/store/store.h"
#include "comm/store/store_server.h"
#include "shoal/detail/clock.h"
#include "shoal/error.h"

namespace shoal {
namespace {

constexpr int limit_of_calls = 2;        // seconds
constexpr const char* generation = "0";  // of the ranks: this launcher does not start a job again
constexpr const char* failure_key = "shoal/launchers/failure";
constexpr const char* open_key = "shoal/launchers/open";        // limits of a job that nodes may join
constexpr const char* nodes_key = "shoal/launchers/nodes";      // so far
constexpr const char* numbers_key = "shoal/launchers/numbers";  // the next one of a process that joins
constexpr std::chrono::milliseconds look_every(500);
constexpr std::chrono::seconds limit_to_leave(5);

std::string key_of(const char* what, int node) {
  return fmt::format("shoal/launchers/{}/{}", what, node);
}

// A number that nobody else gets, from `first` on. Not a counter of the store, because those are not authenticated.
int take_next(c10d::Store& store, const std::string& key, int first) {
  while (true) {
    const auto before = store_try_get(store, key);
    const int number = before ? number_in<int>(*before, key) : first;
    const auto own = fmt::format("{} {:08x}{:08x}", number + 1, std::random_device()(), std::random_device()());
    if (store_replace(store, key, before.value_or(""), own) == own) return number;
  }
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
    int members = 0;  // that run there
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
      changed.wait_for(lock, look_every, [this] { return stop || hurry || !reports.empty(); });
      if (stop) return;
      hurry = false;
      lock.unlock();
      try {
        if (!client) {
          client = connect_store(address, port, limit_of_calls, job);
          client->set_limit(std::chrono::seconds(limit_of_calls));
        }
        send();
        number_newcomers(*client);
        look(*client);
        lock.lock();
        ++looks;
        answered.notify_all();
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

  void number_newcomers(c10d::Store& store) {
    std::unique_lock lock(mutex);
    for (; asked > 0; --asked) {
      lock.unlock();
      const int number = take_next(store, numbers_key, first_number);
      lock.lock();
      numbers.push_back(number);
      coming.insert(number);
    }
    const auto list = coming;
    lock.unlock();
    for (const int number : list) {
      if (!store.check({joined_key(generation, number)})) continue;
      const std::lock_guard again(mutex);
      joined.insert(number);
      coming.erase(number);
    }
  }

  void look(c10d::Store& store) {
    store_set(store, key_of("beat", node), fmt::format("{} {}", ++beats, members.load()));
    if (is_open) {
      const auto now = store_try_get(store, nodes_key);
      const int all = now ? number_in<int>(*now, nodes_key) : nodes;
      for (int other = known; other < all; ++other) wait_for(other);
      known = std::max(known, all);
    }
    auto text = store_try_get(store, failure_key).value_or("");
    std::istringstream in(store_try_get(store, overdue_key(generation)).value_or(""));
    const std::vector<int> late{std::istream_iterator<int>(in), {}};
    auto loss = store_try_get(store, lost_key(generation)).value_or("");
    bool all_over = true;
    bool any_trains = members > 0;
    int there = 0;
    for (auto& other : others) {
      other.left = other.left || store.check({key_of("left", other.node)});
      auto beat = store_try_get(store, key_of("beat", other.node)).value_or("");
      const bool is_new = beat != std::exchange(other.beat, beat);
      if (is_new) other.patience.restart();
      if (is_new) std::istringstream(beat) >> other.members >> other.members;
      const bool over = other.patience.over();
      all_over = all_over && (other.left || over);
      const bool silent = other.beat.empty() && !over;  // it has not come yet
      any_trains = any_trains || silent || (!over && other.members > 0);
      if (!over) there += other.members;
    }
    if (any_trains) without_members.restart();
    const std::lock_guard lock(mutex);
    failure = std::move(text);
    overdue = late;
    lost = std::move(loss);
    elsewhere = there;
    all_ended = without_members.over();
    others_over = all_over;
  }

  // Before the job ends, for that node's launcher to end.
  void wait_for(int other) {
    if (other == node) return;
    others.push_back({.node = other, .patience = Patience(silence, std::chrono::seconds(5))});
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
  bool is_open = false;         // to other nodes
  int known = 0;                // nodes of it so far
  Patience without_members{limit_to_leave, std::chrono::seconds(5)};
  uint64_t beats = 0;

  std::atomic<int> members = 0;  // that run on this node

  std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  std::deque<Report> reports;
  int asked = 0;  // for numbers
  int first_number = 0;
  std::deque<int> numbers;
  std::set<int> coming;  // numbers that were given, of processes that are no members yet, as far as it is known
  std::set<int> joined;
  bool hurry = false;
  uint64_t looks = 0;
  std::condition_variable answered;
  std::string failure;
  std::vector<int> overdue;
  std::string lost;
  int elsewhere = 0;
  bool all_ended = false;
  bool others_over = false;
  bool told_to_leave = false;
  std::optional<Clock::time_point> leaves;
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
  if (state_->node == 0 || state_->is_open) {
    for (int other = 0; other < state_->nodes; ++other) state_->wait_for(other);
  }
  state_->known = state_->nodes;
  const WithoutSignals in_the_thread;
  state_->thread = start_thread("reads the job's store", [state = state_.get()] { state->run(); });
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
  if (state_->nodes == 1 && state_->server) state_->server->report_end(generation, rank);
  state_->report({ended_key(generation, rank), "ended", false});
}

JobStore::Terms JobStore::find(const std::string& address, int port, const JobIdentity& job, int timeout_seconds) {
  quiet_c10d();
  try {
    const auto store = connect_store(address, port, timeout_seconds, job);
    store->set_limit(std::chrono::seconds(limit_of_calls));
    // Before anything is written.
    const auto claim = store_try_get(*store, claim_key);
    if (claim && claim->find(claims_secret) != std::string::npos && !job.has_secret()) {
      throw UsageError(
          fmt::format("the job at {}:{} has a secret: set its SHOAL_SECRET on this host, too", address, port));
    }
    std::optional<std::string> text;
    const auto deadline = Clock::now() + std::chrono::seconds(timeout_seconds);
    while (!(text = store_try_get(*store, open_key)) && Clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    Terms open;
    int nodes = 0;
    std::istringstream in(text.value_or(""));
    in >> open.first_ranks >> open.most_ranks >> open.min_ranks >> nodes;
    if (!in || open.most_ranks == 0) {
      throw UsageError(
          fmt::format("the job at {}:{} takes in no hosts: start it with --nnodes of at least 2 and --elastic MIN:MAX",
                      address, port));
    }
    open.node = take_next(*store, nodes_key, nodes);
    return open;
  } catch (const UsageError&) {
    throw;
  } catch (const ForgedValue&) {
    throw UsageError(fmt::format(
        "the job at {}:{} was started with another SHOAL_SECRET or none, another SHOAL_JOB_ID, or its --address is not "
        "spelled as here",
        address, port));
  } catch (const std::exception& error) {  // of shoal, or of libtorch, as the job ends
    throw UsageError(fmt::format("there is no job at {}:{} that this host can join: {}", address, port, error.what()));
  }
}

void JobStore::open(const Terms& terms) {
  state_->is_open = terms.most_ranks > 0;
  if (state_->node > 0) return;
  state_->report({open_key,
                  fmt::format("{} {} {} {}", terms.first_ranks, terms.most_ranks, terms.min_ranks, state_->nodes),
                  true});
}

std::string JobStore::lost() const {
  if (state_->nodes == 1) return state_->server ? state_->server->lost(generation) : "";
  const std::lock_guard lock(state_->mutex);
  return state_->lost;
}

void JobStore::set_members(int count) {
  state_->members = count;
}

int JobStore::members_elsewhere() const {
  const std::lock_guard lock(state_->mutex);
  return state_->elsewhere;
}

bool JobStore::nobody_trains() const {
  const std::lock_guard lock(state_->mutex);
  return state_->is_open && state_->all_ended;
}

void JobStore::ask_for_number(int first_ranks) {
  const std::lock_guard lock(state_->mutex);
  state_->first_number = first_ranks;
  ++state_->asked;
  state_->hurry = true;
  state_->changed.notify_all();
}

std::optional<int> JobStore::take_number() {
  const std::lock_guard lock(state_->mutex);
  if (state_->numbers.empty()) return std::nullopt;
  const int number = state_->numbers.front();
  state_->numbers.pop_front();
  return number;
}

// A look that is under way may have asked before the process had joined.
bool JobStore::has_joined(int number, bool wait) {
  std::unique_lock lock(state_->mutex);
  const auto before = state_->looks;
  const auto known = [&] { return state_->joined.contains(number) || state_->looks > before + 1; };
  const auto end = Clock::now() + std::chrono::seconds(2 * limit_of_calls);
  while (wait && !known() && Clock::now() < end) {
    state_->hurry = true;
    state_->changed.notify_all();
    state_->answered.wait_for(lock, std::chrono::milliseconds(100), known);
  }
  return state_->joined.contains(number);
}

std::vector<int> JobStore::overdue() const {
  const std::lock_guard lock(state_->mutex);
  return state_->overdue;
}

void JobStore::leave() {
  state_->report({key_of("left", state_->node), "left", false});
  const std::lock_guard lock(state_->mutex);
  state_->leaves = Clock::now();
}

bool JobStore::may_end() const {
  const std::lock_guard lock(state_->mutex);
  if (state_->nodes == 1) return true;
  if (state_->server) return state_->others_over && state_->told_to_leave;
  return state_->told_to_leave || Clock::now() > *state_->leaves + limit_to_leave;
}

}  // namespace shoal
