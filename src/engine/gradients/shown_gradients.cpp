#include "engine/gradients/shown_gradients.h"

#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/utils.h>

#include <map>
#include <utility>

#include "memory/views.h"

namespace shoal {
namespace {

// Another tensor of the same elements, but no view in autograd's sense, as view_like() makes them.
at::Tensor another(const at::Tensor& view) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(view.storage()),
                                                         view.key_set(), view.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(view.sizes(), view.strides(), view.storage_offset());
  return tensor;
}

}  // namespace

bool ShownGradients::note(size_t gradient, const at::Tensor& grad, const at::Tensor& bucket) {
  elsewhere_[gradient] =
      grad.defined() && grad.layout() == at::kStrided && grad.storage().use_count() > 1 && !same_storage(grad, bucket);
  return elsewhere_[gradient];
}

// Tensors of the program are those that a storage has beside the gradients.
void ShownGradients::note_all(const std::vector<Gradient>& gradients) {
  std::map<const c10::StorageImpl*, size_t> held;
  const auto storage_of = [&](size_t i) -> const c10::StorageImpl* {
    const auto& grad = gradients[i].parameter.grad();
    return grad.defined() && grad.layout() == at::kStrided ? grad.storage().unsafeGetStorageImpl() : nullptr;
  };
  for (size_t i = 0; i < gradients.size(); ++i) ++held[storage_of(i)];
  for (size_t i = 0; i < gradients.size(); ++i) {
    const auto* storage = storage_of(i);
    elsewhere_[i] = storage != nullptr && gradients[i].parameter.grad().storage().use_count() > held[storage];
  }
}

void ShownGradients::show(size_t gradient, at::Tensor& grad, const at::Tensor& view) {
  if (std::exchange(ended_, false)) ++backward_;
  shown_[gradient] = backward_;
  if (same_view(grad, view)) return;
  const bool kept = grad.defined() && grad.use_count() > 1 && !grad.requires_grad() && grad.layout() == at::kStrided &&
                    grad.options().type_equal(view.options());
  if (kept) {
    grad.set_data(view);
  } else {
    grad = another(view);
  }
}

// The node that refuses leads to all parameters, so that autograd does not leave it out, whatever it differentiates by.
void ShownGradients::end_graphs(const std::vector<Gradient>& gradients) {
  std::vector<at::Tensor> parameters;
  torch::autograd::variable_list all;
  for (size_t i = 0; i < gradients.size(); ++i) {
    const auto& grad = gradients[i].parameter.grad();
    const bool graph = graph_[i];
    graph_[i] = false;
    if (!graph || !grad.defined()) continue;
    parameters.push_back(gradients[i].parameter);
    all.push_back(grad.detach());
  }
  if (parameters.empty()) return;
  for (const auto& gradient : gradients) all.push_back(gradient.parameter);
  const at::AutoGradMode on(true);
  torch::autograd::DelayedError refuses(
      "what backward() with create_graph has left in grad() is a mean over ranks and has no graph: compute what "
      "depends on gradients from torch::autograd::grad (torch.autograd.grad) with create_graph, and call backward() "
      "once for the whole loss",
      static_cast<int64_t>(all.size()));
  const auto refusing = refuses.apply(std::move(all));
  for (size_t i = 0; i < parameters.size(); ++i) parameters[i].mutable_grad() = refusing[i];
}

}  // namespace shoal
