#include "engine/parameter_buffer.h"

#include <torch/utils.h>

#include "memory/views.h"

namespace shoal {

ParameterBuffer::ParameterBuffer(const Group& group, std::vector<at::Tensor> parameters, FlatLayout layout,
                                 std::vector<Range> owners, const OnceBufferOptions& options, const Label& label)
    : parameters_(std::move(parameters)),
      layout_(std::move(layout)),
      memory_(group.allocate_once(layout_.size(), parameters_.front().options().requires_grad(false), std::move(owners),
                                  options)) {
  const torch::NoGradGuard no_grad;
  const auto& own = memory_.owners()[group.rank()];
  std::vector<at::Tensor> views;
  for (size_t piece = 0; piece < parameters_.size(); ++piece) {
    views.push_back(view_like(memory_.tensor(), layout_.range(piece).begin, parameters_[piece]));
    const auto mine = layout_.range(piece).intersect(own);
    if (mine.empty()) continue;
    part(mine).copy_(
        in_memory_order(parameters_[piece]).narrow(0, mine.begin - layout_.range(piece).begin, mine.size()));
  }
  publish(label);
  wait(label);
  for (size_t piece = 0; piece < parameters_.size(); ++piece) parameters_[piece].set_data(views[piece]);
}

ParameterBuffer::~ParameterBuffer() {
  const torch::NoGradGuard no_grad;
  for (const auto& parameter : parameters_) {
    const bool used_elsewhere = parameter.use_count() > 1;
    if (used_elsewhere && parameter.is_alias_of(memory_.tensor())) parameter.set_data(at::clone(parameter.detach()));
  }
}

void ParameterBuffer::publish(const Label& label) {
  memory_.publish(++version_, label);
}

void ParameterBuffer::wait(const Label& label) {
  memory_.wait_published(version_, label);
}

}  // namespace shoal
