#include "comm/rendezvous/rendezvous.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <sstream>
#include <string_view>
#include <thread>
#include <type_traits>

#include "base/printable.h"
#include "comm/rendezvous/socket.h"
#include "comm/rendezvous/while_waiting.h"
#include "comm/store/authenticated_store.h"
#include "comm/store/store_lost.h"
#include "shoal/error.h"

namespace shoal {
namespace {

constexpr std::chrono::seconds leaving_limit(5);

// Before an error in the store that is a CommError on all ranks; others are DisagreeErrors.
constexpr std::string_view of_communication = "communication: ";

// A rank's record in the store, as text: "SIZE TRANSPORT CHECKED PID START PAGE NONCE HOST STORE GPUS".
struct Record {
  int size = 0;
  std::string transport;
  bool checked = false;  // check_agreement
  Peer peer;
};

std::string to_text(const Record& record) {
  const auto& peer = record.peer;
  return fmt::format("{} {} {:d} {} {} {} {} {} {} {}", record.size, record.transport, record.checked, peer.process.pid,
                     peer.process.start_time, peer.page.descriptor, peer.page.nonce, peer.host,
                     peer.store.empty() ? "-" : peer.store, peer.gpus);
}

Record from_text(const std::string& text) {
  std::istringstream in(text);
  Record record;
  auto& peer = record.peer;
  in >> record.size >> record.transport >> record.checked >> peer.process.pid >> peer.process.start_time >>
      peer.page.descriptor >> peer.page.nonce >> peer.host >> peer.store >> peer.gpus;
  if (peer.store == "-") peer.store.clear();
  peer.page.pid = peer.process.pid;
  return record;
}

bool same_process(const Peer& a, const Peer& b) {
  return a.host == b.host && a.process.pid == b.process.pid && a.process.start_time == b.process.start_time;
}

std::string record_key(const std::string& prefix, int rank) {
  return fmt::format("{}/rank/{}", prefix, rank);
}

struct Present {
  std::string prefix;
  std::vector<Peer> peers;
};

// One attempt to meet. Every failure is published, so that all ranks report the same sentence.
class Room {
 public:
  Room(Placement placement, const shm::PageAddress& page, std::string gpus, const Meeting& meeting,
       const WorldOptions& options)
      : placement_(std::move(placement)),
        page_(page),
        gpus_(std::move(gpus)),
        store_(meeting.store),
        launcher_(meeting.launcher),
        transport_(options.transport),
        checked_(options.check_agreement),
        timeout_(options.rendezvous_timeout_seconds),
        while_waiting_(options.while_waiting) {}

  Present enter() {
    require_same_job();
    const auto own = record_of({host_identity(), this_process(), page_, gpus_, placement_.reached});
    const auto job = job_key();
    const auto visit = count_visit();
    if (visit > 1) refuse_duplicate(own, fmt::format("{}/{}", job, visit - 1));
    present_.prefix = fmt::format("{}/{}", job, visit);
    store_set(*store_, rank_key(placement_.rank), to_text(own));
    agree_on_size();
    collect();
    return present_;
  }

  Present enter_again() {
    require_same_job();
    const auto visits = visits_in(store_try_get(*store_, visits_key()));
    present_.prefix = fmt::format("{}/{}", job_key(), visits);
    for (int rank = 0; rank < placement_.size; ++rank) {
      const auto text = store_try_get(*store_, rank_key(rank));
      if (!text) {
        throw UsageError(
            fmt::format("rejoin: rank {1} has never been part of the job at {0}; start all ranks without rejoin first",
                        store_name(placement_), rank));
      }
      const auto record = from_text(*text);
      if (record.size != placement_.size) {
        throw UsageError(
            fmt::format("rejoin: the job has {} ranks, but this process was started with a world size of {}",
                        record.size, placement_.size));
      }
      present_.peers.push_back(record.peer);
    }
    auto& own = present_.peers[placement_.rank];
    if (own.host == host_identity() && state_of(own.process) != ProcessState::gone) {
      throw UsageError(fmt::format(
          "rejoin: rank {} is still running (pid {}); end it first, or give this process the rank that died",
          placement_.rank, own.process.pid));
    }
    own = {host_identity(), this_process(), page_, gpus_, placement_.reached};
    store_set(*store_, rank_key(placement_.rank), to_text(record_of(own)));
    return present_;
  }

 private:
  Record record_of(Peer peer) const { return {placement_.size, transport_, checked_, std::move(peer)}; }
  std::string job_key() const { return "shoal/" + placement_.generation; }
  std::string visits_key() const { return fmt::format("{}/visits/{}", job_key(), placement_.rank); }
  std::string rank_key(int rank) const { return record_key(present_.prefix, rank); }

  std::string left_key(int rank) const { return fmt::format("{}/left/{}", present_.prefix, rank); }

  // Two jobs may be given the same port. The process that serves the store names its job there; in torchrun's store,
  // the first rank does.
  void require_same_job() {
    const auto own = job_claim(placement_.job);
    auto claim = read_claim();
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (!claim && std::chrono::steady_clock::now() < deadline) {
      pause();
      claim = read_claim();
    }
    if (!claim || *claim == own) return;  // if rank 0 is missing, it is reported below
    const auto at = "the store at " + store_name(placement_);
    if (claim->find(claims_secret) != std::string::npos) {
      throw UsageError(
          fmt::format("{} belongs to a job with a secret, but rank {} has none: set the same SHOAL_SECRET on all ranks "
                      "of a job, and a different MASTER_PORT for each job",
                      at, placement_.rank));
    }
    const auto named = [](const std::string& text) { return text == "job " ? "without a name" : printable(text); };
    throw UsageError(fmt::format(
        "{} belongs to another job ({}) than this rank {} ({}): give each job its own MASTER_PORT. If it is "
        "one job, give all its ranks the same SHOAL_JOB_ID",
        at, named(*claim), placement_.rank, named(own)));
  }

  std::optional<std::string> read_claim() {
    try {
      if (!placement_.store_is_served) return store_try_get(*store_, claim_key);
      return store_replace(*store_, claim_key, "", job_claim(placement_.job));
    } catch (const ForgedValue& error) {
      throw UsageError(
          fmt::format("the store at {} belongs to another job than this rank {}: give each job its own "
                      "MASTER_PORT, and all ranks of a job the same SHOAL_SECRET and SHOAL_JOB_ID ({})",
                      store_name(placement_), placement_.rank, error.what()));
    }
  }

  // Number of times that this rank has come, including this one. Not a counter of the store, because counters are not
  // authenticated.
  int64_t count_visit() {
    const auto own = this_process();
    while (true) {
      const auto before = store_try_get(*store_, visits_key());
      const auto visit = visits_in(before) + 1;
      const auto text = fmt::format("{} {} {} {}", visit, own.pid, own.start_time, host_identity());
      const auto now =
          before ? store_replace(*store_, visits_key(), *before, text) : store_set_once(*store_, visits_key(), text);
      if (now == text) return visit;
    }
  }

  int64_t visits_in(const std::optional<std::string>& text) const {
    return text ? number_in<int64_t>(*text, visits_key()) : 0;
  }

  // The same process may meet again; another process must not take its rank.
  void refuse_duplicate(const Record& own, const std::string& previous) {
    const auto text = store_try_get(*store_, fmt::format("{}/rank/{}", previous, placement_.rank));
    if (!text || same_process(from_text(*text).peer, own.peer)) return;
    const auto error = fmt::format("two processes claim rank {} (pids {} and {}): give each its own RANK",
                                   placement_.rank, from_text(*text).peer.process.pid, own.peer.process.pid);
    store_set_once(*store_, previous + "/error", error);
    throw UsageError(error);
  }

  void agree_on_size() {
    const auto agreed =
        store_set_once(*store_, present_.prefix + "/size", fmt::format("{} {}", placement_.size, placement_.rank));
    std::istringstream in(agreed);
    int size = 0;
    int rank = 0;
    in >> size >> rank;
    require_same_size(size, rank);
  }

  void require_same_size(int size, int rank) {
    if (size == placement_.size) return;
    fail<DisagreeError>(
        fmt::format("the world's size differs: {} on rank {}, {} on rank {}: give all ranks the same WORLD_SIZE", size,
                    rank, placement_.size, placement_.rank));
  }

  // Ranks of different transports would wait for each other until their time is over. Those that fit are told apart in
  // no case: "auto" is "host" among ranks of one host, and may be "tcp" over several.
  void require_same_transport(const std::vector<Record>& records) {
    const auto& first = records[0];
    const bool share_memory = std::all_of(records.begin(), records.end(), [&](const Record& one) {
      return one.peer.host == first.peer.host && one.peer.page.descriptor >= 0;
    });
    const auto kind = [&](const Record& one) {
      const bool of_its_own = one.transport == "gloo" || one.transport == "mpi";
      return of_its_own || (one.transport == "tcp" && share_memory) ? one.transport : "auto";
    };
    const auto checks = [](const Record& one) { return one.checked ? "on" : "off"; };
    for (size_t rank = 1; rank < records.size(); ++rank) {
      const auto& one = records[rank];
      if (kind(one) != kind(first)) {
        fail<DisagreeError>(fmt::format("transport differs: {} on rank 0, {} on rank {}: give all ranks the same",
                                        first.transport, one.transport, rank));
      }
      if (one.checked != first.checked && kind(one) != "auto" && one.transport != "tcp") {
        fail<DisagreeError>(fmt::format("check_agreement differs: {} on rank 0, {} on rank {}: give all ranks the same",
                                        checks(first), checks(one), rank));
      }
    }
  }

  void collect() {
    std::vector<Record> records(static_cast<size_t>(placement_.size));
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(timeout_);
    present_.peers.resize(placement_.size);
    std::vector<int> missing(placement_.size);
    for (int rank = 0; rank < placement_.size; ++rank) missing[rank] = rank;
    int rounds = 0;
    while (true) {
      if (const auto error = published_error()) {
        leave();
        if (!error->starts_with(of_communication)) throw DisagreeError(printable(*error));
        throw CommError(printable(error->substr(of_communication.size())));
      }
      std::erase_if(missing, [&](int rank) {
        const auto text = store_try_get(*store_, rank_key(rank));
        if (!text) return false;
        const auto record = from_text(*text);
        require_same_size(record.size, rank);
        present_.peers[rank] = record.peer;
        records[rank] = record;
        return true;
      });
      if (missing.empty()) {
        require_same_transport(records);
        return;
      }
      if (++rounds % 50 == 0) look_for_ended(missing);
      if (std::chrono::steady_clock::now() > deadline) {
        fail<CommError>(fmt::format("rank(s) {} of {} did not appear at {} within {} s{}", fmt::join(missing, ", "),
                                    placement_.size, store_name(placement_), timeout_, loopback_name()));
      }
      try {
        pause();
      } catch (...) {  // of the program: all ranks that wait here begin again together
        give_up(fmt::format("rank {} has stopped waiting for rank(s) {}: it was interrupted", placement_.rank,
                            fmt::join(missing, ", ")));
        throw;
      }
    }
  }

  // Many systems give a host's own name a loopback address in /etc/hosts.
  std::string loopback_name() const {
    const auto& name = placement_.address;
    if (placement_.rank != 0 || placement_.store_is_served || name == "localhost") return "";
    SocketAddress address;
    try {
      address = resolve(name, placement_.port);
    } catch (const std::runtime_error&) {
      return "";
    }
    const auto number = address.host();
    if (number == name || !is_loopback(number)) return "";
    return fmt::format(
        "; if they are on other hosts: '{}' is {} on rank 0's, which these do not reach, so set MASTER_ADDR to a "
        "number, or to a name that is not a loopback address on any host",
        name, number);
  }

  void pause() {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    while_waiting_.look();
  }

  // A launcher that lets the others go on says which processes have ended. They will not come.
  void look_for_ended(const std::vector<int>& missing) {
    if (!launcher_) return;
    const auto launcher = launcher_();
    for (const int rank : missing) {
      if (!launcher->check({ended_key(placement_.generation, rank)})) continue;
      fail<CommError>(fmt::format("rank {} has ended, as its launcher says, before it appeared at {}", rank,
                                  store_name(placement_)));
    }
  }

  std::optional<std::string> published_error() {
    try {
      return store_try_get(*store_, present_.prefix + "/error");
    } catch (const ForgedValue&) {
      return std::nullopt;  // a forged error, which ends nothing
    }
  }

  void publish(const std::string& text, bool is_of_communication) {
    store_set_once(*store_, present_.prefix + "/error",
                   is_of_communication ? std::string(of_communication) + text : text);
    leave();
  }

  template <class E>
  [[noreturn]] void fail(const std::string& text) {
    publish(text, std::is_same_v<E, CommError>);
    throw E(text);
  }

  // The same for a failure of the program's own, if the store answers.
  void give_up(const std::string& text) {
    try {
      publish(text, /*is_of_communication=*/true);
    } catch (const std::exception&) {
    }
  }

  // If this process hosts the store, it stays for a few seconds at most, until all ranks that came have read the error.
  void leave() {
    store_set_once(*store_, left_key(placement_.rank), "");
    if (placement_.rank != 0 || placement_.store_is_served) return;
    const auto deadline = std::chrono::steady_clock::now() + leaving_limit;
    const auto everybody_left = [&] {
      for (int rank = 0; rank < placement_.size; ++rank) {
        if (store_->check({rank_key(rank)}) && !store_->check({left_key(rank)})) return false;
      }
      return true;
    };
    try {
      while (!everybody_left() && std::chrono::steady_clock::now() < deadline) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
    } catch (const ForgedValue&) {  // NOLINT(bugprone-empty-catch): another error is being thrown
    }
  }

  const Placement placement_;
  const shm::PageAddress page_;
  const std::string gpus_;
  const StorePtr store_;
  const std::function<StorePtr()> launcher_;
  const std::string transport_;
  const bool checked_;
  const int timeout_;
  WhileWaiting while_waiting_;
  Present present_;
};

CommError lost_store(const Placement& placement) {
  return CommError(fmt::format("lost the connection to the job's store at {} (on rank 0 or in the launcher): rank 0 "
                               "failed; see its error",
                               store_name(placement)),
                   0);
}

void enter(Meeting& meeting, const Placement& placement, const shm::PageAddress& page, const std::string& gpus,
           const WorldOptions& options, Present (Room::*how)()) {
  try {
    Room room(placement, page, gpus, meeting, options);
    auto present = (room.*how)();
    meeting.prefix = std::move(present.prefix);
    meeting.failure_key = first_failure_key(placement.generation);
    meeting.peers = std::move(present.peers);
    meeting.store->set_limit(store_limit);
  } catch (const std::exception& error) {
    const bool lost =
        dynamic_cast<const StoreLost*>(&error) != nullptr || dynamic_cast<const c10::Error*>(&error) != nullptr;
    if (lost) throw lost_store(placement);
    throw;
  }
}

void connect(Meeting& meeting, Placement& placement, const WorldOptions& options) {
  const std::chrono::seconds limit(options.rendezvous_timeout_seconds);
  meeting.store = connect_store(placement.address, placement.port, options.rendezvous_timeout_seconds, placement.job);
  placement.reached = reached_address(placement.address, placement.port, limit);
  meeting.launcher = [store = meeting.store] { return store; };
}

}  // namespace

Meeting meet(Placement placement, const shm::PageAddress& page, const std::string& gpus, const WorldOptions& options) {
  Meeting meeting;
  if (placement.size == 1) {
    meeting.peers.push_back({host_identity(), this_process(), page, gpus});
    return meeting;
  }
  if (placement.rank == 0 && !placement.store_is_served) {
    const std::chrono::seconds limit(options.rendezvous_timeout_seconds);
    meeting.server = std::make_unique<StoreServer>(StorePlace(placement.address, placement.port, limit), placement.job);
  }
  connect(meeting, placement, options);
  enter(meeting, placement, page, gpus, options, &Room::enter);
  return meeting;
}

Meeting meet_in(const StorePtr& store, std::function<StorePtr()> launcher, const Placement& placement,
                const shm::PageAddress& page, const std::string& gpus, const WorldOptions& options) {
  Meeting meeting;
  meeting.store = store;
  meeting.launcher = std::move(launcher);
  enter(meeting, placement, page, gpus, options, &Room::enter);
  // Not the launcher's key: the same store may serve another world afterwards.
  meeting.failure_key = meeting.prefix + "/first_failure";
  return meeting;
}

Meeting meet_again(Placement placement, const shm::PageAddress& page, const std::string& gpus,
                   const WorldOptions& options) {
  if (placement.size == 1) throw UsageError("rejoin: the world has only one rank, so there is no job to rejoin");
  if (placement.rank == 0 && !placement.store_is_served) {
    throw UsageError(
        "rejoin: rank 0 cannot rejoin, because it held the job's store; start jobs with shoal launch, whose store "
        "outlives every rank");
  }
  Meeting meeting;
  connect(meeting, placement, options);
  enter(meeting, placement, page, gpus, options, &Room::enter_again);
  return meeting;
}

std::optional<Peer> present_peer(const Meeting& meeting, int rank) {
  const auto text = store_try_get(*meeting.store, record_key(meeting.prefix, rank));
  return text ? std::optional(from_text(*text).peer) : std::nullopt;
}

}  // namespace shoal
