#pragma once
// Numbers of ranks of an elastic job, as the command line gives them.

#include <string>

namespace shoal::cli {

struct ElasticRange {
  int least = 0;
  int most = 0;  // 0: no rank can join
};

// "MIN" or "MIN:MAX"; UsageError for other texts.
ElasticRange elastic_range(const std::string& text);

}  // namespace shoal::cli
