#include "cli/telemetry/series.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "shoal/error.h"

namespace shoal::cli {

void Series::add(int64_t step, double value) {
  constexpr size_t most_blocks = 1000;
  constexpr double largest = 1e100;
  if (!(std::abs(value) <= largest)) {
    if (beyond_++ == 0) first_beyond_ = step;
    last_ = value;
    return;
  }
  least_ = count_ == 0 ? value : std::min(least_, value);
  most_ = count_ == 0 ? value : std::max(most_, value);
  last_ = value;
  ++count_;
  if (blocks_.empty() || blocks_.back().count == per_block_) {
    if (blocks_.size() == most_blocks) {
      for (size_t i = 0; i < most_blocks / 2; ++i) {
        const auto &a = blocks_[2 * i], &b = blocks_[2 * i + 1];
        blocks_[i] = {a.steps + b.steps, a.values + b.values, a.count + b.count};
      }
      blocks_.resize(most_blocks / 2);
      per_block_ *= 2;
    }
    blocks_.emplace_back();
  }
  auto& block = blocks_.back();
  block.steps += static_cast<double>(step);
  block.values += value;
  ++block.count;
}

std::vector<std::pair<double, double>> Series::points() const {
  std::vector<std::pair<double, double>> points;
  for (const auto& block : blocks_) {
    const auto count = static_cast<double>(block.count);
    points.emplace_back(block.steps / count, block.values / count);
  }
  std::sort(points.begin(), points.end());  // a run that went on from a checkpoint may repeat steps
  return points;
}

MetricsSeries read_series(const std::filesystem::path& metrics) {
  constexpr size_t most_names = 100, most_events = 100;
  MetricsSeries series;
  auto& all = series.by_name;
  double samples = 0, seconds = 0;
  bool own_rate = false, derived = false;
  series.damaged = read_metrics(metrics, [&](const MetricsLine& line) {
    if (!line.event.empty()) {
      ++series.event_count;
      series.events.push_back(line);
      if (series.events.size() > most_events) series.events.erase(series.events.begin());
      return;
    }
    for (const auto& [name, value] : line.numbers) {
      all[name].add(line.step, value);
      if (all.size() > most_names) {
        throw UsageError(fmt::format("{}: more than {} names of metrics", metrics.string(), most_names));
      }
    }
    const double more_samples = line.number("samples"), more_seconds = line.number("seconds");
    own_rate = own_rate || (!derived && all.contains("samples_per_second"));
    if (!own_rate && more_seconds > seconds && more_samples > samples) {
      derived = true;
      all["samples_per_second"].add(line.step, (more_samples - samples) / (more_seconds - seconds));
    }
    // A run that was resumed counts from 0 again.
    if (std::isfinite(more_seconds) && std::isfinite(more_samples)) {
      samples = more_samples;
      seconds = more_seconds;
    }
  });
  if (derived) all.erase("samples");  // the rate says it
  return series;
}

}  // namespace shoal::cli
