#include "cli/telemetry/frame.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>

#include "cli/telemetry/metrics_file.h"
#include "comm/telemetry/verdict.h"

namespace shoal::cli {
namespace {

namespace fs = std::filesystem;

constexpr size_t recent = 50;  // steps over which times are averaged

// Mean over the lines that have it.
double mean_of(const std::vector<const MetricsLine*>& lines, const std::string& name) {
  double sum = 0;
  int count = 0;
  for (const auto* line : lines) {
    const double value = line->number(name);
    if (std::isnan(value)) continue;
    sum += value;
    ++count;
  }
  return count > 0 ? sum / count : std::numeric_limits<double>::quiet_NaN();
}

double rate_of(const std::vector<const MetricsLine*>& lines) {
  const auto& last = *lines.back();
  auto begin = lines.size() - 1;  // of the lines since the run was last resumed, which counts from 0 again
  const auto goes_on = [&](size_t line) {
    return lines[line - 1]->number("seconds") < lines[line]->number("seconds") &&
           lines[line - 1]->number("samples") < lines[line]->number("samples");
  };
  while (begin > 0 && goes_on(begin)) --begin;
  const auto& first = *lines[begin];
  if (begin + 1 == lines.size()) return last.number("samples") / last.number("seconds");
  return (last.number("samples") - first.number("samples")) / (last.number("seconds") - first.number("seconds"));
}

void add_metrics(Frame& frame, const fs::path& file) {
  const auto [lines, damaged] = last_metrics(file);
  frame.damaged = damaged;
  std::error_code error;
  const auto written = fs::last_write_time(file, error);
  if (!error) frame.age_s = std::chrono::duration<double>(fs::file_time_type::clock::now() - written).count();
  std::vector<const MetricsLine*> steps;
  for (const auto& line : lines) {
    if (!line.event.empty()) {
      frame.events.push_back(line);
      continue;
    }
    const bool evaluates = std::any_of(line.numbers.begin(), line.numbers.end(),
                                       [](const auto& entry) { return entry.first.starts_with("eval_"); });
    if (evaluates) {
      frame.evaluated_step = line.step;
      frame.evaluation = line.numbers;
    } else {
      steps.push_back(&line);
      if (const auto loss = line.find("loss")) frame.losses.push_back(*loss);
    }
  }
  if (steps.empty()) return;
  frame.step = steps.back()->step;
  frame.loss = steps.back()->find("loss");
  frame.lr = steps.back()->number("lr");
  if (steps.size() > recent) steps.erase(steps.begin(), steps.end() - recent);
  frame.rate = rate_of(steps);
  frame.step_ms = mean_of(steps, "step_ms");
  frame.wait_ms = mean_of(steps, "wait_ms");
  frame.update_ms = mean_of(steps, "update_ms");
}

// Means of as many neighbours as fit, each a block of one of eight heights, or a cross where one is NaN or infinite.
std::string sparkline(const std::vector<double>& values, size_t width) {
  static const char* const blocks[] = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  std::vector<double> means;
  const size_t columns = std::min(width, values.size());
  for (size_t i = 0; i < columns; ++i) {
    double sum = 0;
    const size_t begin = i * values.size() / columns, end = (i + 1) * values.size() / columns;
    for (size_t j = begin; j < end; ++j) sum += values[j];
    means.push_back(sum / static_cast<double>(end - begin));
  }
  double least = std::numeric_limits<double>::infinity(), most = -least;
  for (const double mean : means) {
    if (!std::isfinite(mean)) continue;
    least = std::min(least, mean);
    most = std::max(most, mean);
  }
  std::string line;
  for (const double mean : means) {
    if (!std::isfinite(mean)) {
      line += "×";
      continue;
    }
    const double height = most > least ? (mean - least) / (most - least) : 0;
    line += blocks[std::min<size_t>(7, static_cast<size_t>(height * 8))];
  }
  return line;
}

// The first `width` characters of UTF-8.
std::string cut_to(const std::string& text, int width) {
  int characters = 0;
  size_t end = 0;
  while (end < text.size()) {
    const bool begins = (static_cast<unsigned char>(text[end]) & 0xC0U) != 0x80U;
    if (begins && characters++ == width) break;
    ++end;
  }
  return text.substr(0, end);
}

// Whole numbers, and all digits before the point, as they are.
std::string figure(double value) {
  const bool large = std::abs(value) >= 1e4 && std::abs(value) < 1e15;
  return large ? fmt::format("{:.0f}", value) : fmt::format("{:.4g}", value);
}

std::string shown_number(double value, const char* format) {
  return std::isfinite(value) ? fmt::format(fmt::runtime(format), value) : "-";
}

// "NaN", "Infinity" or "-Infinity" for what is no number.
std::string shown_loss(const Frame& frame) {
  if (!frame.loss) return "-";
  if (std::isnan(*frame.loss)) return "NaN";
  return std::isinf(*frame.loss) ? (*frame.loss > 0 ? "Infinity" : "-Infinity") : fmt::format("{:.4f}", *frame.loss);
}

std::vector<std::string> metrics_in_words(const Frame& frame, int width) {
  std::vector<std::string> lines;
  if (frame.damaged.count > 0) lines.push_back(frame.damaged.in_words());
  if (!frame.step) {
    lines.emplace_back("no step yet");
    return lines;
  }
  lines.push_back(fmt::format("step {}   loss {}   rate {}   {} samples/s   written {:.0f} s ago", *frame.step,
                              shown_loss(frame), shown_number(frame.lr, "{:.3g}"),
                              std::isfinite(frame.rate) ? figure(frame.rate) : "-", frame.age_s));
  lines.push_back(fmt::format("a step takes {} ms, of which waits {} ms, update {} ms",
                              shown_number(frame.step_ms, "{:.3f}"), shown_number(frame.wait_ms, "{:.3f}"),
                              shown_number(frame.update_ms, "{:.3f}")));
  if (const auto line = sparkline(frame.losses, static_cast<size_t>(std::max(1, std::min(60, width - 5))));
      !line.empty()) {
    lines.push_back("loss " + line);
  }
  constexpr size_t most_events = 4;
  const auto shown = std::min(most_events, frame.events.size());
  for (auto event = frame.events.end() - static_cast<std::ptrdiff_t>(shown); event != frame.events.end(); ++event) {
    lines.push_back(fmt::format("after step {}: {}", event->step, event->event));
  }
  if (!frame.evaluation.empty()) {
    auto line = fmt::format("evaluated after step {}:", frame.evaluated_step);
    for (const auto& [name, value] : frame.evaluation) line += fmt::format("   {} {}", name, figure(value));
    lines.push_back(line);
  }
  return lines;
}

std::string in_words(const RankView& rank) {
  return fmt::format("{:>5}  {:<15} {:>8} {:>9} {:>9}  {}", rank.rank, rank.state,
                     rank.step < 0 ? "-" : std::to_string(rank.step),
                     rank.late_ms ? fmt::format("{:.2f}", *rank.late_ms) : "-",
                     rank.waiting_s > 0 ? fmt::format("{:.2f}", rank.waiting_s) : "-", rank.operation);
}

}  // namespace

Frame look_at(const fs::path& place) {
  Frame frame{.files = find_run(place)};
  if (frame.files.metrics) add_metrics(frame, *frame.files.metrics);
  if (frame.files.flights.empty()) return frame;
  const auto flights = read_flights(frame.files.flights);
  frame.ranks = rank_views(flights);
  frame.verdict = verdict(flights);
  return frame;
}

std::string in_words(const Frame& frame, int width, int height) {
  const auto& metrics = frame.files.metrics;
  const auto& older = frame.files.older;
  std::vector<std::string> lines{"shoal top " + (older.empty() ? frame.files.place : *metrics).string()};
  if (!older.empty()) lines.front() += fmt::format(" (the newest of {})", older.size() + 1);
  if (metrics) {
    for (auto& line : metrics_in_words(frame, width)) lines.push_back(std::move(line));
  }
  if (!frame.ranks.empty()) {
    constexpr size_t most_sentences = 4;
    lines.emplace_back("");
    for (size_t i = 0; i < std::min(most_sentences, frame.verdict.size()); ++i) lines.push_back(frame.verdict[i]);
    lines.emplace_back("");
    lines.push_back(fmt::format("{:>5}  {:<15} {:>8} {:>9} {:>9}  {}", "rank", "state", "step", "late ms", "in it s",
                                "last operation"));
    const size_t room =
        height > 0 ? static_cast<size_t>(std::max(1, height - 2 - static_cast<int>(lines.size()))) : frame.ranks.size();
    for (size_t i = 0; i < std::min(room, frame.ranks.size()); ++i) lines.push_back(in_words(frame.ranks[i]));
    if (frame.ranks.size() > room) lines.push_back(fmt::format("and {} more ranks", frame.ranks.size() - room));
  }
  std::string text;
  for (const auto& line : lines) text += cut_to(line, width) + "\n";
  return text;
}

nlohmann::ordered_json to_json(const Frame& frame) {
  using Json = nlohmann::ordered_json;
  Json json{{"place", frame.files.place.string()}};
  if (frame.files.metrics) {
    json["metrics"] = {{"file", frame.files.metrics->string()}, {"written_seconds_ago", frame.age_s}};
  }
  if (frame.damaged.count > 0) json["damaged_lines"] = {{"count", frame.damaged.count}, {"first", frame.damaged.first}};
  if (frame.step) {
    json["metrics"].update(Json{{"step", *frame.step},
                                {"loss", !frame.loss                  ? Json()
                                         : std::isfinite(*frame.loss) ? Json(*frame.loss)
                                                                      : Json(shown_loss(frame))},
                                {"lr", frame.lr},
                                {"samples_per_second", frame.rate},
                                {"step_ms", frame.step_ms},
                                {"wait_ms", frame.wait_ms},
                                {"update_ms", frame.update_ms}});
  }
  if (!frame.evaluation.empty()) {
    json["evaluation"] = {{"step", frame.evaluated_step}};
    for (const auto& [name, value] : frame.evaluation) json["evaluation"][name] = value;
  }
  for (const auto& event : frame.events) json["events"].push_back(to_json(event));
  if (frame.ranks.empty()) return json;
  json["verdict"] = frame.verdict;
  json["ranks"] = Json::array();
  for (const auto& rank : frame.ranks) {
    json["ranks"].push_back({{"rank", rank.rank},
                             {"state", rank.state},
                             {"step", rank.step},
                             {"operation", rank.operation},
                             {"waiting_s", rank.waiting_s},
                             {"late_ms", rank.late_ms ? Json(*rank.late_ms) : Json()}});
  }
  return json;
}

}  // namespace shoal::cli
