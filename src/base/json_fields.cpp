#include "base/json_fields.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

namespace shoal {
namespace {

using Json = nlohmann::json;

// Fits the type of tensor sizes; negative and fractional numbers have other JSON types.
bool is_count(const Json& value) {
  return value.is_number_unsigned() && value.get<uint64_t>() <= std::numeric_limits<int64_t>::max();
}

}  // namespace

JsonFields::JsonFields(const Json& object, std::string subject, Refuse refuse)
    : object_(object), subject_(std::move(subject)), refuse_(refuse) {
  if (!object.is_object()) refuse_(subject_ + ": not a JSON object");
}

const Json& JsonFields::field(const char* name, const char* kind, bool (Json::*is)() const noexcept) const {
  const auto found = object_.find(name);
  if (found == object_.end()) refuse_(fmt::format("{}: no {:.200}", subject_, name));
  if (!((*found).*is)()) refuse_(fmt::format("{}: {:.200} is not {}", subject_, name, kind));
  return *found;
}

int64_t JsonFields::number(const char* name) const {
  const auto& value = field(name, "a whole number", &Json::is_number_unsigned);
  if (!is_count(value)) refuse_(fmt::format("{}: {:.200} is too large", subject_, name));
  return value.get<int64_t>();
}

const std::string& JsonFields::text(const char* name) const {
  return field(name, "text", &Json::is_string).get_ref<const std::string&>();
}

std::vector<int64_t> JsonFields::numbers(const char* name) const {
  std::vector<int64_t> list;
  for (const auto& value : array(name)) {
    if (!is_count(value)) refuse_(fmt::format("{}: {} must be whole numbers", subject_, name));
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
      refuse_(fmt::format("{}: unknown entry {:.200}", subject_, name));
    }
  }
}

}  // namespace shoal
