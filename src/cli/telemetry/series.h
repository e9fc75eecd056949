#pragma once
// A metric over the steps of a run, in memory that does not grow with it.

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "cli/telemetry/metrics_file.h"

namespace shoal::cli {

// Means of neighbouring values: as long as there are few, each value; then of 2, 4, 8, ... steps. NaN and
// what is beyond 1e100 is counted and left out of them.
class Series {
 public:
  void add(int64_t step, double value);

  // Mean steps and means.
  std::vector<std::pair<double, double>> points() const;
  int64_t count() const { return count_; }
  int64_t beyond() const { return beyond_; }
  int64_t first_beyond() const { return first_beyond_; }  // the step
  double least() const { return least_; }
  double most() const { return most_; }
  double last() const { return last_; }  // NaN included
  int64_t values_per_point() const { return per_block_; }

 private:
  struct Block {
    double steps = 0, values = 0;
    int64_t count = 0;
  };

  std::vector<Block> blocks_;
  int64_t per_block_ = 1;
  int64_t count_ = 0, beyond_ = 0, first_beyond_ = 0;
  double least_ = 0, most_ = 0, last_ = 0;
};

// All series of a metrics file, by name, and the rate "samples_per_second" of its `samples` and `seconds`.
struct MetricsSeries {
  std::map<std::string, Series> by_name;
  DamagedLines damaged;
  std::vector<MetricsLine> events{};  // the last 100
  int64_t event_count = 0;
};
// UsageError as read_metrics(), and for more than 100 names.
MetricsSeries read_series(const std::filesystem::path& metrics);

}  // namespace shoal::cli
