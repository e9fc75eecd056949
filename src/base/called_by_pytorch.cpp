#include "base/called_by_pytorch.h"

namespace shoal {
namespace {

ErrorTranslator& translator() {
  static ErrorTranslator instance;
  return instance;
}

}  // namespace

void set_error_translator(ErrorTranslator chosen) {
  translator() = std::move(chosen);
}

void translate_error(const std::exception_ptr& error) {
  if (translator()) translator()(error);
}

}  // namespace shoal
