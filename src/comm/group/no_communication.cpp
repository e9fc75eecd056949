#include "comm/group/no_communication.h"

#include <fmt/format.h>

#include <utility>

#include "shoal/detail/call.h"
#include "shoal/error.h"

namespace shoal {
namespace {

thread_local NoCommunication* innermost = nullptr;

}  // namespace

NoCommunication::NoCommunication(std::string why) : why_(std::move(why)) {
  innermost = this;
}

NoCommunication::~NoCommunication() {
  innermost = nullptr;
}

void NoCommunication::check(const Call& call, int ranks) {
  if (innermost == nullptr || ranks == 1) return;
  innermost->broken_ = true;
  throw UsageError(fmt::format("{} {}", call.describe(), innermost->why_));
}

}  // namespace shoal
