#pragma once
// Parser of untrusted JSON.

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "base/input_file.h"
#include "base/refuse.h"

namespace shoal {

struct JsonLimits {
  int depth = 32;
  int64_t bytes = 0;                      // approximate limit of the memory for values
  int64_t text_bytes = int64_t{8} << 20;  // limit of one name or string; the parser takes several times that
};

// List in the outermost object whose elements are passed on one by one, so that it may be longer than memory; it is
// empty in the result.
struct JsonStream {
  std::string name;
  std::function<void(nlohmann::json element)> each;
};

// Refuses text that is not JSON, objects with a repeated key, and anything beyond the limits, as early as possible.
// Refusals begin with `subject`. Time grows with the text's length times the logarithm of the number of entries.
nlohmann::json parse_strict(std::string_view text, const JsonLimits& limits, const std::string& subject, Refuse refuse);
// The same for a file, which is read piece by piece.
nlohmann::json parse_strict(const InputFile& file, const JsonLimits& limits, const std::string& subject, Refuse refuse,
                            const JsonStream& stream = {});

}  // namespace shoal
