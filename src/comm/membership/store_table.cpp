#include "comm/membership/store_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/printable.h"
#include "shoal/error.h"

namespace shoal {
namespace {

using Json = nlohmann::json;

constexpr size_t most_bytes = size_t{1} << 20;  // of the table
constexpr size_t most_why = 512;
constexpr int read_anyway = 20;  // calls of follow(): whoever changes the table may end before it says so

std::string where_key(const std::string& generation) {
  return fmt::format("shoal/{}/elastic/table", generation);
}

}  // namespace

StoreTable::StoreTable(std::shared_ptr<PatientStore> store, std::string generation, const OpenJob& job)
    : store_(std::move(store)), generation_(std::move(generation)), job_(job) {}

void StoreTable::open(const std::string& prefix) {
  const std::lock_guard lock(mutex_);
  prefix_ = prefix;
}

std::string StoreTable::prefix() const {
  const std::lock_guard lock(mutex_);
  return prefix_;
}

std::string StoreTable::key(const char* what) const {
  return fmt::format("{}/{}", prefix(), what);
}

std::string StoreTable::changes_key() const {
  return key("changes");
}

void StoreTable::make(const std::vector<Peer>& first) {
  change([&](Content& content) {
    for (size_t number = 0; number < first.size(); ++number) {
      content.entries[static_cast<int>(number)] = {State::member, first[number]};
    }
    return true;
  });
}

void StoreTable::announce() {
  store_->ask([this](DeadlineStore& store) {
    store_set(store, where_key(generation_), prefix());
    return store.check({where_key(generation_)});
  });
}

std::string StoreTable::to_text(const Content& content) {
  Json json{{"version", content.version}, {"closed", content.closed}, {"entries", Json::array()}};
  for (const auto& [number, entry] : content.entries) {
    const auto& peer = entry.peer;
    json["entries"].push_back({number, static_cast<int>(entry.state), peer.host, peer.process.pid,
                               peer.process.start_time, peer.page.descriptor, peer.page.nonce, entry.why});
  }
  return json.dump();
}

StoreTable::Content StoreTable::from_text(const std::string& text) {
  if (text.empty()) return {};
  Content content;
  try {
    if (text.size() > most_bytes) throw CommError("it is too long");
    const auto json = Json::parse(text);
    content.version = json.at("version");
    content.closed = json.at("closed").get<std::string>();
    for (const auto& one : json.at("entries")) {
      const int number = one.at(0);
      const int state = one.at(1);
      if (number < 0 || number >= most_members || state < 0 || state > static_cast<int>(State::refused)) {
        throw CommError("it has an entry that no process can have made");
      }
      auto& entry = content.entries[number];
      entry.state = static_cast<State>(state);
      entry.peer.host = one.at(2).get<std::string>();
      entry.peer.process = {one.at(3).get<int>(), one.at(4).get<uint64_t>()};
      entry.peer.page = {one.at(3).get<int>(), one.at(5).get<int>(), one.at(6).get<uint64_t>()};
      entry.why = one.at(7).get<std::string>();
    }
  } catch (const std::exception& error) {
    throw CommError(fmt::format("the table of the processes of this elastic job is damaged: {}", error.what()));
  }
  return content;
}

// A call that was given up may have been carried out: then it is as if another process had made the same change.
bool StoreTable::change(const std::function<bool(Content& content)>& edit) {
  std::string before;
  {
    const std::lock_guard lock(mutex_);
    before = text_;
  }
  bool is_new = false;  // what this process has may be old
  while (true) {
    auto content = from_text(before);
    if (!edit(content)) {
      if (std::exchange(is_new, true)) return false;
      refresh();
      const std::lock_guard lock(mutex_);
      before = text_;
      continue;
    }
    ++content.version;
    const auto text = to_text(content);
    if (text.size() > most_bytes) throw CommError("the table of the processes of this elastic job is full");
    const auto now =
        store_->ask([&](DeadlineStore& store) { return store_replace(store, key("table"), before, text); });
    adopt(now);
    if (now == text) {
      store_->ask([&](DeadlineStore& store) {
        store_set(store, key("changes"), std::to_string(content.version));
        return store.check({key("changes")});
      });
      return true;
    }
    before = now;
    is_new = true;
  }
}

void StoreTable::adopt(const std::string& text) {
  auto content = from_text(text);
  const std::lock_guard lock(mutex_);
  if (content.version < content_.version) return;  // an answer that was overtaken
  text_ = text;
  content_ = std::move(content);
}

void StoreTable::read(DeadlineStore& store) {
  if (prefix().empty()) {
    const auto where = store_try_get(store, where_key(generation_));
    if (!where) return;
    open(*where);
  }
  if (const auto text = store_try_get(store, key("table"))) adopt(*text);
}

void StoreTable::refresh() {
  store_->ask([this](DeadlineStore& store) {
    read(store);
    return true;
  });
}

bool StoreTable::follow(const std::string& changes) {
  {
    const std::lock_guard lock(mutex_);
    if (changes == changes_ && ++follows_ < read_anyway) return false;
    follows_ = 0;
  }
  const auto before = this->changes();
  read(store_->once());
  const std::lock_guard lock(mutex_);
  changes_ = changes;
  return content_.version != before;
}

void StoreTable::knock(int number, const Peer& peer) {
  if (number < first_ranks() || number >= most_members) {
    throw UsageError(fmt::format("an elastic job has at most {} processes in its life, and this is number {}",
                                 most_members, number));
  }
  change([&](Content& content) {
    const auto [entry, is_new] = content.entries.try_emplace(number, Entry{State::knocks, peer});
    if (is_new || entry->second.peer.page.nonce == peer.page.nonce) return is_new;
    throw UsageError(fmt::format("number {} of this elastic job was used before: a process joins once", number));
  });
}

StoreTable::State StoreTable::state_of(int number, State otherwise) const {
  const std::lock_guard lock(mutex_);
  const auto found = content_.entries.find(number);
  return found == content_.entries.end() ? otherwise : found->second.state;
}

bool StoreTable::withdraw(int number) {
  auto was = State::withdrawn;
  change([&](Content& content) {
    auto& entry = content.entries[number];
    was = entry.state;
    if (was == State::refused || was == State::withdrawn) return false;
    entry.state = State::withdrawn;
    return true;
  });
  return was != State::claimed;
}

bool StoreTable::claim(int number) {
  bool asks = false;
  change([&](Content& content) {
    auto& entry = content.entries[number];
    asks = entry.state == State::knocks || entry.state == State::claimed;  // by a member that has ended since
    if (entry.state != State::knocks) return false;
    entry.state = State::claimed;
    return true;
  });
  return asks;
}

void StoreTable::release(int number) {
  change([&](Content& content) {
    auto& entry = content.entries[number];
    if (entry.state != State::claimed) return false;
    entry.state = State::knocks;
    return true;
  });
}

void StoreTable::refuse(int number, const std::string& why) {
  change([&](Content& content) {
    auto& entry = content.entries[number];
    if (entry.state == State::refused) return false;
    entry.state = State::refused;
    entry.why = printable(why.substr(0, most_why));
    return true;
  });
}

void StoreTable::admitted(int number) {
  const bool changed = change([&](Content& content) {
    auto& entry = content.entries[number];
    if (entry.state != State::knocks && entry.state != State::claimed) return false;
    entry.state = State::member;
    return true;
  });
  if (!changed) return;
  store_->ask([&](DeadlineStore& store) {  // for the launcher
    store_set(store, joined_key(generation_, number), "joined");
    return store.check({joined_key(generation_, number)});
  });
}

std::vector<int> StoreTable::knocking() const {
  const std::lock_guard lock(mutex_);
  std::vector<int> list;
  for (const auto& [number, entry] : content_.entries) {
    if (entry.state == State::knocks || entry.state == State::claimed) list.push_back(number);
  }
  return list;
}

bool StoreTable::anyone_knocks() const {
  return !knocking().empty();
}

bool StoreTable::is_refused(int number) const {
  return state_of(number, State::withdrawn) == State::refused;
}

std::string StoreTable::refusal(int number) const {
  const std::lock_guard lock(mutex_);
  const auto found = content_.entries.find(number);
  return found == content_.entries.end() ? "" : found->second.why;
}

bool StoreTable::is_member(int number) const {
  return state_of(number, State::withdrawn) == State::member;
}

std::vector<Peer> StoreTable::peers() const {
  const std::lock_guard lock(mutex_);
  std::vector<Peer> list;
  if (!content_.entries.empty()) list.resize(static_cast<size_t>(content_.entries.rbegin()->first) + 1);
  for (const auto& [number, entry] : content_.entries) list[static_cast<size_t>(number)] = entry.peer;
  return list;
}

uint64_t StoreTable::changes() const {
  const std::lock_guard lock(mutex_);
  return content_.version;
}

void StoreTable::publish(const std::string& description) {
  if (description.empty()) return;
  if (description.size() > most_text) return close("the description of its training is too long");
  store_->ask([&](DeadlineStore& store) { return store_set_once(store, key("terms"), description); });
}

void StoreTable::close(const std::string& why) {
  change([&](Content& content) {
    if (!content.closed.empty()) return false;
    content.closed = printable(why.substr(0, most_why));
    return true;
  });
}

std::optional<std::string> StoreTable::description() const {
  {
    const std::lock_guard lock(mutex_);
    if (description_ || prefix_.empty()) return description_;
  }
  auto text = store_->ask([this](DeadlineStore& store) { return store_try_get(store, key("terms")); });
  if (text && text->size() > most_text) throw CommError("the description of this elastic job is too long");
  const std::lock_guard lock(mutex_);
  description_ = std::move(text);
  return description_;
}

std::string StoreTable::why_closed() const {
  const std::lock_guard lock(mutex_);
  return content_.closed;
}

}  // namespace shoal
