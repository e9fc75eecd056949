#include "comm/tcp/tcp_transport.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

#include "base/start_thread.h"
#include "comm/reduce/reduce_kernels.h"
#include "comm/rendezvous/peer_socket.h"
#include "comm/rendezvous/world_state.h"
#include "comm/tcp/connect.h"
#include "comm/tcp/operations.h"
#include "shoal/detail/clock.h"
#include "shoal/error.h"

namespace shoal {
namespace {

using tcp::Collective;
using tcp::Message;

class TcpTransport;

class TcpWork : public TransportWork {
 public:
  TcpWork(std::shared_ptr<TcpTransport> transport, std::shared_ptr<Collective> collective)
      : transport_(std::move(transport)), collective_(std::move(collective)) {}
  TcpWork(std::shared_ptr<TcpTransport> transport, std::shared_ptr<Message> message)
      : transport_(std::move(transport)), message_(std::move(message)) {}

  bool done() override;
  bool wait_for(Milliseconds slice, Milliseconds remaining) override;
  std::string waits_for() override;
  bool needs(int world_rank) override;
  int source() const override { return message_ ? message_->source : any_source; }

 private:
  bool finished() const { return collective_ ? collective_->finished() : message_->finished.load(); }

  std::shared_ptr<TcpTransport> transport_;
  std::shared_ptr<Collective> collective_;
  std::shared_ptr<Message> message_;
};

class TcpTransport : public Transport, public std::enable_shared_from_this<TcpTransport> {
 public:
  TcpTransport(std::vector<std::unique_ptr<tcp::Link>> links, int rank, const std::vector<int>& world_ranks)
      : operations_(std::move(links), rank, world_ranks) {
    thread_ = std::make_unique<std::thread>(start_thread("sends and receives over TCP", [this] { run(); }));
  }

  ~TcpTransport() override {
    if (getpid() != pid_) {  // the thread is the parent's
      static_cast<void>(thread_.release());
      return;
    }
    TcpTransport::await_readers();
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
    }
    operations_.poller().wake();
    thread_->join();
    operations_.end();
  }

  std::string name() const override { return "tcp"; }
  bool checks_agreement() const override { return true; }

  std::unique_ptr<TransportWork> issue(const Call& call) override {
    check(call);
    const Change change(*this);
    if (call.op == Op::send || call.op == Op::recv) {
      return std::make_unique<TcpWork>(shared_from_this(), operations_.start_message(call));
    }
    return std::make_unique<TcpWork>(shared_from_this(), operations_.start_collective(call));
  }

  void give_up(const std::string& why) override {
    const std::lock_guard lock(mutex_);
    operations_.fail(std::make_exception_ptr(CommError(why)));
  }

  void abandon(const Abandoned& why) override {
    const Change change(*this);
    operations_.fail(std::make_exception_ptr(why));
    operations_.advance();  // the others are told
  }

  // A send is finished once the system has the message.
  void await_readers() override {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::seconds(10),
                      [this] { return operations_.failure() != nullptr || operations_.all_sent(); });
  }

  // Whether it has finished, or failed, which wait() tells.
  bool over(const std::function<bool()>& finished) {
    if (finished()) return true;
    const std::lock_guard lock(mutex_);
    return operations_.failure() != nullptr;
  }

  bool wait(Milliseconds limit, const std::function<bool()>& finished) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, limit, [&] { return finished() || operations_.failure() != nullptr; });
    if (!finished() && operations_.failure()) std::rethrow_exception(operations_.failure());
    return finished();
  }

  std::vector<int> missing(const Collective& collective) {
    const std::lock_guard lock(mutex_);
    return operations_.missing(collective);
  }

  bool needs(const Collective& collective, int world_rank) {
    const std::lock_guard lock(mutex_);
    return operations_.needs(collective, world_rank);
  }

 private:
  // Holds the lock, and wakes those that wait at its end.
  class Change {
   public:
    explicit Change(TcpTransport& of) : of_(of), lock_(of.mutex_) {}
    ~Change() { of_.changed_.notify_all(); }
    Change(const Change&) = delete;
    Change& operator=(const Change&) = delete;

   private:
    TcpTransport& of_;
    std::lock_guard<std::mutex> lock_;
  };

  static void check(const Call& call) {
    for (const auto* tensors : {&call.inputs, &call.outputs}) {
      for (const auto& tensor : *tensors) {
        if (tensor.is_cpu()) continue;
        throw UsageError(
            fmt::format("{}: the tcp transport supports CPU tensors only, but a tensor is on {}; move it to the CPU",
                        call.describe(), tensor.device().str()));
      }
    }
    if (reduces(call.op)) require_reducible(call);
  }

  void run() {
    constexpr std::chrono::seconds interval(1);
    auto next_look = Clock::now() + interval;
    while (true) {
      const auto ready = operations_.poller().wait(interval);
      const Change change(*this);
      if (ending_) return;
      operations_.move(ready);
      if (Clock::now() >= next_look) {
        operations_.look_at_peers(longest_silence);
        next_look = Clock::now() + interval;
      }
      operations_.advance();
    }
  }

  const pid_t pid_ = getpid();
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  tcp::Operations operations_;
  bool ending_ = false;
  std::unique_ptr<std::thread> thread_;  // last member: it uses all of the above
};

bool TcpWork::done() {
  return transport_->over([this] { return finished(); });
}

bool TcpWork::wait_for(Milliseconds slice, Milliseconds) {
  return transport_->wait(slice, [this] { return finished(); });
}

bool TcpWork::needs(int world_rank) {
  return !collective_ || transport_->needs(*collective_, world_rank);
}

std::string TcpWork::waits_for() {
  if (!collective_) return "";
  const auto ranks = transport_->missing(*collective_);
  return ranks.empty() ? "" : fmt::format("rank(s) {} have not called it", fmt::join(ranks, ", "));
}

}  // namespace

std::shared_ptr<Transport> make_tcp_transport(const WorldState& world, const std::string& group, int rank,
                                              const std::vector<int>& world_ranks, Milliseconds limit) {
  return std::make_shared<TcpTransport>(tcp::connect_ranks(world, group, rank, world_ranks, limit), rank, world_ranks);
}

}  // namespace shoal
