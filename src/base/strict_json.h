#pragma once
// JSON that somebody else may have written.

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
  int64_t bytes = 0;                  // what its values may take in memory, roughly
  int64_t text_bytes = int64_t{8} << 20;  // of one name or text; the parser takes several times that
};

// A list of the outermost object whose elements are handed out one by one, so that it may be longer than memory; it is
// empty in the result.
struct JsonStream {
  std::string name;
  std::function<void(nlohmann::json element)> each;
};

// Refuses what is not JSON, any object with the same key twice, and what goes beyond the limits, as soon as it does.
// Refusals begin with `subject`. Time grows with the text's length times the logarithm of the number of entries.
nlohmann::json parse_strict(std::string_view text, const JsonLimits& limits, const std::string& subject,
                            Refuse refuse);
// The same of a file, which is read piece by piece.
nlohmann::json parse_strict(const InputFile& file, const JsonLimits& limits, const std::string& subject, Refuse refuse,
                            const JsonStream& stream = {});

}  // namespace shoal
