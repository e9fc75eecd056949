#pragma once
// Tensors in the arguments and the result of a module's forward: customisation points for types of the program's own.

#include <ATen/core/List.h>
#include <torch/types.h>

#include <array>
#include <concepts>
#include <functional>
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

// Cast of one tensor. An empty function casts nothing.
using TensorCast = std::function<at::Tensor(const at::Tensor&)>;

// Customisation point for user-defined structs in the arguments of forward. Specialise it:
//   template <> struct InputTensors<MyInput> {
//     static MyInput cast(const MyInput& input, const shoal::TensorCast& cast) {
//       return {.image = shoal::cast_tensors(input.image, cast), .label = input.label};
//     }
//   };
// Types without a specialisation are passed unchanged.
template <class T>
struct InputTensors {};

template <class T>
concept HoldsInputTensors = std::copy_constructible<T> && requires(const T& value, const TensorCast& cast) {
  { InputTensors<T>::cast(value, cast) } -> std::same_as<T>;
};

// Copy of `value` in which all tensors are cast, however nested: in pairs, tuples, vectors, arrays, maps, optionals and
// types with an InputTensors specialisation. Other values are copied unchanged.
template <class T>
T cast_tensors(const T& value, const TensorCast& cast) {
  if constexpr (HoldsInputTensors<T>) {
    return InputTensors<T>::cast(value, cast);
  } else {
    return value;
  }
}

template <>
struct InputTensors<at::Tensor> {
  static at::Tensor cast(const at::Tensor& value, const TensorCast& cast) {
    return value.defined() ? cast(value) : value;
  }
};

template <HoldsInputTensors T>
struct InputTensors<std::optional<T>> {
  static std::optional<T> cast(const std::optional<T>& value, const TensorCast& cast) {
    return value ? std::optional<T>(cast_tensors(*value, cast)) : std::nullopt;
  }
};

namespace detail {
template <class Container>
struct ElementwiseInput {
  static Container cast(const Container& value, const TensorCast& cast) {
    Container copy = value;
    for (auto& element : copy) element = cast_tensors(element, cast);
    return copy;
  }
};

template <class Map>
struct MappedInput {
  static Map cast(const Map& value, const TensorCast& cast) {
    Map copy = value;
    for (auto& [key, element] : copy) element = cast_tensors(element, cast);
    return copy;
  }
};
}  // namespace detail

template <HoldsInputTensors T>
struct InputTensors<std::vector<T>> : detail::ElementwiseInput<std::vector<T>> {};
template <HoldsInputTensors T, size_t N>
struct InputTensors<std::array<T, N>> : detail::ElementwiseInput<std::array<T, N>> {};
template <class K, HoldsInputTensors V>
struct InputTensors<std::map<K, V>> : detail::MappedInput<std::map<K, V>> {};
template <class K, HoldsInputTensors V>
struct InputTensors<std::unordered_map<K, V>> : detail::MappedInput<std::unordered_map<K, V>> {};

template <class A, class B>
requires(HoldsInputTensors<A> || HoldsInputTensors<B>) struct InputTensors<std::pair<A, B>> {
  static std::pair<A, B> cast(const std::pair<A, B>& value, const TensorCast& cast) {
    return {cast_tensors(value.first, cast), cast_tensors(value.second, cast)};
  }
};

template <class... T>
requires(HoldsInputTensors<T> || ...) struct InputTensors<std::tuple<T...>> {
  static std::tuple<T...> cast(const std::tuple<T...>& value, const TensorCast& cast) {
    return std::apply([&](const auto&... element) { return std::tuple<T...>(cast_tensors(element, cast)...); }, value);
  }
};

// Customisation point for user-defined structs in the result of forward. Specialise it:
//   template <> struct OutputTensors<MyOutput> {
//     static void collect(const MyOutput& output, std::vector<at::Tensor>& into) {
//       shoal::collect_tensors(output.logits, into);
//     }
//   };
// Types without a specialisation contribute nothing, as is right for numbers and strings. Where nothing is found, every
// parameter may be behind the output.
template <class T>
struct OutputTensors {
  static void collect(const T&, std::vector<at::Tensor>&) {}
};

// Appends all tensors in `value`, however nested: in pairs, tuples, arrays, vectors, lists, maps, optionals and types
// with an OutputTensors specialisation.
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
