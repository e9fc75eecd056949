#include "shoal/optim.h"

#include <torch/nn/modules/normalization.h>

#include <set>
#include <string>

namespace shoal {

DecaySplit split_by_decay(detail::ModuleRef of) {
  const torch::nn::Module& module = of;
  std::set<const c10::TensorImpl*> of_norms;
  const auto note = [&](const torch::nn::Module& part) {
    const auto* norm = dynamic_cast<const torch::nn::LayerNormImpl*>(&part);
    if (norm != nullptr) of_norms.insert(norm->weight.unsafeGetTensorImpl());
  };
  note(module);
  // include_self would require that the module is in a shared_ptr.
  for (const auto& part : module.modules(/*include_self=*/false)) note(*part);
  DecaySplit split;
  std::set<const c10::TensorImpl*> seen;
  for (const auto& item : module.named_parameters()) {
    const auto& parameter = item.value();
    if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    const auto own_name = item.key().substr(item.key().rfind('.') + 1);  // npos + 1 is 0
    const bool spared = parameter.dim() <= 1 || own_name.find("bias") != std::string::npos ||
                        of_norms.contains(parameter.unsafeGetTensorImpl());
    (spared ? split.spared : split.decayed).push_back(parameter);
  }
  return split;
}

}  // namespace shoal
