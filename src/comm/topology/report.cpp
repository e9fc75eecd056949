// Convergence report of a topology.

#include <fmt/format.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>

#include "shoal/error.h"
#include "shoal/topology.h"

namespace shoal {
namespace {

constexpr double thousandth = 1e-3;
// Below this factor a round counts as making differences vanish, up to rounding.
constexpr double vanished = 1e-12;

// Remaining differences between ranks: (I - J/n) W .. W (I - J/n), float64 [n, n].
class Differences {
 public:
  explicit Differences(int size) : size_(size), values_(at::eye(size, at::kDouble)) { remove_mean(); }
  Differences(int size, at::Tensor values) : size_(size), values_(std::move(values)) {}

  void apply(const MixingRound& round) {
    const auto before = values_;
    values_ = at::empty_like(before);
    const double* from = before.data_ptr<double>();
    double* to = values_.data_ptr<double>();
    const auto row = [this](auto* matrix, int rank) { return matrix + static_cast<int64_t>(rank) * size_; };
    for (int rank = 0; rank < size_; ++rank) {
      for (int i = 0; i < size_; ++i) row(to, rank)[i] = round.self(rank) * row(from, rank)[i];
      for (const auto& source : round.sources(rank)) {
        for (int i = 0; i < size_; ++i) row(to, rank)[i] += source.weight * row(from, source.rank)[i];
      }
    }
    remove_mean();
    const double norm_before = at::norm(before).item<double>();
    if (norm() <= vanished * norm_before) values_.zero_();
  }

  double norm() const { return at::norm(values_).item<double>(); }
  // ||D||_F / ||I - J/n||_F
  double distance() const { return size_ > 1 ? norm() / std::sqrt(size_ - 1.0) : 0; }
  const at::Tensor& values() const { return values_; }

 private:
  // Repeated in every round, because rounding would bring the mean back.
  void remove_mean() { values_ -= values_.mean(0, /*keepdim=*/true); }

  int size_;
  at::Tensor values_;
};

// Steps until the distance is a thousandth: whole periods by powers of `period`, the rest round by round.
std::optional<int64_t> find_thousandth(const Topology& topology, const at::Tensor& period) {
  constexpr size_t most_powers = 40;  // a limit, because weights can be so small that nothing ever changes
  const int size = topology.size();
  const auto near = [size](const at::Tensor& values) { return Differences(size, values).distance() <= thousandth; };
  std::vector<at::Tensor> powers{period};
  while (!near(powers.back())) {
    if (powers.size() == most_powers) return std::nullopt;
    powers.push_back(at::mm(powers.back(), powers.back()));
  }
  auto reached = Differences(size).values();
  int64_t steps = 0;
  for (auto exponent = static_cast<int64_t>(powers.size()) - 1; exponent >= 0; --exponent) {
    auto further = at::mm(powers[exponent], reached);
    if (near(further)) continue;
    reached = further;
    steps += topology.period() << exponent;
  }
  Differences left(size, reached);
  while (left.distance() > thousandth) left.apply(topology.round(steps++));
  return steps;
}

void count_messages(const Topology& topology, TopologyReport& report) {
  int64_t messages = 0;
  for (int64_t index = 0; index < topology.period(); ++index) {
    for (int rank = 0; rank < topology.size(); ++rank) {
      const auto sent = static_cast<int>(topology.round(index).targets(rank).size());
      messages += sent;
      report.most_sent = std::max(report.most_sent, sent);
    }
  }
  report.mean_sent = static_cast<double>(messages) / static_cast<double>(topology.period() * topology.size());
}

}  // namespace

TopologyReport Topology::report() const {
  constexpr int64_t shown = 100;    // steps
  constexpr int64_t looked_at = 2;  // periods, for an exact agreement
  constexpr int64_t most_ranks = 1024;
  constexpr int64_t most_work = int64_t{1} << 30;  // a minute
  if (size_ > most_ranks || int64_t{size_} * size_ * period() > most_work) {
    throw UsageError(
        fmt::format("topology {}: {} ranks and {} rounds are too many for a report: at most {} ranks, and {} "
                    "for ranks x ranks x rounds",
                    name_, size_, period(), most_ranks, most_work));
  }
  TopologyReport report;
  count_messages(*this, report);
  Differences left(size_);
  at::Tensor after_period;
  for (int64_t step = 0; step <= looked_at * period() || step <= shown; ++step) {
    if (step == period()) after_period = left.values();
    const double distance = left.distance();
    const bool was_near = !report.distance.empty() && report.distance.back() <= thousandth;
    if (step <= shown && !was_near) report.distance.push_back(distance);
    if (distance == 0) {
      report.exact_after = step;
      break;
    }
    left.apply(round(step));
  }
  // All ranks agree exactly within the period.
  if (!after_period.defined()) after_period = at::zeros({size_, size_}, at::kDouble);
  const double largest = at::linalg_eigvals(after_period).abs().max().item<double>();
  const double rate = report.exact_after ? 0 : largest;
  report.step_contraction = std::pow(rate, 1.0 / static_cast<double>(period()));
  report.period_contraction =
      kind_ == Stochastic::doubly ? at::linalg_svdvals(after_period).max().item<double>() : rate;
  report.spectral_gap = 1 - report.period_contraction;
  report.steps_to_thousandth = find_thousandth(*this, after_period);
  return report;
}

}  // namespace shoal
