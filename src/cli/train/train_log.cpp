#include "cli/train/train_log.h"

#include <fmt/format.h>

#include <utility>

#include "base/print_to_stderr.h"
#include "cli/train/exchanges.h"

namespace shoal::cli {
namespace {

nlohmann::ordered_json metrics_of(int64_t number, const TrainResult& result, const TrainingCore& training,
                                  bool sampled) {
  nlohmann::ordered_json line{{"step", number},
                              {"seconds", result.seconds},
                              {"loss", result.loss.back()},
                              {"lr", result.lr.back()},
                              {"step_ms", result.step_ms.back()},
                              {"wait_ms", result.wait_ms.back()},
                              {"update_ms", result.update_ms.back()},
                              {"samples", result.all_samples}};
  if (!sampled) return line;
  if (const auto logging = training.logging_data()) {
    line["forward_ms"] = logging->last.forward;
    line["backward_ms"] = logging->last.backward;
    line["communication_ms"] = logging->last.communication;
    line["overlap_ms"] = logging->last.overlap;
  }
  return line;
}

}  // namespace

TrainLog::TrainLog(Metrics metrics, int64_t steps, double samples_per_step, bool reports)
    : reports_(reports),
      metrics_(std::move(metrics)),
      progress_(steps, {.enabled = reports, .unit = "samples", .unit_scale = samples_per_step}) {}

void TrainLog::report(bool reports) {
  if (reports_ == reports) return;
  reports_ = reports;
  reports_ ? metrics_.take_over() : metrics_.hand_over();
  progress_.enable(reports_);
}

void TrainLog::step(int64_t number, const TrainResult& result, const TrainingCore& training, bool sampled) {
  if (metrics_.wanted()) metrics_.write(metrics_of(number, result, training, sampled));
  const auto loss = result.loss.back();
  smooth_loss_ = smooth_loss_ ? 0.95 * *smooth_loss_ + 0.05 * loss : loss;
  const auto missed = missed_exchanges(training);
  progress_.update(1, fmt::format("loss {:.4f}{}{}", *smooth_loss_, missed.empty() ? "" : "  ", missed));
}

void TrainLog::evaluation(int64_t number, const TrainResult& result) {
  const auto& evaluation = result.eval.back();
  nlohmann::ordered_json line{{"step", number},
                              {"eval_loss", evaluation.loss},
                              {"eval_accuracy", evaluation.accuracy},
                              {"eval_count", evaluation.count}};
  for (const auto& [name, value] : result.figures) line[name] = value;
  metrics_.write(line);
}

void TrainLog::change(const std::string& text, const nlohmann::ordered_json& metrics) {
  say(text);
  if (metrics_.wanted()) metrics_.write(metrics);
}

void TrainLog::say(const std::string& text) const {
  if (reports_) print_to_stderr("{}\n", text);
}

void TrainLog::tell_fault() const {
  if (const auto& fault = metrics_.fault(); !fault.empty()) say("shoal: " + fault);
}

std::string evaluation_text(int64_t epoch, const TrainResult& result) {
  const auto& evaluation = result.eval.back();
  auto text =
      fmt::format("epoch {}: test loss {:.4f}, accuracy {:.2f} %", epoch, evaluation.loss, 100 * evaluation.accuracy);
  for (const auto& [name, value] : result.figures) {
    if (name == "consensus_distance") text += fmt::format(", consensus distance {:.3g}", value);
  }
  return text;
}

}  // namespace shoal::cli
