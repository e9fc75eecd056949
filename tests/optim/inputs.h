#pragma once
// Parameters and gradients that vectors.py uses.

#include <torch/types.h>

#include <cmath>
#include <functional>
#include <vector>

namespace shoal::inputs {

inline at::Tensor fill(at::IntArrayRef shape, at::ScalarType dtype, const std::function<double(double)>& f) {
  auto values = at::empty(shape, at::kDouble);
  for (int64_t i = 0; i < values.numel(); ++i) values.data_ptr<double>()[i] = f(static_cast<double>(i));
  return values.to(dtype);
}

inline std::vector<at::Tensor> parameters(const std::vector<std::vector<int64_t>>& shapes, at::ScalarType dtype) {
  std::vector<at::Tensor> list;
  for (const auto& shape : shapes) {
    list.push_back(fill(shape, dtype, [](double i) { return std::sin(1 + 0.7 * i); }).requires_grad_(true));
  }
  return list;
}

inline void set_gradients(std::vector<at::Tensor>& parameters, int step) {
  for (size_t p = 0; p < parameters.size(); ++p) {
    parameters[p].mutable_grad() = fill(parameters[p].sizes(), parameters[p].scalar_type(), [&](double i) {
      return std::cos(1.3 * step + 0.37 * i * i + static_cast<double>(p));
    });
  }
}

// All parameters after ten steps, concatenated, in double.
template <class Optimizer, class Options>
at::Tensor train(const std::vector<std::vector<int64_t>>& shapes, const Options& options, at::ScalarType dtype) {
  auto list = parameters(shapes, dtype);
  Optimizer optimizer(list, options);
  std::vector<at::Tensor> flat;
  for (int step = 0; step < 10; ++step) {
    set_gradients(list, step);
    optimizer.step();
  }
  for (const auto& parameter : list) flat.push_back(parameter.detach().flatten().to(at::kDouble));
  return at::cat(flat);
}

}  // namespace shoal::inputs
