#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>

#include "optim/scaler_options.h"
#include "shoal/error.h"
#include "strategy/decentralized/state.h"

namespace shoal {
namespace {

constexpr int64_t most_rounds = 16;  // number of rounds whose exchanges may keep copies

}  // namespace

void DecentralizedDataParallelOptions::validate(int ranks) const {
  std::vector<std::string> faults;
  const auto positive = [&](const char* name, double value, const char* unit) {
    if (!(value > 0)) faults.push_back(fmt::format("{} is {}: give {} above 0", name, value, unit));
  };
  positive("bucket_cap_mb", bucket_cap_mb, "MiB");
  positive("neighbour_timeout_seconds", neighbour_timeout_seconds, "seconds");
  if (clip_grad < 0 || !std::isfinite(clip_grad)) {
    faults.push_back(fmt::format("clip_grad is {}: give a norm, or 0 for no clipping", clip_grad));
  }
  if (clip == ClipScope::bucket && scaler) {
    faults.emplace_back(
        "clip per bucket does not work with a scaler, because updates wait for the last gradient; use "
        "ClipScope::all_gradients");
  }
  if (topology && topology->size() != ranks) {
    faults.push_back(fmt::format("topology {} is for {} ranks, the group has {}: make_topology(name, group.size())",
                                 topology->name(), topology->size(), ranks));
  }
  if (exchange_dtype && !at::isFloatingType(*exchange_dtype)) {
    faults.push_back(fmt::format("exchange_dtype {}: give a floating-point one", toString(*exchange_dtype)));
  }
  if (exchange_dtype && topology && topology->kind() == Stochastic::column) {
    faults.emplace_back(
        "exchange_dtype is not supported for push-sum, whose weights are sent with the values and must not be rounded");
  }
  if (compressed_exchange) {
    const auto& how = *compressed_exchange;
    const auto part = [&](const char* name, const std::optional<double>& value) {
      if (value && !(*value > 0 && *value <= 1)) {
        faults.push_back(fmt::format("compressed_exchange: {} is {}: give more than 0 and at most 1", name, *value));
      }
    };
    part("top_k", how.top_k);
    part("rate", how.rate);
    if (exchange_dtype)
      faults.emplace_back("exchange_dtype and compressed_exchange exclude each other: set one of them");
    if (pre_average_hook) {
      faults.emplace_back(
          "pre_average_hook is not supported with compressed_exchange, which has no sum of neighbours' values");
    }
    if (topology && (topology->kind() != Stochastic::doubly || topology->period() > most_rounds)) {
      faults.push_back(
          fmt::format("compressed_exchange keeps copies per round: topology {} is {} stochastic with {} "
                      "rounds; give a doubly stochastic one of at most {}",
                      topology->name(), to_string(topology->kind()), topology->period(), most_rounds));
    }
  }
  if (!faults.empty()) throw UsageError(fmt::format("DecentralizedDataParallel: {}", fmt::join(faults, "; ")));
}

std::vector<std::string> describe(const DecentralizedDataParallelOptions& options) {
  const auto& compressed = options.compressed_exchange;
  const auto in_words = [](const std::optional<double>& value) { return value ? fmt::format("{}", *value) : "none"; };
  return {fmt::format("bucket_cap_mb {}", options.bucket_cap_mb),
          fmt::format("exchange_dtype {}", options.exchange_dtype ? toString(*options.exchange_dtype) : "none"),
          compressed ? fmt::format("compressed_exchange with top_k {}, rate {}", in_words(compressed->top_k),
                                   in_words(compressed->rate))
                     : "no compressed_exchange",
          fmt::format("average_buffers {}", options.average_buffers), describe(options.scaler)};
}

}  // namespace shoal
