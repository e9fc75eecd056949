#include "engine/checkpoint/resized_buffers.h"

namespace shoal {

void ResizedBuffers::take(const torch::nn::Module& module, const SliceReader& reader, const std::string& prefix) {
  const auto* resizes = dynamic_cast<const ResizesBuffers*>(&module);
  if (resizes == nullptr) return;
  ResizesBuffers::Shapes shapes;
  for (const auto& [name, tensor] : reader.index().tensors) {
    if (tensor.part == "model" && name.starts_with(prefix)) shapes[name.substr(prefix.size())] = tensor.shape;
  }
  undo_.push_back(resizes->take_shapes(shapes));
}

void ResizedBuffers::undo() {
  for (const auto& one : undo_) one();
  undo_.clear();
}

}  // namespace shoal
