#include "comm/membership/store_board.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <sstream>
#include <utility>

#include "base/printable.h"
#include "base/without_signals.h"
#include "comm/store/authenticated_store.h"
#include "shoal/error.h"

namespace shoal {
namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds longest_beat(1000);
constexpr size_t entry_bytes = sizeof(Notice::Words) + most_board_members / 8;

// A store serves one call at a time, so that more members look less often.
std::chrono::milliseconds interval(size_t members) {
  return std::max(std::chrono::milliseconds(50), std::chrono::milliseconds(2 * members));
}

}  // namespace

StoreBoard::StoreBoard(StoreBoardOptions options, int self, std::vector<std::string> hosts,
                       std::function<bool(int member)> ended, std::function<void()> noticed)
    : options_(std::move(options)),
      self_(self),
      hosts_(std::move(hosts)),
      ended_(std::move(ended)),
      noticed_(std::move(noticed)),
      seen_(hosts_.size()),
      reached_(options_.silence) {
  for (int member = 0; member < static_cast<int>(hosts_.size()); ++member) {
    if (!has(member)) continue;
    others_.push_back(member);
    beats_of_others_.push_back(key("beat", member));
    heard_.emplace(host(member), Patience(options_.silence, 5 * interval(hosts_.size())));
  }
  show({});
  await_all();
  hear();
  const WithoutSignals in_the_thread;
  thread_ = std::thread([this] { run(); });
}

StoreBoard::~StoreBoard() {
  stop();
}

void StoreBoard::stop() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

std::string StoreBoard::key(const char* what, int member) const {
  return fmt::format("{}/{}/{}", options_.prefix, what, member);
}

void StoreBoard::await_all() {
  const auto deadline = SteadyClock::now() + options_.timeout;
  while (!options_.store->check(beats_of_others_)) {
    if (SteadyClock::now() > deadline) {
      throw CommError(fmt::format("not all ranks have constructed Elastic within {} s", options_.timeout.count()));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

template <class Act>
auto StoreBoard::ask(const Act& act) {
  Patience patience(options_.silence, std::chrono::seconds(5));  // a call that is given up takes seconds
  while (true) {
    if (lost_) throw CommError(why_lost());
    try {
      return act();
    } catch (const StoreUnreachable& error) {
      if (patience.over()) lose(error.what());
    } catch (const std::exception& error) {
      lose(error.what());
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}

void StoreBoard::show(const Notice::Words& words) {
  ask([&] {
    const std::lock_guard lock(write_mutex_);
    own_.words = words;
    unwritten_ = true;
    write();
  });
}

// A decision follows one that has passed, so one key is enough for all of a generation. A call that was given up may have been
// carried out, and is then answered as any later one.
bool StoreBoard::decide(uint64_t generation, int64_t number, bool passes) {
  const auto passed = [](int64_t decision) { return fmt::format("{} passed", decision); };
  const auto failed = fmt::format("{} failed", number);
  const auto before = number > 1 ? passed(number - 1) : "";
  const auto now = ask([&] {
    return store_replace(*options_.store, fmt::format("{}/decision/{}", options_.prefix, generation), before,
                         passes ? passed(number) : failed);
  });
  if (now == passed(number)) return true;
  if (now == failed) return false;
  throw CommError(fmt::format("decision {} of generation {} was asked for out of turn: the store has '{}'", number,
                              generation, printable(now)));
}

// The entry before the beat that announces it. The last call has an answer, so the store has both.
void StoreBoard::write() {
  std::string text(entry_bytes, '\0');
  std::memcpy(text.data(), own_.words.data(), sizeof own_.words);
  std::memcpy(text.data() + sizeof own_.words, own_.ended.data(), sizeof own_.ended);
  store_set(*options_.store, key("entry", self_), text);
  store_set(*options_.store, key("beat", self_), fmt::format("{} {}", beats_, ++changes_));
  options_.store->check({key("beat", self_)});
  unwritten_ = false;
}

std::chrono::milliseconds StoreBoard::beat_every() const {
  return std::min(longest_beat, options_.silence / 5);
}

void StoreBoard::run() {
  const auto every = interval(hosts_.size());
  auto next_beat = SteadyClock::now();
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, every, [this] { return stop_; }) && !lost_) {
    lock.unlock();
    bool changed = false;
    try {
      changed = tell();
      if (SteadyClock::now() >= next_beat) {
        next_beat = SteadyClock::now() + beat_every();
        const std::lock_guard writes(write_mutex_);
        store_set(*options_.store, key("beat", self_), fmt::format("{} {}", ++beats_, changes_));
      }
      changed = hear() || changed;
      changed = ask_launchers() || changed;
      changed = look_for_silence() || changed;
      reached_.restart();
    } catch (const StoreUnreachable& error) {
      if (reached_.over()) lose(error.what());
    } catch (const std::exception& error) {
      lose(error.what());
    }
    if (changed || lost_) noticed_();
    lock.lock();
  }
}

// Of this host's members, who has ended. What they have written last is read once they cannot write any more, so that all
// members see the same of them.
bool StoreBoard::tell() {
  bool found = false;
  for (int member = 0; member < static_cast<int>(hosts_.size()); ++member) {
    if (member == self_ || has(member) || gone(member) || !ended_(member)) continue;
    take(member, read_last(member), /*ended=*/true);
    found = true;
  }
  const std::lock_guard lock(write_mutex_);
  const auto before = own_.ended;
  for (int member = 0; member < static_cast<int>(hosts_.size()); ++member) {
    if (member != self_ && !has(member) && gone(member))
      own_.ended[static_cast<size_t>(member) / 64] |= uint64_t{1} << (member % 64);
  }
  if (own_.ended != before) unwritten_ = true;
  if (unwritten_) write();
  return found;
}

// Whether anything is new. An entry that could not be read is read the next time.
bool StoreBoard::hear() {
  const auto beats = options_.store->multiGet(beats_of_others_);
  bool any = false;
  for (size_t i = 0; i < others_.size(); ++i) {
    const int member = others_[i];
    auto& seen = seen_[static_cast<size_t>(member)];
    const std::string beat(beats[i].begin(), beats[i].end());
    if (std::exchange(seen.beat, beat) != beat) {
      seen.moved = SteadyClock::now();
      heard_.at(host(member)).restart();
    }
    std::istringstream in(beat);
    uint64_t count = 0;
    uint64_t changes = 0;
    if (!(in >> count >> changes)) throw CommError(fmt::format("it has no beat of rank {}", member));
    if (changes == seen.changes || gone(member)) continue;
    const auto entry = read(member);
    take(member, entry, /*ended=*/false);
    for (const int other : others_) {
      if (host(other) != host(member) || gone(other) || !entry.tells_of(other)) continue;
      take(other, read_last(other), /*ended=*/true);
    }
    seen.changes = changes;
    any = true;
  }
  return any;
}

// Of the last members of a host only its launcher can tell that they have ended.
bool StoreBoard::ask_launchers() {
  bool changed = false;
  for (const int member : others_) {
    const bool alone = std::none_of(others_.begin(), others_.end(), [&](int other) {
      return other != member && host(other) == host(member) && !gone(other);
    });
    const bool quiet = SteadyClock::now() - seen_[static_cast<size_t>(member)].moved > 2 * beat_every();
    if (gone(member) || !(alone || quiet) || !has_ended(member)) continue;
    take(member, read_last(member), /*ended=*/true);
    changed = true;
  }
  return changed;
}

bool StoreBoard::has_ended(int member) const {
  try {
    return store_try_get(*options_.store, ended_key(options_.generation, member)).has_value();
  } catch (const ForgedValue&) {
    return false;
  }
}

StoreBoard::Read StoreBoard::read(int member) const {
  const auto text = store_try_get(*options_.store, key("entry", member));
  if (!text) throw CommError(fmt::format("it has no entry of rank {}", member));
  return parsed(*text, member);
}

// Of a member that has ended. What the first reader finds counts for all, as something may still be on its way to the store.
StoreBoard::Read StoreBoard::read_last(int member) const {
  const auto text = store_try_get(*options_.store, key("entry", member));
  const auto first =
      store_set_once(*options_.store, key("last", member), text.value_or(std::string(entry_bytes, '\0')));
  return parsed(first, member);
}

StoreBoard::Read StoreBoard::parsed(const std::string& text, int member) {
  if (text.size() != entry_bytes) throw CommError(fmt::format("it has no entry of rank {}", member));
  Read entry;
  std::memcpy(entry.words.data(), text.data(), sizeof entry.words);
  std::memcpy(entry.ended.data(), text.data() + sizeof entry.words, sizeof entry.ended);
  return entry;
}

// `gone` last: whoever sees it sees the last words as well.
void StoreBoard::take(int member, const Read& entry, bool ended) {
  auto& seen = seen_[static_cast<size_t>(member)];
  const std::lock_guard lock(mutex_);
  seen.words = entry.words;
  seen.number = card_number(entry.words);
  seen.left = has_left(entry.words);
  if (ended) seen.gone = true;
}

// For all members of a host at once: whoever took some of them for silent would go on with the others.
bool StoreBoard::look_for_silence() {
  bool changed = false;
  const std::lock_guard lock(mutex_);
  for (auto& [name, patience] : heard_) {
    const bool silent = patience.over();
    for (const int member : others_) {
      if (host(member) != name) continue;
      changed = seen_[static_cast<size_t>(member)].silent.exchange(silent) != silent || changed;
    }
  }
  return changed;
}

std::vector<bool> StoreBoard::silent_members() const {
  const std::lock_guard lock(mutex_);
  std::vector<bool> silent;
  for (const auto& seen : seen_) silent.push_back(seen.silent);
  return silent;
}

Notice::Words StoreBoard::words(int member) const {
  const std::lock_guard lock(mutex_);
  return seen_[static_cast<size_t>(member)].words;
}

void StoreBoard::lose(const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (lost_) return;
  why_lost_ = fmt::format("the ranks of an elastic job on several hosts agree through its store, which is lost: {}",
                          printable(why.substr(0, why.find('\n'))));
  lost_ = true;
}

std::string StoreBoard::why_lost() const {
  const std::lock_guard lock(mutex_);
  return why_lost_;
}

}  // namespace shoal
