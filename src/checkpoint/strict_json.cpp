#include "checkpoint/strict_json.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <set>

#include "shoal/checkpoint/checkpoint_error.h"

namespace shoal {
namespace {

using Json = nlohmann::json;

// Depth and an upper bound for the memory that the parsed text takes, from its punctuation alone.
struct Extent {
  int depth = 0;
  int64_t bytes = 0;
};

Extent extent_of(std::string_view text, int max_depth) {
  constexpr int64_t value_bytes = 64;  // a value in a vector that has grown, its block included
  constexpr int64_t key_bytes = 160;   // a map's node, and the key in the list of those seen
  constexpr int64_t copies = 8;        // of a text: the parser's, the value, and those in a parser's error
  Extent extent{.bytes = value_bytes + copies * static_cast<int64_t>(text.size())};
  int depth = 0;
  bool quoted = false;
  for (size_t i = 0; i < text.size() && extent.depth <= max_depth; ++i) {
    const char c = text[i];
    if (c == '"') {
      quoted = !quoted;
    } else if (quoted) {
      if (c == '\\') ++i;
    } else if (c == '{' || c == '[') {
      extent.depth = std::max(extent.depth, ++depth);
      extent.bytes += 2 * value_bytes;
    } else if (c == '}' || c == ']') {
      --depth;
    } else if (c == ',') {
      extent.bytes += value_bytes;
    } else if (c == ':') {
      extent.bytes += key_bytes;
    }
  }
  return extent;
}

// Fits what tensors are counted in; negative and fractional numbers have other types.
bool is_count(const Json& value) {
  return value.is_number_unsigned() && value.get<uint64_t>() <= std::numeric_limits<int64_t>::max();
}

}  // namespace

Json parse_strict(std::string_view text, const JsonLimits& limits, const std::string& subject) {
  const auto extent = extent_of(text, limits.depth);
  if (extent.depth > limits.depth) {
    throw CheckpointError(fmt::format("{}: JSON nested deeper than {}", subject, limits.depth));
  }
  if (extent.bytes > limits.bytes) {
    throw CheckpointError(fmt::format(
        "{}: its JSON could take {} bytes of memory, more than what it describes warrants", subject, extent.bytes));
  }
  std::vector<std::set<std::string>> keys;
  const Json::parser_callback_t no_key_twice = [&](int, Json::parse_event_t event, Json& parsed) {
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key && !keys.back().insert(parsed.get<std::string>()).second) {
      throw CheckpointError(fmt::format("{}: two entries named {}", subject, parsed.get<std::string>()));
    }
    return true;
  };
  try {
    return Json::parse(text, no_key_twice);
  } catch (const Json::exception& error) {
    throw CheckpointError(fmt::format("{}: not JSON: {:.200}", subject, error.what()));
  }
}

JsonFields::JsonFields(const Json& object, std::string subject) : object_(object), subject_(std::move(subject)) {
  if (!object.is_object()) throw CheckpointError(subject_ + ": not a JSON object");
}

const Json& JsonFields::field(const char* name, const char* kind, bool (Json::*is)() const noexcept) const {
  const auto found = object_.find(name);
  if (found == object_.end()) throw CheckpointError(fmt::format("{}: no {}", subject_, name));
  if (!((*found).*is)()) throw CheckpointError(fmt::format("{}: {} is not {}", subject_, name, kind));
  return *found;
}

int64_t JsonFields::number(const char* name) const {
  const auto& value = field(name, "a whole number", &Json::is_number_unsigned);
  if (!is_count(value)) throw CheckpointError(fmt::format("{}: {} is too large", subject_, name));
  return value.get<int64_t>();
}

const std::string& JsonFields::text(const char* name) const {
  return field(name, "text", &Json::is_string).get_ref<const std::string&>();
}

std::vector<int64_t> JsonFields::numbers(const char* name) const {
  std::vector<int64_t> list;
  for (const auto& value : array(name)) {
    if (!is_count(value)) throw CheckpointError(fmt::format("{}: {} must be whole numbers", subject_, name));
    list.push_back(value.get<int64_t>());
  }
  return list;
}

const Json& JsonFields::object(const char* name) const {
  return field(name, "a JSON object", &Json::is_object);
}

const Json& JsonFields::array(const char* name) const {
  return field(name, "a list", &Json::is_array);
}

void JsonFields::only(std::initializer_list<std::string_view> names) const {
  for (const auto& [name, value] : object_.items()) {
    if (std::find(names.begin(), names.end(), name) == names.end()) {
      throw CheckpointError(fmt::format("{}: unknown entry {}", subject_, name));
    }
  }
}

}  // namespace shoal
