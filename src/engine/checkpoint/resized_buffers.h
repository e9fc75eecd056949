#pragma once
// Buffers that get the shapes of a checkpoint before it is loaded.

#include <functional>
#include <string>
#include <vector>

#include "checkpoint/loading/slice_reader.h"
#include "module/walk.h"

namespace shoal {

class ResizedBuffers {
 public:
  // Asks the module, if it is one that ResizesBuffers. prefix: of names in the checkpoint that the module's lack.
  void take(const torch::nn::Module& module, const SliceReader& reader, const std::string& prefix);
  // The load is refused: they get back their shapes and values.
  void undo();

 private:
  std::vector<std::function<void()>> undo_{};
};

}  // namespace shoal
