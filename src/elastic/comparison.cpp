#include "elastic/comparison.h"

#include <ATen/ops/as_strided.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "optim/named_options.h"

namespace shoal {
namespace {

constexpr size_t most_elements = 64;
constexpr double least_magnitude = 1e-3;  // below it, rounding is that of sums with larger values

// In 53 bits, which a double holds.
double digest_of(const std::string& text) {
  return static_cast<double>(std::hash<std::string>()(text) >> 11);
}

// Hosts whose processors round in different ways train ranks that are equal to half of the digits.
double relative_rounding(at::ScalarType dtype) {
  const auto of = [](auto like) {
    return std::sqrt(static_cast<double>(std::numeric_limits<decltype(like)>::epsilon()));
  };
  switch (c10::toRealValueType(dtype)) {
    case at::kDouble:
      return of(double());
    case at::kFloat:
      return of(float());
    case at::kHalf:
      return of(at::Half());
    default:
      return of(at::BFloat16());
  }
}

double magnitude_of_element(const at::Tensor& tensor, int64_t number) {
  auto place = tensor.storage_offset();
  for (auto dim = tensor.dim() - 1; dim >= 0; --dim) {
    place += number % tensor.size(dim) * tensor.stride(dim);
    number /= tensor.size(dim);
  }
  return at::as_strided(tensor.detach(), {}, {}, place).abs().item<double>();
}

}  // namespace

Comparison::Comparison(const ElasticParts& parts, int64_t step) {
  if (!parts.sharded() && parts.reduces()) add_elements(parts.tensors().trainable(), step);
}

void Comparison::add_options(const ElasticParts& parts) {
  const auto& groups = parts.optimizer().param_groups();
  for (size_t i = 0; i < groups.size(); ++i) {
    auto named = named_options(groups[i].options());
    const double rate = named.contains("lr") && named["lr"].is_number() ? named["lr"].get<double>() : 0;
    named.erase("lr");
    std::vector<std::string> list;
    for (const auto& [name, value] : named.items()) list.push_back(name + " " + rounded_text(value));
    const auto options = fmt::format("{}", fmt::join(list, ", "));
    const auto group = fmt::format("param group {}", i);
    compared_.push_back({Kind::rate, rate, 1e-12, group, {}});
    compared_.push_back({Kind::options, digest_of(options), 0, group, options});
  }
}

void Comparison::add_elements(const std::vector<NamedTensor>& parameters, int64_t step) {
  const torch::NoGradGuard no_grad;
  std::vector<const NamedTensor*> list;
  for (const auto& entry : parameters) {
    if (entry.tensor.numel() > 0 && !entry.changes_in_forward) list.push_back(&entry);
  }
  if (list.empty()) return;
  auto number = static_cast<uint64_t>(step) * most_elements;
  for (size_t i = 0; i < most_elements; ++i, ++number) {
    const auto& tensor = list[number % list.size()]->tensor;
    const auto place =
        static_cast<int64_t>((number * 0x9e3779b97f4a7c15U >> 16) % static_cast<uint64_t>(tensor.numel()));
    compared_.push_back({Kind::element,
                         magnitude_of_element(tensor, place),
                         relative_rounding(tensor.scalar_type()),
                         list[number % list.size()]->name,
                         {}});
  }
}

std::vector<double> Comparison::values() const {
  std::vector<double> list;
  for (const auto& one : compared_) list.insert(list.end(), {one.value, -one.value});
  return list;
}

std::string Comparison::difference(const std::vector<double>& most) const {
  for (size_t i = 0; i < compared_.size(); ++i) {
    const auto& one = compared_[i];
    const double high = most[2 * i];
    const double low = -most[2 * i + 1];
    if (!(high - low > one.relative * std::max(high, least_magnitude))) continue;
    const auto where = fmt::format("{}, and this one has {}", one.what,
                                   one.kind == Kind::options ? one.options : fmt::format("{}", one.value));
    switch (one.kind) {
      case Kind::rate:
        return fmt::format(
            "ranks have learning rates from {} to {} in {}: a newcomer gets the job's at first, and its schedule must "
            "be brought to the job's position: give the schedule's state to newcomers (in Python: state={{...}}), or "
            "call schedule.set_position(elastic.steps())",
            low, high, where);
      case Kind::options:
        return fmt::format(
            "ranks have different options in {}: a newcomer gets the job's at first, and what the program sets later "
            "must follow from elastic.steps(), since a newcomer's own counters begin anew",
            where);
      case Kind::element:
        return fmt::format(
            "ranks have {} to {} as the magnitude of an element of parameter {}: a newcomer begins with the job's "
            "parameters, and has updated them in another way: give the state of a loss scaler, and what else updates "
            "depend on, to newcomers (ElasticOptions::scaler; in Python: state={{...}})",
            low, high, where);
    }
  }
  return "";
}

}  // namespace shoal
