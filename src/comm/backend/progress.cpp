#include "comm/backend/progress.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "base/start_thread.h"
#include "shoal/detail/clock.h"

namespace shoal {
namespace {

using Lock = std::unique_lock<std::mutex>;

// A thread that issues an operation and waits for it at once is done by then.
constexpr auto grace = std::chrono::milliseconds(1);
constexpr auto between_checks = std::chrono::milliseconds(100);
// Transports other than the host's ring no bell.
constexpr auto without_bell = std::chrono::milliseconds(2);

}  // namespace

struct Progress::State : std::enable_shared_from_this<Progress::State> {
  explicit State(std::shared_ptr<shm::HostMemory> of_process) : memory(std::move(of_process)) {}

  // Flights that are not over.
  struct Left {
    bool any = false;
    bool urgent = false;
    bool ring_bell = true;
  };

  void start_thread();
  void run();
  // Ends flights while this thread leads. False: it stops.
  bool lead();
  bool leads();
  // Ends the flights that can end. Nothing if another thread leads since a callback.
  std::optional<Left> round();
  void sleep(const Left& left, uint32_t bell);

  const std::shared_ptr<shm::HostMemory> memory;
  const int pid = getpid();
  std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  std::vector<std::shared_ptr<BackendFlight>> flights;
  bool stop = false;
  bool parked = false;   // the leader waits for a flight
  bool on_bell = false;  // the leader waits for peers
  bool hurried = false;
  std::condition_variable vacant;  // nobody leads
  std::thread::id leader{};
  int idle = 0;  // threads that wait to lead
  int away = 0;  // threads that run callbacks of futures
  std::condition_variable all_back;
  bool started = false;
  Clock::time_point next_check{};  // of the leader alone
};

Progress::Progress(std::shared_ptr<shm::HostMemory> memory) : state_(std::make_shared<State>(std::move(memory))) {}

Progress::~Progress() {
  if (getpid() != state_->pid) {  // the thread is the parent's, and may have held the lock at the fork
    new std::shared_ptr<State>(std::move(state_));
    return;
  }
  // The threads are detached: one may run a callback that needs a lock of the caller. They own what they use.
  const Lock lock(state_->mutex);
  state_->stop = true;
  state_->changed.notify_all();
  state_->vacant.notify_all();
  if (state_->on_bell) state_->memory->wake();
}

void Progress::add(std::shared_ptr<BackendFlight> flight) {
  const Lock lock(state_->mutex);
  state_->flights.push_back(std::move(flight));
  if (state_->parked) {
    state_->parked = false;
    state_->changed.notify_all();
  }
  if (state_->started) return;
  state_->start_thread();
  state_->started = true;
}

bool Progress::is_forked_copy() const {
  return getpid() != state_->pid;
}

void Progress::hurry() {
  const Lock lock(state_->mutex);
  state_->hurried = true;
  state_->changed.notify_all();
  if (state_->on_bell) state_->memory->wake();
}

void Progress::make_way() {
  if (is_forked_copy()) return;
  const Lock lock(state_->mutex);
  if (state_->leader != std::this_thread::get_id()) return;
  if (state_->idle == 0) {
    try {
      state_->start_thread();
    } catch (const UsageError&) {  // no more threads: the callback must do without
      return;
    }
  }
  state_->leader = {};
  ++state_->away;
  state_->vacant.notify_one();
}

void Progress::await_callbacks(std::chrono::milliseconds limit) {
  if (is_forked_copy()) return;
  Lock lock(state_->mutex);
  state_->all_back.wait_for(lock, limit, [this] { return state_->away == 0; });
}

void Progress::State::start_thread() {
  auto thread = shoal::start_thread("completes collectives", [state = shared_from_this()] { state->run(); });
  pthread_setname_np(thread.native_handle(), "shoal_progress");
  thread.detach();
}

bool Progress::State::leads() {
  const Lock lock(mutex);
  return leader == std::this_thread::get_id();
}

std::optional<Progress::State::Left> Progress::State::round() {
  Lock lock(mutex);
  const auto list = flights;
  lock.unlock();
  const bool checks = Clock::now() >= next_check;
  if (checks) next_check = Clock::now() + between_checks;
  Left left;
  for (const auto& flight : list) {
    if (flight->look() || (checks && flight->check())) {
      if (!leads()) return std::nullopt;
      continue;
    }
    left.any = true;
    left.urgent = left.urgent || flight->urgent();
    left.ring_bell = left.ring_bell && flight->rings_bell();
  }
  std::vector<std::shared_ptr<BackendFlight>> over;  // released after the lock
  lock.lock();
  const auto first =
      std::stable_partition(flights.begin(), flights.end(), [](const auto& each) { return !each->over(); });
  over.assign(std::make_move_iterator(first), std::make_move_iterator(flights.end()));
  flights.erase(first, flights.end());
  lock.unlock();
  return left;
}

void Progress::State::sleep(const Left& left, uint32_t bell) {
  {
    Lock lock(mutex);
    if (!left.urgent) changed.wait_for(lock, grace, [this] { return stop || hurried; });
    if (stop || std::exchange(hurried, false)) return;
    if (!memory || !left.ring_bell) {
      changed.wait_for(lock, without_bell, [this] { return stop || hurried; });
      return;
    }
    on_bell = true;
  }
  memory->prepare_sleep();
  memory->sleep(bell, between_checks);
  const Lock lock(mutex);
  on_bell = false;
}

void Progress::State::run() {
  while (true) {
    {
      Lock lock(mutex);
      ++idle;
      vacant.wait(lock, [this] { return stop || leader == std::thread::id(); });
      --idle;
      if (stop) return;
      leader = std::this_thread::get_id();
    }
    if (!lead()) return;
    const Lock lock(mutex);
    if (--away == 0) all_back.notify_all();
  }
}

bool Progress::State::lead() {
  while (true) {
    {
      Lock lock(mutex);
      parked = flights.empty();
      changed.wait(lock, [this] { return stop || !flights.empty(); });
      parked = false;
      if (stop) return false;
    }
    const auto bell = memory ? memory->bell() : 0;
    const auto left = round();
    if (!left) return true;
    if (left->any) sleep(*left, bell);
  }
}

}  // namespace shoal
