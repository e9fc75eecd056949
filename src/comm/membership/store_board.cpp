#include "comm/membership/store_board.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <sstream>
#include <utility>

#include "base/printable.h"
#include "base/start_thread.h"
#include "base/without_signals.h"
#include "comm/store/authenticated_store.h"
#include "shoal/detail/clock.h"
#include "shoal/error.h"

namespace shoal {
namespace {

constexpr std::chrono::milliseconds longest_beat(1000);
constexpr size_t entry_bytes = sizeof(shm::Notice::Words) + most_board_members / 8;

}  // namespace

StoreBoard::StoreBoard(StoreBoardOptions options, int self, const std::vector<std::string>& hosts,
                       std::function<bool(int member)> ended, std::function<void()> noticed)
    : options_(std::move(options)),
      self_(self),
      host_(hosts[static_cast<size_t>(self)]),
      noticed_(std::move(noticed)),
      reached_(options_.store->silence()),
      ended_(std::move(ended)) {
  add(hosts);
  learn_others();
  show({});
  if (!options_.joins) await_all();
  hear();
  const WithoutSignals in_the_thread;
  thread_ = start_thread("tells the other hosts of this one", [this] { run(); });
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

void StoreBoard::add(const std::vector<std::string>& hosts) {
  for (size_t member = 0; member < hosts.size(); ++member) {
    if (hosts[member].empty() || seen_[member] != nullptr) continue;
    kept_.push_back(std::make_unique<Seen>(hosts[member], hosts[member] != host_));
    seen_[member] = kept_.back().get();
  }
  used_ = std::max(used_.load(), static_cast<int>(hosts.size()));
}

void StoreBoard::grow(const std::vector<std::string>& hosts, std::function<bool(int member)> ended) {
  const std::lock_guard lock(mutex_);
  ended_ = std::move(ended);
  add(hosts);
}

void StoreBoard::learn_others() {
  bool any = false;
  for (int member = 0; member < used_; ++member) {
    if (!has(member) || std::find(others_.begin(), others_.end(), member) != others_.end()) continue;
    others_.push_back(member);
    any = true;
  }
  if (!any && !polled_.empty()) return;
  polled_.clear();
  for (const int member : others_) {
    polled_.push_back(key("beat", member));
    heard_.emplace(at(member).host, Patience(options_.store->silence(), 5 * interval()));
  }
  if (options_.table) polled_.push_back(options_.table->changes_key());
}

// A store serves one call at a time, so that more members that live look less often.
std::chrono::milliseconds StoreBoard::interval() const {
  int living = 0;
  for (int member = 0; member < used_; ++member) living += gone(member) ? 0 : 1;
  return std::max(std::chrono::milliseconds(50), std::chrono::milliseconds(2 * living));
}

std::string StoreBoard::key(const char* what, int member) const {
  return fmt::format("{}/{}/{}", options_.prefix, what, member);
}

void StoreBoard::await_all() {
  const auto deadline = Clock::now() + options_.timeout;
  const auto all_are_there = [this](DeadlineStore& store) { return store.check(polled_); };
  while (!options_.store->ask(all_are_there)) {
    if (Clock::now() > deadline) {
      throw CommError(fmt::format("not all ranks have constructed Elastic within {} s", options_.timeout.count()));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

void StoreBoard::show(const shm::Notice::Words& words) {
  options_.store->ask([&](DeadlineStore&) {
    const std::lock_guard lock(own_.mutex);
    own_.entry.words = words;
    own_.unwritten = true;
    write();
    return true;
  });
}

// A decision follows one that has passed, so one key is enough for all of a generation. A call that was given up may
// have been carried out, and is then answered as any later one.
bool StoreBoard::decide(uint64_t generation, int64_t number, bool passes) {
  const auto passed = [](int64_t decision) { return fmt::format("{} passed", decision); };
  const auto failed = fmt::format("{} failed", number);
  const auto before = number > 1 ? passed(number - 1) : "";
  const auto now = options_.store->ask([&](DeadlineStore& store) {
    return store_replace(store, fmt::format("{}/decision/{}", options_.prefix, generation), before,
                         passes ? passed(number) : failed);
  });
  if (now == passed(number)) return true;
  if (now == failed) return false;
  throw CommError(fmt::format("decision {} of generation {} was asked for out of turn: the store has '{}'", number,
                              generation, printable(now)));
}

bool StoreBoard::end(int member) {
  if (!overdue_.insert(member).second) return false;
  options_.store->ask([&](DeadlineStore& store) {
    const auto list = overdue_key(options_.generation);
    while (true) {
      const auto before = store_try_get(store, list).value_or("");
      std::istringstream in(before);
      for (int other = 0; in >> other;) {
        if (other == member) return true;
      }
      const auto after = fmt::format("{}{} ", before, member);
      if (store_replace(store, list, before, after) == after) return true;
    }
  });
  return true;
}

// The entry before the beat that announces it. The last call has an answer, so the store has both.
void StoreBoard::write() {
  std::string text(entry_bytes, '\0');
  std::memcpy(text.data(), own_.entry.words.data(), sizeof own_.entry.words);
  std::memcpy(text.data() + sizeof own_.entry.words, own_.entry.ended.data(), sizeof own_.entry.ended);
  auto& store = options_.store->once();
  store_set(store, key("entry", self_), text);
  store_set(store, key("beat", self_), fmt::format("{} {}", own_.beats, ++own_.changes));
  store.check({key("beat", self_)});
  own_.unwritten = false;
}

std::chrono::milliseconds StoreBoard::beat_every() const {
  return std::min(longest_beat, options_.store->silence() / 5);
}

void StoreBoard::run() {
  auto next_beat = Clock::now();
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, interval(), [this] { return stop_; }) && !is_lost()) {
    lock.unlock();
    bool changed = false;
    try {
      learn_others();
      changed = tell();
      if (Clock::now() >= next_beat) {
        next_beat = Clock::now() + beat_every();
        const std::lock_guard writes(own_.mutex);
        store_set(options_.store->once(), key("beat", self_), fmt::format("{} {}", ++own_.beats, own_.changes));
      }
      changed = hear() || changed;
      changed = ask_launchers() || changed;
      changed = look_for_silence() || changed;
      reached_.restart();
    } catch (const StoreUnreachable& error) {
      if (reached_.over()) options_.store->lose(error.what());
    } catch (const std::exception& error) {
      options_.store->lose(error.what());
    }
    if (changed || is_lost()) noticed_();
    lock.lock();
  }
}

std::vector<int> StoreBoard::of_this_host() const {
  std::vector<int> list;
  for (int member = 0; member < used_; ++member) {
    if (const auto* seen = find(member); seen != nullptr && !seen->is_elsewhere && member != self_)
      list.push_back(member);
  }
  return list;
}

// Of this host's members, who has ended. What they have written last is read once they cannot write any more, so that
// all members see the same of them.
bool StoreBoard::tell() {
  std::function<bool(int)> ended;
  {
    const std::lock_guard lock(mutex_);
    ended = ended_;
  }
  bool found = false;
  const auto neighbours = of_this_host();
  for (const int member : neighbours) {
    if (gone(member) || !ended(member)) continue;
    take(member, read_last(member), /*ended=*/true);
    found = true;
  }
  const std::lock_guard lock(own_.mutex);
  const auto before = own_.entry.ended;
  for (const int member : neighbours) {
    if (gone(member)) own_.entry.ended[static_cast<size_t>(member) / 64] |= uint64_t{1} << (member % 64);
  }
  if (own_.entry.ended != before) own_.unwritten = true;
  if (own_.unwritten) write();
  return found;
}

// Whether anything is new. An entry that could not be read is read the next time.
bool StoreBoard::hear() {
  if (polled_.empty()) return false;
  const auto values = options_.store->once().multiGet(polled_);
  bool any = false;
  for (size_t i = 0; i < others_.size(); ++i) {
    const int member = others_[i];
    auto& seen = at(member);
    const std::string beat(values[i].begin(), values[i].end());
    if (std::exchange(seen.beat, beat) != beat) {
      seen.moved = Clock::now();
      heard_.at(seen.host).restart();
    }
    std::istringstream in(beat);
    uint64_t count = 0;
    uint64_t changes = 0;
    if (!(in >> count >> changes)) throw CommError(fmt::format("it has no beat of rank {}", member));
    if (changes == seen.changes || gone(member)) continue;
    const auto entry = read(member);
    take(member, entry, /*ended=*/false);
    for (const int other : others_) {
      if (at(other).host != seen.host || gone(other) || !entry.tells_of(other)) continue;
      take(other, read_last(other), /*ended=*/true);
    }
    seen.changes = changes;
    any = true;
  }
  if (options_.table) any = options_.table->follow({values.back().begin(), values.back().end()}) || any;
  return any;
}

// Of the last members of a host only its launcher can tell that they have ended.
bool StoreBoard::ask_launchers() {
  bool changed = false;
  for (const int member : others_) {
    const bool alone = std::none_of(others_.begin(), others_.end(), [&](int other) {
      return other != member && at(other).host == at(member).host && !gone(other);
    });
    const bool quiet = Clock::now() - at(member).moved > 2 * beat_every();
    if (gone(member) || !(alone || quiet) || !has_ended(member)) continue;
    take(member, read_last(member), /*ended=*/true);
    changed = true;
  }
  return changed;
}

bool StoreBoard::has_ended(int member) const {
  try {
    return store_try_get(options_.store->once(), ended_key(options_.generation, member)).has_value();
  } catch (const ForgedValue&) {
    return false;
  }
}

StoreBoard::Read StoreBoard::read(int member) const {
  const auto text = store_try_get(options_.store->once(), key("entry", member));
  if (!text) throw CommError(fmt::format("it has no entry of rank {}", member));
  return parsed(*text, member);
}

// Of a member that has ended. What the first reader finds counts for all, as something may still be on its way to the
// store.
StoreBoard::Read StoreBoard::read_last(int member) const {
  const auto text = store_try_get(options_.store->once(), key("entry", member));
  const auto first =
      store_set_once(options_.store->once(), key("last", member), text.value_or(std::string(entry_bytes, '\0')));
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
  auto& seen = at(member);
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
      if (at(member).host != name) continue;
      changed = at(member).silent.exchange(silent) != silent || changed;
    }
  }
  return changed;
}

std::vector<bool> StoreBoard::silent_members() const {
  const std::lock_guard lock(mutex_);
  std::vector<bool> list;
  for (int member = 0; member < used_; ++member) list.push_back(silent(member));
  return list;
}

shm::Notice::Words StoreBoard::words(int member) const {
  const std::lock_guard lock(mutex_);
  const auto* seen = find(member);
  return seen != nullptr ? seen->words : shm::Notice::Words{};
}

}  // namespace shoal
