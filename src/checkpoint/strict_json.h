#pragma once
// JSON that somebody else may have written.

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace shoal {

struct JsonLimits {
  int depth = 32;
  int64_t bytes = 0;  // what its values may take in memory, roughly
};

// Refuses what is not JSON, any object with the same key twice, and what goes beyond the limits; the latter before
// anything is built. CheckpointError that begins with `subject`.
nlohmann::json parse_strict(std::string_view text, const JsonLimits& limits, const std::string& subject);

// Fields of a value whose shape the reader knows. CheckpointError that begins with `subject` and names the field, where
// it is missing or of another kind. Whole numbers are 0 .. 2^63 - 1.
class JsonFields {
 public:
  JsonFields(const nlohmann::json& object, std::string subject);

  int64_t number(const char* name) const;
  const std::string& text(const char* name) const;
  std::vector<int64_t> numbers(const char* name) const;
  const nlohmann::json& object(const char* name) const;
  const nlohmann::json& array(const char* name) const;
  bool has(const char* name) const { return object_.contains(name); }
  // Every field must be one of these.
  void only(std::initializer_list<std::string_view> names) const;

 private:
  const nlohmann::json& field(const char* name, const char* kind, bool (nlohmann::json::*is)() const noexcept) const;

  const nlohmann::json& object_;
  std::string subject_;
};

}  // namespace shoal
