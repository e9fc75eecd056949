#include "checkpoint/saving/save_orders.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>

#include "checkpoint/on_all_ranks.h"
#include "checkpoint/saving/snapshot.h"
#include "comm/group/text.h"
#include "shoal/error.h"

namespace shoal {
namespace {

constexpr const char* orders_subject = "checkpoint";

// All-gathers one number per rank.
std::vector<int64_t> gathered(const Group& group, int64_t own) {
  auto all = at::empty({group.size()}, at::kLong);
  group.all_gather(all, at::full({1}, own, at::kLong), {-1, -1, orders_subject}).wait();
  return {all.data_ptr<int64_t>(), all.data_ptr<int64_t>() + group.size()};
}

std::string checked_offer(const CheckpointContents& contents) {
  if (contents.step < 0) throw UsageError(fmt::format("checkpoint: step {} is negative", contents.step));
  if (!contents.rank_state.is_object() || !contents.global_state.is_object()) {
    throw UsageError("checkpoint: rank_state and global_state must be JSON objects");
  }
  return offer_text(contents.slices);
}

void make_orders(SaveOrders& orders, const Group& group) {
  const auto offers = gather_text(group, orders.offer, 0, {-1, -1, orders_subject});
  nlohmann::json writes;
  on_all_ranks(group, orders_subject, [&] {
    if (group.rank() != 0) return;
    orders.plan = plan_slices(offers);
    writes = orders.plan.writes;
  });
  writes = nlohmann::json::parse(broadcast_text(group, writes.dump(), 0, {-1, -1, orders_subject}));
  orders.writes = writes[group.rank()].get<std::vector<size_t>>();
}

}  // namespace

std::shared_ptr<const SaveOrders> orders_for(const Group& group, const CheckpointContents& contents,
                                             std::shared_ptr<const SaveOrders> last) {
  auto orders = std::make_shared<SaveOrders>();
  std::exception_ptr fault;
  try {
    orders->offer = checked_offer(contents);
  } catch (const std::exception&) {
    fault = std::current_exception();
  }
  const bool holds = !fault && last && last->offer == orders->offer;
  const auto all = gathered(group, holds ? 1 : 0);
  if (std::count(all.begin(), all.end(), 0) == 0) return last;
  on_all_ranks(group, orders_subject, [&] {
    if (fault) std::rethrow_exception(fault);
  });
  make_orders(*orders, group);
  int64_t bytes = 0;
  for (const auto number : orders->writes) bytes += snapshot_bytes(contents.slices[number].values);
  orders->copied_bytes = gathered(group, bytes);
  return orders;
}

}  // namespace shoal
