#include "comm/store/deadline_store.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/exception.h>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <thread>

#include "base/start_thread.h"
#include "comm/store/store_lost.h"
#include "shoal/detail/clock.h"

namespace shoal {

StoreUnreachable no_answer(const std::string& name, std::chrono::milliseconds limit) {
  return StoreUnreachable(
      fmt::format("the job's store at {} does not answer within {} s: the process that holds it (rank 0 or the "
                  "launcher; in an elastic job any rank) is stopped, or its host cannot be reached",
                  name, std::chrono::duration<double>(limit).count()));
}

// Thread that calls the store, one call after another.
class DeadlineStore::Client {
 public:
  using Call = std::function<void(c10d::Store&)>;

  explicit Client(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  static void start(const std::shared_ptr<Client>& client) {
    start_thread("calls the store", [client] { client->run(); }).detach();
  }

  void ask(Call call) {
    const std::lock_guard lock(mutex_);
    calls_.push_back(std::move(call));
    changed_.notify_all();
  }

  // Waits until the thread has let go of the store, which it may be the last to hold: a process that exits while a
  // FileStore's destructor writes leaves half an entry in the file, and the other ranks read there without an end.
  void end(std::chrono::milliseconds limit) {
    std::unique_lock lock(mutex_);
    ended_ = true;
    changed_.notify_all();
    if (overdue == 0) changed_.wait_for(lock, limit, [this] { return released_; });
  }

  // Number of calls whose callers have given up.
  std::atomic<int> overdue = 0;
  // The connection. c10d's client would print a stack trace for each later call.
  std::atomic<bool> lost = false;

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return ended_ || !calls_.empty(); });
      if (calls_.empty()) break;
      const auto call = std::move(calls_.front());
      calls_.pop_front();
      lock.unlock();
      call(*store_);
      lock.lock();
    }
    lock.unlock();
    store_.reset();
    lock.lock();
    released_ = true;
    changed_.notify_all();
  }

  c10::intrusive_ptr<c10d::Store> store_;  // the thread's
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Call> calls_;
  bool ended_ = false;
  bool released_ = false;
};

DeadlineStore::DeadlineStore(c10::intrusive_ptr<c10d::Store> store, std::string name, std::chrono::milliseconds limit)
    : client_(std::make_shared<Client>(std::move(store))), name_(std::move(name)), pid_(getpid()), limit_(limit) {
  Client::start(client_);
}

DeadlineStore::~DeadlineStore() {
  if (getpid() == pid_) client_->end(limit_);  // otherwise the thread is the parent's
}

namespace {

StoreLost lost_connection(const std::string& name) {
  return StoreLost(
      fmt::format("lost the connection to the job's store at {}: the process that holds it (rank 0 or the launcher; in "
                  "an elastic job any rank) has ended",
                  name));
}

}  // namespace

template <class Work>
auto DeadlineStore::call(Work work) {
  using Result = decltype(work(std::declval<c10d::Store&>()));
  const auto limit = limit_.load();
  if (client_->lost) throw lost_connection(name_);
  if (client_->overdue > 0) throw no_answer(name_, limit);
  if (getpid() != pid_) {
    throw UsageError(
        fmt::format("the job's store at {} is connected to process {}, not to this fork of it", name_, pid_));
  }
  struct Pending {
    explicit Pending(Work work) : task(std::move(work)) {}
    std::packaged_task<Result(c10d::Store&)> task;
    std::mutex mutex;
    bool done = false;
    bool given_up = false;
  };
  const auto pending = std::make_shared<Pending>(std::move(work));
  auto result = pending->task.get_future();
  client_->ask([pending, client = client_.get()](c10d::Store& store) {
    pending->task(store);
    const std::lock_guard lock(pending->mutex);
    pending->done = true;
    if (pending->given_up) --client->overdue;
  });
  if (result.wait_for(limit) != std::future_status::ready) {
    const std::lock_guard lock(pending->mutex);
    if (!pending->done) {
      pending->given_up = true;
      ++client_->overdue;
      throw no_answer(name_, limit);
    }
  }
  try {
    return result.get();
  } catch (const c10::DistNetworkError&) {
    client_->lost = true;
    throw lost_connection(name_);
  }
}

c10::intrusive_ptr<c10d::Store> DeadlineStore::clone() {
  auto other = call([](c10d::Store& store) { return store.clone(); });
  auto guarded = c10::make_intrusive<DeadlineStore>(std::move(other), name_, limit_.load());
  guarded->setTimeout(getTimeout());
  return guarded;
}

void DeadlineStore::set(const std::string& key, const std::vector<uint8_t>& value) {
  call([key, value](c10d::Store& store) { store.set(key, value); });
}

std::vector<uint8_t> DeadlineStore::compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                               const std::vector<uint8_t>& desired) {
  return call([=](c10d::Store& store) { return store.compareSet(key, expected, desired); });
}

std::vector<uint8_t> DeadlineStore::get(const std::string& key) {
  wait({key});
  return call([key](c10d::Store& store) { return store.get(key); });
}

std::vector<std::vector<uint8_t>> DeadlineStore::multiGet(const std::vector<std::string>& keys) {
  wait(keys);
  return call([keys](c10d::Store& store) { return store.multiGet(keys); });
}

int64_t DeadlineStore::add(const std::string& key, int64_t value) {
  return call([=](c10d::Store& store) { return store.add(key, value); });
}

bool DeadlineStore::deleteKey(const std::string& key) {
  return call([key](c10d::Store& store) { return store.deleteKey(key); });
}

bool DeadlineStore::check(const std::vector<std::string>& keys) {
  return call([keys](c10d::Store& store) { return store.check(keys); });
}

int64_t DeadlineStore::getNumKeys() {
  return call([](c10d::Store& store) { return store.getNumKeys(); });
}

void DeadlineStore::wait(const std::vector<std::string>& keys) {
  wait(keys, getTimeout());
}

void DeadlineStore::wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) {
  const auto deadline = Clock::now() + timeout;
  constexpr std::chrono::microseconds longest(10'000);
  for (std::chrono::microseconds pause(200); !check(keys); pause = std::min(2 * pause, longest)) {
    if (Clock::now() > deadline) {
      C10_THROW_ERROR(DistStoreError,
                      fmt::format("nobody has set {} in the store at {} within {} s", fmt::join(keys, ", "), name_,
                                  std::chrono::duration<double>(timeout).count()));
    }
    std::this_thread::sleep_for(pause);
  }
}

}  // namespace shoal
