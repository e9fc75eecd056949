#include "checkpoint/loading/match.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include "checkpoint/saving/pieces.h"
#include "shoal/error.h"

namespace shoal {
namespace {

void add(std::string& text, const char* what, const std::vector<std::string>& names) {
  constexpr size_t most = 20;
  if (names.empty()) return;
  const std::vector<std::string> shown(names.begin(),
                                       names.begin() + static_cast<int64_t>(std::min(names.size(), most)));
  text += fmt::format("{}{}: {}", text.empty() ? "" : "; ", what, fmt::join(shown, ", "));
  if (names.size() > most) text += fmt::format(" and {} more", names.size() - most);
}

// Whether one tensor was written under both names.
bool equal(const SliceReader& reader, const StoredTensor& a, const StoredTensor& b) {
  if (a.dtype != b.dtype || a.dtype == at::ScalarType::Undefined || a.shape != b.shape) return false;
  const auto most = piece_bytes / static_cast<int64_t>(c10::elementSize(a.dtype));
  for (int64_t begin = 0; begin < a.numel(); begin += most) {
    const auto range = Range{begin, begin + most}.intersect({0, a.numel()});
    const auto of_a = at::empty({range.size()}, a.dtype);
    const auto of_b = at::empty_like(of_a);
    reader.read(a.name, range, of_a);
    reader.read(b.name, range, of_b);
    if (std::memcmp(of_a.const_data_ptr(), of_b.const_data_ptr(), of_a.nbytes()) != 0) return false;
  }
  return true;
}

// With which the checkpoint has all names that are missing; empty if there is none, or several.
std::string prefix_of_missing(const Match& found, const std::string& prefix_given) {
  const std::set<std::string> extra(found.extra.begin(), found.extra.end());
  const auto bare = [&](const std::string& missing) { return missing.substr(prefix_given.size()); };
  const auto first = bare(found.missing.front());
  std::string only;
  for (const auto& name : found.extra) {
    if (!name.ends_with("." + first)) continue;
    const auto prefix = name.substr(0, name.size() - first.size());
    const bool all = std::all_of(found.missing.begin(), found.missing.end(),
                                 [&](const std::string& missing) { return extra.contains(prefix + bare(missing)); });
    if (all && !only.empty()) return "";
    if (all) only = prefix;
  }
  return only;
}

std::string advice_on(const Match& found, bool partial, const std::string& prefix_given) {
  if (!found.wrong_shape.empty()) return partial ? "; a new layer needs a new name" : "";
  if (!found.matching.empty() || found.missing.empty()) return partial ? "" : "; set partial to load what matches";
  const auto prefix = prefix_of_missing(found, prefix_given);
  if (prefix.empty()) return "";
  return fmt::format("; it has them with the prefix {}, which load_module() takes as its option prefix", prefix);
}

}  // namespace

std::string Match::describe() const {
  std::string text;
  add(text, "missing", missing);
  add(text, "extra", extra);
  add(text, "of another shape or kind", wrong_shape);
  return text;
}

Match match(const SliceReader& reader, const std::vector<WantedTensor>& wanted, const std::string& part,
            const std::string& prefix) {
  std::map<std::string, const WantedTensor*> left;
  for (const auto& tensor : wanted) left[tensor.name] = &tensor;
  // Tied weights have one name here, whichever of those that they have there.
  const auto& stored = reader.index().tensors;
  const auto first_name = [](const StoredTensor& tensor) {
    return tensor.same_as.empty() ? tensor.name : tensor.same_as;
  };
  std::set<std::string> wanted_tensors;
  std::map<std::string, std::string> wanted_by_alias;
  for (const auto& tensor : wanted) {
    for (const auto& alias : tensor.aliases) wanted_by_alias[alias] = tensor.name;
    if (const auto found = stored.find(tensor.name); found != stored.end())
      wanted_tensors.insert(first_name(found->second));
  }
  Match result;
  for (const auto& [name, tensor] : stored) {
    if (tensor.part != part || !name.starts_with(prefix)) continue;
    const auto found = left.find(name);
    if (found == left.end()) {
      if (wanted_tensors.contains(first_name(tensor))) continue;
      const auto alias = wanted_by_alias.find(name);
      const bool tied = alias != wanted_by_alias.end() && reader.has(alias->second, part);
      if (tied && equal(reader, tensor, stored.at(alias->second))) continue;
      result.extra.push_back(
          tied ? fmt::format("{} (not equal to {}, with which it is one tensor here)", name, alias->second) : name);
      continue;
    }
    const auto dtype = found->second->dtype.value_or(tensor.dtype);
    const bool converts = dtype == tensor.dtype || (at::isFloatingType(dtype) && at::isFloatingType(tensor.dtype));
    if (found->second->shape == tensor.shape && converts) {
      result.matching.push_back(name);
    } else if (!converts) {
      result.wrong_shape.push_back(
          fmt::format("{} is {}, wanted is {}", name, c10::toString(tensor.dtype), c10::toString(dtype)));
    } else {
      result.wrong_shape.push_back(fmt::format("{} is [{}], wanted is [{}]", name, fmt::join(tensor.shape, ", "),
                                               fmt::join(found->second->shape, ", ")));
    }
    left.erase(found);
  }
  for (const auto& [name, tensor] : left) result.missing.push_back(name);
  return result;
}

Match require_match(const SliceReader& reader, const std::vector<WantedTensor>& wanted, bool partial,
                    const std::string& part, const std::string& prefix) {
  auto result = match(reader, wanted, part, prefix);
  const bool nothing = result.matching.empty() && !wanted.empty();
  if (partial ? result.wrong_shape.empty() && !nothing : result.exact()) return result;
  throw UsageError(fmt::format("{} does not match this model: {}{}", reader.name(), result.describe(),
                               advice_on(result, partial, prefix)));
}

}  // namespace shoal
