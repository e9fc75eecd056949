#include "engine/gradients/autograd_error.h"

namespace shoal {
namespace {

AutogradErrorTranslator& translator() {
  static AutogradErrorTranslator instance;
  return instance;
}

}  // namespace

void set_autograd_error_translator(AutogradErrorTranslator chosen) {
  translator() = std::move(chosen);
}

void translate_autograd_error(const std::exception_ptr& error) {
  if (translator()) translator()(error);
}

}  // namespace shoal
