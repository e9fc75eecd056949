#pragma once
// Casts of the arguments of a module's forward.

#include <cstddef>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "shoal/forward_tensors.h"

namespace shoal {
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
