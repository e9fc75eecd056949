#include "cli/train/metrics.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>

#include "base/print_to_stderr.h"
#include "shoal/error.h"

namespace shoal::cli {

namespace {

// Ranks complete no step that the writer has not begun, so that it is behind by the lines of one step. Those of
// strategies whose ranks do not wait for each other may be further apart.
constexpr size_t most_kept = 32;
constexpr int64_t most_read = 64 << 10;

// Kind of the lines that say how the ranks have changed.
constexpr const char* change = "event";

// The kind of a line and its number, which grows from line to line; the kind is empty where a line may be repeated.
std::pair<std::string_view, int64_t> place_of(const nlohmann::ordered_json& line) {
  for (const auto& [kind, number] : {std::pair{"loss", "step"}, {"eval_loss", "step"}, {change, "generation"}}) {
    if (line.contains(kind) && line.contains(number) && line[number].is_number_integer()) return {kind, line[number]};
  }
  return {"", 0};
}

// The complete lines at the end of the file, from `begin`, and the place behind the last of them.
std::pair<std::string, int64_t> end_of(const std::string& path, int64_t begin) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) return {"", begin};
  const auto size = static_cast<int64_t>(file.tellg());
  const auto from = std::max(std::min(begin, size), size - most_read);
  std::string text(static_cast<size_t>(size - from), '\0');
  file.seekg(from);
  file.read(text.data(), size - from);
  text.resize(static_cast<size_t>(file.gcount()));
  const auto last = text.rfind('\n');
  if (last == std::string::npos) return {"", from};
  text.resize(last + 1);
  return {text, from + static_cast<int64_t>(text.size())};
}

// Ends the file behind its last complete line.
void cut(const std::string& path, int64_t end) {
  std::error_code fault;
  const auto size = std::filesystem::file_size(path, fault);
  if (!fault && static_cast<int64_t>(size) > end)
    std::filesystem::resize_file(path, static_cast<uintmax_t>(end), fault);
}

}  // namespace

Metrics::Metrics(const std::string& path, Start start, bool writes) : path_(path), writes_(writes) {
  if (path_.empty()) return;
  if (start == Start::behind) begin_ = end_of(path_, 0).second;
  if (!writes_) return;
  cut(path_, begin_);
  file_.open(path_, std::ios::app);  // at its end, also if another program empties the file meanwhile
  if (!file_) throw UsageError(fmt::format("--metrics: cannot write {}", path_));
}

void Metrics::write(const nlohmann::ordered_json& line) {
  if (path_.empty()) return;
  const auto [kind, number] = place_of(line);
  if (kind == change) generation_ = number;
  if (!writes_) {
    // The writer goes on with the others after a change of the ranks, so it has written what was before.
    if (kind == change) kept_.clear();
    kept_.emplace_back(generation_, line);
    if (kept_.size() > most_kept) kept_.pop_front();
    return;
  }
  if (!is_written(kind, number)) append(line);
}

// Numbers of steps grow between two changes of the ranks.
bool Metrics::is_written(std::string_view kind, int64_t number) const {
  if (kind.empty() || generation_ > former_generation_) return false;
  if (kind == change || generation_ < former_generation_) return true;
  const auto last = last_former_.find(kind);
  return last != last_former_.end() && number <= last->second;
}

void Metrics::append(const nlohmann::ordered_json& line) {
  if (!fault_.empty()) return;
  file_ << line.dump() + '\n' << std::flush;
  if (!file_) give_up(line.contains("step") ? fmt::format("from step {} on", line["step"].dump()) : "from here on");
}

void Metrics::give_up(const std::string& from) {
  const auto* why = std::strerror(errno);
  file_.close();
  fault_ = fmt::format("--metrics: cannot write {}: {}; lines {} are missing", path_, why, from);
  print_to_stderr("shoal: {}; training continues\n", fault_);
}

void Metrics::take_over() {
  if (path_.empty() || writes_) return;
  if (!fault_.empty()) {
    writes_ = true;
    kept_.clear();
    return;
  }
  const auto [text, end] = end_of(path_, begin_);
  if (end - static_cast<int64_t>(text.size()) > begin_ && !kept_.empty()) {
    // The last change is further back, and this rank has seen it: the writer is behind by a few lines at most.
    const auto& [generation, line] = kept_.front();
    former_generation_ = place_of(line).first == change ? generation - 1 : generation;
  }
  for (size_t at = 0; at < text.size();) {
    const auto next = text.find('\n', at);
    const auto line = nlohmann::ordered_json::parse(text.substr(at, next - at), nullptr, /*allow_exceptions=*/false);
    at = next + 1;
    if (!line.is_object()) continue;  // the end of a line
    const auto [kind, number] = place_of(line);
    if (kind == change) {
      former_generation_ = number;
      last_former_.clear();
    } else if (!kind.empty()) {
      last_former_[kind] = number;
    }
  }
  cut(path_, end);
  file_.open(path_, std::ios::app);
  writes_ = true;
  if (!file_) give_up("from here on");
  const auto generation = generation_;
  for (const auto& [then, line] : std::exchange(kept_, {})) {
    generation_ = then;
    write(line);
  }
  generation_ = generation;
}

void Metrics::hand_over() {
  if (path_.empty() || !writes_) return;
  file_.close();
  writes_ = false;
}

}  // namespace shoal::cli
