#pragma once
// Fields of a JSON object of known structure.

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/refuse.h"

namespace shoal {

// Refusals begin with `subject` and name the field that is missing or of another type. Integers are 0 .. 2^63 - 1.
class JsonFields {
 public:
  JsonFields(const nlohmann::json& object, std::string subject, Refuse refuse);

  int64_t number(const char* name) const;
  const std::string& text(const char* name) const;
  std::vector<int64_t> numbers(const char* name) const;
  const nlohmann::json& object(const char* name) const;
  const nlohmann::json& array(const char* name) const;
  bool has(const char* name) const { return object_.contains(name); }
  // Refuses fields with other names.
  void only(std::initializer_list<std::string_view> names) const;

 private:
  const nlohmann::json& field(const char* name, const char* kind, bool (nlohmann::json::*is)() const noexcept) const;

  const nlohmann::json& object_;
  std::string subject_;
  Refuse refuse_;
};

}  // namespace shoal
