#include "comm/store/job_store.h"

#include <fmt/format.h>

#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "comm/store/store.h"
#include "comm/store/store_server.h"

namespace shoal {
namespace {

constexpr int limit_of_calls = 2;        // seconds
constexpr const char* generation = "0";  // of the ranks: this launcher does not start a job again

constexpr const char* failure_key = "shoal/launchers/failure";

std::string left_key(int node) {
  return fmt::format("shoal/launchers/left/{}", node);
}

}  // namespace

struct JobStore::State {
  // The server's node is a client like the others, once it has something to say to them.
  template <class Work>
  void try_to(const Work& work) {
    if (unreachable) return;
    try {
      if (!client) {
        client = connect_store(address, port, limit_of_calls, job);
        client->set_limit(std::chrono::seconds(limit_of_calls));
      }
      work(*client);
    } catch (const std::exception&) {
      unreachable = true;
    }
  }

  int nodes;
  int node;
  std::string address;
  int port;
  std::optional<StorePlace> place{};
  JobIdentity job{};
  std::optional<StoreServer> server{};
  StorePtr client{};
  bool unreachable = false;
  std::chrono::steady_clock::time_point next_look = std::chrono::steady_clock::now() + std::chrono::seconds(1);
};

JobStore::JobStore(int nodes, int node, const std::string& address, int port)
    : state_(new State{.nodes = nodes, .node = node, .address = address, .port = port}) {
  if (node > 0) return;
  state_->place.emplace(address, port);
  state_->port = state_->place->port();
}

JobStore::~JobStore() = default;

int JobStore::port() const {
  return state_->port;
}

void JobStore::begin(const JobIdentity& job) {
  quiet_c10d();
  state_->job = job;
  if (state_->place) state_->server.emplace(std::move(*state_->place), job);
  state_->place.reset();
}

void JobStore::report_failure(const std::string& text) {
  if (state_->server) state_->server->report_failure(text);
  if (state_->nodes == 1) return;
  state_->try_to([&](c10d::Store& store) {
    store_set_once(store, first_failure_key(generation), text);
    store_set_once(store, failure_key, text);
  });
}

std::string JobStore::failure_elsewhere() {
  const auto now = std::chrono::steady_clock::now();
  if (state_->nodes == 1 || now < state_->next_look) return "";
  state_->next_look = now + std::chrono::seconds(1);
  std::string text;
  state_->try_to([&](c10d::Store& store) { text = store_try_get(store, failure_key).value_or(""); });
  return text;
}

void JobStore::report_end(int rank) {
  if (state_->nodes == 1) return;
  state_->try_to([&](c10d::Store& store) { store_set(store, ended_key(generation, rank), "ended"); });
}

void JobStore::leave(std::chrono::seconds limit, const std::function<bool()>& given_up) {
  if (state_->nodes == 1) return;
  state_->try_to([&](c10d::Store& store) { store_set(store, left_key(state_->node), "left"); });
  if (!state_->server) return;
  std::vector<std::string> others;
  for (int node = 1; node < state_->nodes; ++node) others.push_back(left_key(node));

  const auto deadline = std::chrono::steady_clock::now() + limit;
  bool left = false;
  while (!left && !state_->unreachable && !given_up() && std::chrono::steady_clock::now() < deadline) {
    state_->try_to([&](c10d::Store& store) { left = store.check(others); });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}

}  // namespace shoal
