#pragma once
// Casts of the tensors in the arguments of a module's forward.

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

namespace shoal {

// Cast of one tensor. An empty function casts nothing.
using TensorCast = std::function<at::Tensor(const at::Tensor&)>;

// Customisation point for user-defined structs. Specialise it:
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

namespace detail {

// Argument of a running forward, with a cast copy of it if it holds tensors.
template <class Argument, bool may_copy>
class CastInput {
  using Value = std::remove_cvref_t<Argument>;
  static constexpr bool casts = may_copy && HoldsInputTensors<Value>;

 public:
  CastInput(Argument&& argument, const TensorCast& cast) : argument_(argument) {
    if constexpr (casts) {
      if (cast) copy_.emplace(cast_tensors<Value>(argument, cast));
    }
  }
  Argument&& get() {
    if constexpr (casts) {
      if (copy_) return static_cast<Argument&&>(*copy_);
    }
    return static_cast<Argument&&>(argument_);
  }

 private:
  struct Nothing {};
  std::remove_reference_t<Argument>& argument_;
  [[no_unique_address]] std::conditional_t<casts, std::optional<Value>, Nothing> copy_;
};

template <class Module, class... Arguments>
concept ForwardTakes = requires(Module& module, Arguments&&... arguments) {
  module.forward(std::forward<Arguments>(arguments)...);
};

// True if forward also accepts the argument at `place` as const, so that it cannot write to the caller's object.
template <size_t place, class Module, class... Arguments, size_t... places>
constexpr bool only_reads(std::index_sequence<places...>) {
  return ForwardTakes<Module, std::conditional_t<places == place, const std::remove_cvref_t<Arguments>&, Arguments>...>;
}

// True if forward may get a copy of the argument, that is, if it cannot write to the caller's object.
template <size_t place, class Module, class... Arguments>
constexpr bool may_copy() {
  using Argument = std::tuple_element_t<place, std::tuple<Arguments...>>;
  constexpr bool writable = std::is_lvalue_reference_v<Argument> && !std::is_const_v<std::remove_reference_t<Argument>>;
  return !writable || only_reads<place, Module, Arguments...>(std::index_sequence_for<Arguments...>());
}

// `call` with the arguments of the module's forward, cast.
template <class Module, class Call, size_t... places, class... Arguments>
auto with_cast_inputs(std::index_sequence<places...>, const TensorCast& cast, const Call& call,
                      Arguments&&... arguments) {
  return call(CastInput<Arguments, may_copy<places, Module, Arguments...>()>(std::forward<Arguments>(arguments), cast)
                  .get()...);
}

}  // namespace detail
}  // namespace shoal
