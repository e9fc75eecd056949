#include "comm/store/authenticated_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "base/printable.h"
#include "shoal/detail/clock.h"

namespace shoal {
namespace {

constexpr std::chrono::seconds time_to_overwrite(5);

std::string_view view_of(const std::vector<uint8_t>& value) {
  return {reinterpret_cast<const char*>(value.data()), value.size()};
}

}  // namespace

ForgedValue forgery_of(const std::string& key) {
  return ForgedValue(
      fmt::format("the value of '{}' in the job's store was not written by a process of this job: another program has "
                  "put it there, or a rank has another SHOAL_SECRET or SHOAL_JOB_ID (see SECURITY.md)",
                  printable(key)));
}

AuthenticatedStore::AuthenticatedStore(c10::intrusive_ptr<c10d::Store> store, JobIdentity identity)
    : store_(std::move(store)), identity_(std::move(identity)) {}

std::vector<uint8_t> AuthenticatedStore::sealed(const std::string& key, const std::vector<uint8_t>& value) const {
  const auto mac = identity_.mac("store", {key, view_of(value)});
  auto whole = value;
  whole.insert(whole.end(), mac.begin(), mac.end());
  return whole;
}

std::optional<std::vector<uint8_t>> AuthenticatedStore::opened(const std::string& key,
                                                               std::vector<uint8_t> value) const {
  Mac mac;
  if (value.size() < mac.size()) return std::nullopt;
  std::copy(value.end() - mac.size(), value.end(), mac.begin());
  value.resize(value.size() - mac.size());
  if (!same(mac, identity_.mac("store", {key, view_of(value)}))) return std::nullopt;
  return value;
}

bool AuthenticatedStore::genuine(const std::string& key, std::vector<uint8_t> value) {
  const bool good = opened(key, std::move(value)).has_value();
  const std::lock_guard lock(mutex_);
  if (good) {
    forged_since_.erase(key);
  } else if (Clock::now() - forged_since_.try_emplace(key, Clock::now()).first->second > time_to_overwrite) {
    throw forgery_of(key);
  }
  return good;
}

c10::intrusive_ptr<c10d::Store> AuthenticatedStore::clone() {
  return c10::make_intrusive<AuthenticatedStore>(store_->clone(), identity_);
}

void AuthenticatedStore::set(const std::string& key, const std::vector<uint8_t>& value) {
  store_->set(key, sealed(key, value));
}

std::vector<uint8_t> AuthenticatedStore::compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                                    const std::vector<uint8_t>& desired) {
  // c10d treats an empty value as absent, and returns `expected` if the key is absent.
  const auto before = expected.empty() ? expected : sealed(key, expected);
  const auto now = store_->compareSet(key, before, sealed(key, desired));
  if (now == before) return expected;
  auto value = opened(key, now);
  if (!value) throw forgery_of(key);
  return *value;
}

std::vector<uint8_t> AuthenticatedStore::get(const std::string& key) {
  auto value = opened(key, store_->get(key));
  if (!value) throw forgery_of(key);
  return *value;
}

int64_t AuthenticatedStore::add(const std::string& key, int64_t value) {
  return store_->add(key, value);
}

bool AuthenticatedStore::deleteKey(const std::string& key) {
  return store_->deleteKey(key);
}

std::vector<std::vector<uint8_t>> AuthenticatedStore::multiGet(const std::vector<std::string>& keys) {
  auto values = store_->multiGet(keys);
  for (size_t i = 0; i < keys.size(); ++i) {
    auto value = opened(keys[i], std::move(values[i]));
    if (!value) throw forgery_of(keys[i]);
    values[i] = std::move(*value);
  }
  return values;
}

bool AuthenticatedStore::check(const std::vector<std::string>& keys) {
  if (!store_->check(keys)) return false;
  auto values = store_->multiGet(keys);
  for (size_t i = 0; i < keys.size(); ++i) {
    if (!genuine(keys[i], std::move(values[i]))) return false;
  }
  return true;
}

int64_t AuthenticatedStore::getNumKeys() {
  return store_->getNumKeys();
}

void AuthenticatedStore::wait(const std::vector<std::string>& keys) {
  wait(keys, getTimeout());
}

void AuthenticatedStore::wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) {
  store_->wait(keys, timeout);
  multiGet(keys);
}

c10::intrusive_ptr<c10d::Store> authenticated(c10::intrusive_ptr<c10d::Store> store, const JobIdentity& identity) {
  if (!identity.has_secret()) return store;
  return c10::make_intrusive<AuthenticatedStore>(std::move(store), identity);
}

}  // namespace shoal
