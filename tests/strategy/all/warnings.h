#pragma once
// Warnings of libtorch.

#include <c10/util/Exception.h>

#include <string>
#include <vector>

namespace shoal::test {

// Scope that collects this thread's warnings.
class Warnings : private c10::WarningHandler {
 public:
  const std::vector<std::string>& list() const { return list_; }

 private:
  void process(const c10::Warning& warning) override { list_.push_back(warning.msg()); }

  std::vector<std::string> list_;
  c10::WarningUtils::WarningHandlerGuard guard_{this};
};

}  // namespace shoal::test
