#pragma once
// Collection of the tensors in the result of a module's forward.

#include <torch/types.h>

#include <map>
#include <optional>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace shoal {

// Customisation point for user-defined structs. Specialise it:
//   template <> struct OutputTensors<MyOutput> {
//     static void collect(const MyOutput& output, std::vector<at::Tensor>& into) {
//       shoal::collect_tensors(output.logits, into);
//     }
//   };
// Types without a specialisation that hold no known tensor (numbers, strings) contribute nothing.
template <class T>
struct OutputTensors {
  static void collect(const T&, std::vector<at::Tensor>&) {}
};

// Appends all tensors in `value`, however nested: in pairs, tuples, vectors, maps, optionals and types with an
// OutputTensors specialisation.
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
template <class K, class V>
struct OutputTensors<std::map<K, V>> : detail::ElementwiseOutput<std::map<K, V>> {};
template <class K, class V>
struct OutputTensors<std::unordered_map<K, V>> : detail::ElementwiseOutput<std::unordered_map<K, V>> {};

}  // namespace shoal
