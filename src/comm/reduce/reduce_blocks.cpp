// Kernels of reduce(). Compiled as find_baseline with the compiler's default instructions, and on x86 again as
// find_avx2 (SHOAL_KERNELS names the function). The compiler vectorises the loops.

#include "comm/reduce/reduce_blocks.h"

#include <type_traits>
#ifdef __SSE2__
#include <immintrin.h>
#endif

#include "comm/reduce/reduce_formats.h"

namespace shoal::kernels {
namespace {

// A block of sums stays in the first-level cache while the sources stream past.
constexpr int64_t block = 1024;

// Streaming stores, because an ordinary store first reads the line that it overwrites.
void copy_past_caches(const void* from, void* to, int64_t bytes) {
#ifdef __SSE2__
  if (reinterpret_cast<uintptr_t>(to) % sizeof(__m128i) == 0) {
    const auto* source = static_cast<const __m128i*>(from);
    auto* target = static_cast<__m128i*>(to);
    const int64_t whole = bytes / static_cast<int64_t>(sizeof(__m128i));
    for (int64_t i = 0; i < whole; ++i) _mm_stream_si128(target + i, _mm_loadu_si128(source + i));
    __builtin_memcpy(target + whole, source + whole, bytes % sizeof(__m128i));
    return;
  }
#endif
  __builtin_memcpy(to, from, bytes);
}

// Orders streamed stores, which other processors would otherwise see in any order.
void finish_streaming() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

// Prefetches the next page: the hardware does not prefetch beyond a page, nor translate the next page's address.
void touch_ahead(const void* next) {
  for (int line = 0; line < 4; ++line) __builtin_prefetch(static_cast<const char*>(next) + 64 * line);
}

// Propagates NaN from any rank.
struct Min {
  template <class T>
  static T apply(T a, T b) {
    return b < a || b != b ? b : a;
  }
};
struct Max {
  template <class T>
  static T apply(T a, T b) {
    return b > a || b != b ? b : a;
  }
};
// Unsigned arithmetic, because integer sums may wrap around.
template <class T>
using Wrapping = typename std::conditional_t<std::is_integral_v<T>, std::make_unsigned<T>, std::type_identity<T>>::type;
struct Sum {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
  }
};
struct Product {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
    } else {
      return a * b;
    }
  }
};
struct And {
  template <class T>
  static T apply(T a, T b) {
    return a & b;
  }
};
struct Or {
  template <class T>
  static T apply(T a, T b) {
    return a | b;
  }
};
struct Xor {
  template <class T>
  static T apply(T a, T b) {
    return a ^ b;
  }
};

enum class Finish { nothing, divide, scale_sources };

// Two ranks need no intermediate sums, which takes half of the time.
template <class Op>
void combine_two(const BFloat* a, const BFloat* b, BFloat* to, int64_t count) {
  // The result may replace a source, but only element by element.
#ifdef __clang__
#pragma clang loop vectorize(assume_safety)
#else
#pragma GCC ivdep
#endif
  for (int64_t i = 0; i + 2 <= count; i += 2) {
    const uint32_t from_a = two_at(a + i), from_b = two_at(b + i);
    narrow_two_to(Op::apply(widen_low(from_a), widen_low(from_b)), Op::apply(widen_high(from_a), widen_high(from_b)),
                  to + i);
  }
  if (count % 2 != 0) to[count - 1] = narrow(Op::apply(widen(a[count - 1]), widen(b[count - 1])));
}

template <class T>
void deliver(const Task& task, const T* result, int64_t begin, int64_t count) {
  if (task.stream) {
    copy_past_caches(result, static_cast<T*>(task.destinations[0]) + begin, static_cast<int64_t>(sizeof(T)) * count);
    return;
  }
  for (int other = 1; other < task.destination_count; ++other) {
    __builtin_memcpy(static_cast<T*>(task.destinations[other]) + begin, result, sizeof(T) * count);
  }
}

// Sums of values that are divided first, where a sum may be beyond the range.
template <class T, class Wide>
void add_parts(const Task& task, int64_t begin, int64_t count, Wide* value, Wide* sum) {
  const auto divisor = static_cast<Wide>(task.source_count);
  for (int source = 0; source < task.source_count; ++source) {
    load(static_cast<const T*>(task.sources[source]) + begin, value, count);
    for (int64_t i = 0; i < count; ++i) sum[i] = (source == 0 ? Wide(0) : sum[i]) + value[i] / divisor;
  }
}

template <class Wide>
bool is_finite(Wide value) {
  return value - value == 0;
}

// Means from the sums. They lie between the least and the greatest value, so that the mean of equal ones is exact; a
// sum may be beyond the range where they are not (masks of the lowest number).
template <class T, class Wide>
void divide(const Task& task, int64_t begin, int64_t count, Wide* value, Wide* sum) {
  const auto divisor = static_cast<Wide>(task.source_count);
  int beyond = 0;
  for (int64_t i = 0; i < count; ++i) beyond |= is_finite(sum[i]) ? 0 : 1;
  if (beyond == 0) {
    for (int64_t i = 0; i < count; ++i) sum[i] /= divisor;
  } else {
    alignas(64) Wide of_parts[block];
    add_parts<T>(task, begin, count, value, of_parts);
    for (int64_t i = 0; i < count; ++i) sum[i] = is_finite(sum[i]) ? sum[i] / divisor : of_parts[i];
  }
  alignas(64) Wide least[block];
  alignas(64) Wide greatest[block];
  for (int source = 0; source < task.source_count; ++source) {
    load(static_cast<const T*>(task.sources[source]) + begin, value, count);
    for (int64_t i = 0; i < count; ++i) {
      least[i] = source == 0 ? value[i] : Min::apply(least[i], value[i]);
      greatest[i] = source == 0 ? value[i] : Max::apply(greatest[i], value[i]);
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    sum[i] = sum[i] < least[i] ? least[i] : sum[i] > greatest[i] ? greatest[i] : sum[i];
  }
}

template <class T, class Wide, class Op, Finish finish>
void run(const Task& task) {
  alignas(64) Wide sum[block];
  alignas(64) Wide next[block];
  alignas(64) T narrowed[block];
  for (int64_t begin = task.begin; begin < task.end; begin += block) {
    const int64_t count = task.end - begin < block ? task.end - begin : block;
    if (begin + 2 * block <= task.end) {
      for (int source = 0; source < task.source_count; ++source) {
        touch_ahead(static_cast<const T*>(task.sources[source]) + begin + block);
      }
      if (task.stream) touch_ahead(static_cast<const T*>(task.destinations[0]) + begin + block);
    }
    T* const first = static_cast<T*>(task.destinations[0]) + begin;
    T* const result = task.stream ? narrowed : first;
    if constexpr (std::is_same_v<T, BFloat> && finish == Finish::nothing) {
      if (task.source_count == 2) {
        combine_two<Op>(static_cast<const T*>(task.sources[0]) + begin, static_cast<const T*>(task.sources[1]) + begin,
                        result, count);
        deliver(task, result, begin, count);
        continue;
      }
    }
    for (int source = 0; source < task.source_count; ++source) {
      const T* from = static_cast<const T*>(task.sources[source]) + begin;
      Wide* into = source == 0 ? sum : next;
      // float and double are added straight from the source, without a copy.
      if constexpr (std::is_same_v<T, Wide> && finish != Finish::scale_sources) {
        if (source > 0) {
          for (int64_t i = 0; i < count; ++i) sum[i] = Op::apply(sum[i], static_cast<Wide>(from[i]));
          continue;
        }
      }
      load(from, into, count);
      if constexpr (finish == Finish::scale_sources) {
        const auto factor = static_cast<Wide>(task.factors[source]);
        for (int64_t i = 0; i < count; ++i) into[i] *= factor;
      }
      if (source == 0) continue;
      for (int64_t i = 0; i < count; ++i) sum[i] = Op::apply(sum[i], next[i]);
    }
    if constexpr (finish == Finish::divide) divide<T>(task, begin, count, next, sum);
    store(sum, result, count);
    deliver(task, result, begin, count);
  }
  if (task.stream) finish_streaming();
}

template <class T, class Wide>
Kernel arithmetic(Operation operation) {
  switch (operation) {
    case Operation::sum:
      return run<T, Wide, Sum, Finish::nothing>;
    case Operation::min:
      return run<T, Wide, Min, Finish::nothing>;
    case Operation::max:
      return run<T, Wide, Max, Finish::nothing>;
    case Operation::product:
      return run<T, Wide, Product, Finish::nothing>;
    default:
      return nullptr;
  }
}

template <class T, class Wide>
Kernel floating(Operation operation) {
  if (operation == Operation::avg) return run<T, Wide, Sum, Finish::divide>;
  if (operation == Operation::premul_sum) return run<T, Wide, Sum, Finish::scale_sources>;
  return arithmetic<T, Wide>(operation);
}

template <class T>
Kernel bits(Operation operation) {
  switch (operation) {
    case Operation::band:
      return run<T, T, And, Finish::nothing>;
    case Operation::bor:
      return run<T, T, Or, Finish::nothing>;
    case Operation::bxor:
      return run<T, T, Xor, Finish::nothing>;
    default:
      return nullptr;
  }
}

template <class T>
Kernel integer(Operation operation) {
  const auto kernel = bits<T>(operation);
  return kernel != nullptr ? kernel : arithmetic<T, T>(operation);
}

Kernel boolean(Operation operation) {
  switch (operation) {
    case Operation::sum:
    case Operation::max:
    case Operation::bor:
      return bits<uint8_t>(Operation::bor);
    case Operation::product:
    case Operation::min:
    case Operation::band:
      return bits<uint8_t>(Operation::band);
    case Operation::bxor:
      return bits<uint8_t>(Operation::bxor);
    default:
      return nullptr;
  }
}

}  // namespace

Kernel SHOAL_KERNELS(Type type, Operation operation) {
  switch (type) {
    case Type::f64:
      return floating<double, double>(operation);
    case Type::f32:
      return floating<float, float>(operation);
    case Type::f16:
      return floating<Half, float>(operation);
    case Type::bf16:
      return floating<BFloat, float>(operation);
    case Type::i64:
      return integer<int64_t>(operation);
    case Type::i32:
      return integer<int32_t>(operation);
    case Type::i16:
      return integer<int16_t>(operation);
    case Type::i8:
      return integer<int8_t>(operation);
    case Type::u8:
      return integer<uint8_t>(operation);
    case Type::boolean:
      return boolean(operation);
  }
  return nullptr;
}

}  // namespace shoal::kernels
