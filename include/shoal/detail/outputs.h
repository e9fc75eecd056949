#pragma once
// Collection of the tensors in the result of a module's forward.

#include <ATen/core/List.h>
#include <torch/types.h>

#include <array>
#include <map>
#include <optional>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torch::nn {
struct ASMoutput;
}

namespace shoal {

// Customisation point for user-defined structs. Specialise it:
//   template <> struct OutputTensors<MyOutput> {
//     static void collect(const MyOutput& output, std::vector<at::Tensor>& into) {
//       shoal::collect_tensors(output.logits, into);
//     }
//   };
// Types without a specialisation contribute nothing, as is right for numbers and strings. Where nothing is found, every parameter
// may be behind the output.
template <class T>
struct OutputTensors {
  static void collect(const T&, std::vector<at::Tensor>&) {}
};

// Appends all tensors in `value`, however nested: in pairs, tuples, arrays, vectors, lists, maps, optionals and types with
// an OutputTensors specialisation.
template <class T>
void collect_tensors(const T& value, std::vector<at::Tensor>& into) {
  OutputTensors<std::decay_t<T>>::collect(value, into);
}

template <>
struct OutputTensors<at::Tensor> {
  static void collect(const at::Tensor& value, std::vector<at::Tensor>& into) {
    if (value.defined()) into.push_back(value);
  }
};

template <class... T>
struct OutputTensors<std::tuple<T...>> {
  static void collect(const std::tuple<T...>& value, std::vector<at::Tensor>& into) {
    std::apply([&](const auto&... element) { (collect_tensors(element, into), ...); }, value);
  }
};

template <class A, class B>
struct OutputTensors<std::pair<A, B>> {
  static void collect(const std::pair<A, B>& value, std::vector<at::Tensor>& into) {
    collect_tensors(value.first, into);
    collect_tensors(value.second, into);
  }
};

template <class T>
struct OutputTensors<std::optional<T>> {
  static void collect(const std::optional<T>& value, std::vector<at::Tensor>& into) {
    if (value) collect_tensors(*value, into);
  }
};

namespace detail {
template <class T>
struct ElementwiseOutput {
  static void collect(const T& value, std::vector<at::Tensor>& into) {
    for (const auto& element : value) collect_tensors(element, into);
  }
};
}  // namespace detail

template <class T>
struct OutputTensors<std::vector<T>> : detail::ElementwiseOutput<std::vector<T>> {};
template <class T, size_t n>
struct OutputTensors<std::array<T, n>> : detail::ElementwiseOutput<std::array<T, n>> {};
template <class T>
struct OutputTensors<c10::List<T>> {
  static void collect(const c10::List<T>& list, std::vector<at::Tensor>& into) {
    for (size_t i = 0; i < list.size(); ++i) collect_tensors(list.get(i), into);
  }
};
template <class K, class V>
struct OutputTensors<std::map<K, V>> : detail::ElementwiseOutput<std::map<K, V>> {};
template <class K, class V>
struct OutputTensors<std::unordered_map<K, V>> : detail::ElementwiseOutput<std::unordered_map<K, V>> {};

// The result of AdaptiveLogSoftmaxWithLoss. A template, so that its header is not needed here.
template <>
struct OutputTensors<torch::nn::ASMoutput> {
  template <class Output>
  static void collect(const Output& value, std::vector<at::Tensor>& into) {
    collect_tensors(value.output, into);
  }
};

}  // namespace shoal
