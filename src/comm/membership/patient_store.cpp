#include "comm/membership/patient_store.h"

#include <fmt/format.h>

#include "base/environment.h"
#include "base/printable.h"
#include "comm/rendezvous/launch_environment.h"

namespace shoal {

void PatientStore::lose(const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (lost_) return;
  why_lost_ = fmt::format("the ranks of an elastic job on several hosts agree through its store, which is lost: {}",
                          printable(why.substr(0, why.find('\n'))));
  lost_ = true;
}

std::string PatientStore::why_lost() const {
  const std::lock_guard lock(mutex_);
  return why_lost_;
}

StorePtr connect_to_job(const Placement& placement, int timeout_seconds) {
  if (placement.port == 0) {
    throw UsageError(
        "Elastic over several hosts needs a TCPStore (init_method env:// or tcp://): this rank cannot connect to the "
        "program's store once more");
  }
  auto store = connect_store(placement.address, placement.port, timeout_seconds, placement.job);
  store->set_limit(store_limit);
  return store;
}

void report_lost(int rank, const std::string& why) {
  try {
    const auto place = find_placement({}, process_environment());
    if (!place.store_is_served || place.rank != rank) return;  // this world is not the launcher's
    store_set_once(*connect_to_job(place, static_cast<int>(store_limit.count())), lost_key(place.generation), why);
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the launcher may have ended
  }
}

}  // namespace shoal
