#include "training/hook_text.h"

#include <fmt/format.h>

#include <charconv>
#include <vector>

#include "shoal/strategy.h"

namespace shoal {
namespace {

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == ':') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

template <class T>
T number(const std::string& text, const std::string& whole) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && end == text.data() + text.size()) return value;
  throw StrategyOptionError("compress", fmt::format(" {}: '{}' is not a number", whole, text));
}

}  // namespace

int64_t plain_steps(const std::string& text) {
  const auto parts = split(text);
  if (parts.front() != "powersgd") return 0;
  constexpr int64_t usual_start = 10;
  return parts.size() == 3 ? number<int64_t>(parts[2], text) : usual_start;
}

std::shared_ptr<CommunicationHook> make_started_hook(const std::string& text) {
  const auto parts = split(text);
  return make_hook(parts.front() == "powersgd" && parts.size() > 1 ? fmt::format("powersgd:{}:0", parts[1]) : text);
}

std::shared_ptr<CommunicationHook> make_hook(const std::string& text) {
  const auto parts = split(text);
  const auto& kind = parts.front();
  if (parts.size() == 1) {
    if (kind == "none") return nullptr;
    if (kind == "fp16") return std::make_shared<CompressHook>(at::kHalf);
    if (kind == "bf16") return std::make_shared<CompressHook>(at::kBFloat16);
    if (kind == "int8") return std::make_shared<QuantizeHook>();
  }
  if (kind == "powersgd" && (parts.size() == 2 || parts.size() == 3)) {
    return std::make_shared<PowerSgdHook>(
        PowerSgdOptions{.rank = number<int64_t>(parts[1], text), .start_iteration = plain_steps(text)});
  }
  if (kind == "topk" && parts.size() == 2) {
    return std::make_shared<TopKHook>(TopKOptions{.fraction = number<double>(parts[1], text)});
  }
  throw StrategyOptionError(
      "compress",
      fmt::format(" {}: give none, fp16, bf16, int8, powersgd:RANK, powersgd:RANK:START or topk:FRACTION", text));
}

}  // namespace shoal
