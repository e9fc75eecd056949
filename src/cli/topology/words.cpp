#include "cli/topology/words.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>

namespace shoal::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr int most_in_matrix = 8;         // maximum of ranks
constexpr int64_t most_rounds_told = 16;  // the rest is in the JSON
constexpr size_t most_links = 200;        // maximum of a round
constexpr size_t columns = 100;           // width of a line

std::string number(double value) {
  return fmt::format("{:.4g}", value);
}

// "0 - 1" for two equal weights in both directions, "0 > 1" for one direction; by ascending weight.
std::map<double, std::vector<std::string>> links_by_weight(const MixingRound& round) {
  std::map<double, std::vector<std::string>> links;
  for (int to = 0; to < round.size(); ++to) {
    for (const auto& [from, weight] : round.sources(to)) {
      const auto& back = round.sources(from);
      const bool mutual = std::find(back.begin(), back.end(), Neighbour{to, weight}) != back.end();
      if (mutual && from > to) continue;
      links[weight].push_back(fmt::format("{}{}{}", from, mutual ? "-" : ">", to));
    }
  }
  return links;
}

std::string wrapped(const std::string& head, const std::vector<std::string>& words) {
  std::string lines = head;
  size_t length = head.size();
  for (size_t i = 0; i < words.size(); ++i) {
    if (i == most_links) return lines + fmt::format(" and {} more", words.size() - i);
    if (length + words[i].size() + 1 > columns) {
      lines += "\n" + std::string(head.size(), ' ');
      length = head.size();
    }
    lines += " " + words[i];
    length += words[i].size() + 1;
  }
  return lines;
}

std::vector<std::string> idle_ranks(const MixingRound& round) {
  std::vector<std::string> ranks;
  for (int rank = 0; rank < round.size(); ++rank) {
    if (round.idle(rank)) ranks.push_back(std::to_string(rank));
  }
  return ranks;
}

std::string matrix(const MixingRound& round) {
  std::string lines = "      ";
  for (int from = 0; from < round.size(); ++from) lines += fmt::format("{:>8}", from);
  for (int to = 0; to < round.size(); ++to) {
    std::vector<double> row(round.size());
    row[to] = round.self(to);
    for (const auto& [from, weight] : round.sources(to)) row[from] = weight;
    lines += fmt::format("\n  {:>4}", to);
    for (const double weight : row) lines += fmt::format("{:>8}", weight == 0 ? "." : number(weight));
  }
  return lines + "\n";
}

std::string round_in_words(const MixingRound& round, int64_t index) {
  std::string lines = fmt::format("round {}\n", index);
  for (const auto& [weight, links] : links_by_weight(round)) {
    lines += wrapped(fmt::format("  {:>6}:", number(weight)), links) + "\n";
  }
  if (const auto idle = idle_ranks(round); !idle.empty()) lines += wrapped("    idle:", idle) + "\n";
  if (round.size() <= most_in_matrix) lines += matrix(round);
  return lines + "\n";
}

Json round_to_json(const MixingRound& round) {
  auto edges = Json::array();
  auto self = Json::array();
  auto idle = Json::array();
  auto alone = Json::array();
  for (int to = 0; to < round.size(); ++to) {
    self.push_back(round.self(to));
    alone.push_back(Json::array({to}));
    if (round.idle(to)) idle.push_back(to);
    for (const auto& [from, weight] : round.sources(to)) edges.push_back(Json::array({from, to, weight}));
  }
  if (edges.empty()) return {{"groups", alone}};
  Json json = {{"edges", edges}, {"self", self}};
  if (!idle.empty()) json["idle"] = idle;
  return json;
}

}  // namespace

std::vector<std::pair<std::string, std::string>> report_lines(const TopologyReport& report) {
  const auto after = [](const std::optional<int64_t>& steps) {
    return steps ? fmt::format("{} step{}", *steps, *steps == 1 ? "" : "s") : "never";
  };
  return {{"left after a period, at most", number(report.period_contraction)},
          {"spectral gap", number(report.spectral_gap)},
          {"left after a step, in the long run", number(report.step_contraction)},
          {"all equal after", after(report.exact_after)},
          {"a thousandth left after", after(report.steps_to_thousandth)},
          {"sent per rank and step, times the parameters' bytes",
           fmt::format("{}, at most {}", number(report.mean_sent), report.most_sent)}};
}

std::string in_words(const Topology& topology, const TopologyReport& report) {
  std::string text = topology.fingerprint() + "\n\n";
  const auto shown = std::min(topology.period(), most_rounds_told);
  for (int64_t index = 0; index < shown; ++index) text += round_in_words(topology.round(index), index);
  if (shown < topology.period()) text += fmt::format("and {} more rounds (--json)\n\n", topology.period() - shown);
  for (const auto& [what, figure] : report_lines(report)) text += fmt::format("{:<52}{}\n", what, figure);
  std::vector<std::string> distances;
  for (const double distance : report.distance) distances.push_back(fmt::format("{:.3g}", distance));
  return text + wrapped("left after 0, 1, 2, .. steps:", distances) + "\n";
}

Json to_json(const Topology& topology, const TopologyReport& report) {
  auto rounds = Json::array();
  for (int64_t index = 0; index < topology.period(); ++index) rounds.push_back(round_to_json(topology.round(index)));
  const auto steps = [](const std::optional<int64_t>& count) { return count ? Json(*count) : Json(); };
  return {{"name", topology.name()},
          {"fingerprint", topology.fingerprint()},
          {"file", {{"ranks", topology.size()}, {"kind", to_string(topology.kind())}, {"rounds", rounds}}},
          {"report",
           {{"period", topology.period()},
            {"period_contraction", report.period_contraction},
            {"spectral_gap", report.spectral_gap},
            {"step_contraction", report.step_contraction},
            {"exact_after", steps(report.exact_after)},
            {"steps_to_thousandth", steps(report.steps_to_thousandth)},
            {"distance", report.distance},
            {"mean_sent", report.mean_sent},
            {"most_sent", report.most_sent}}}};
}

}  // namespace shoal::cli
