#pragma once
// Tensors in pickles, and the dtypes that they can have there.

#include <torch/types.h>

#include <cstdint>
#include <string>
#include <vector>

namespace shoal {

// A tensor on a storage that lies in a record of its own.
struct PickledTensor {
  std::string name;
  std::string storage;  // key
  at::ScalarType dtype = at::kFloat;
  int64_t offset = 0;  // elements
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;  // elements
};

struct StorageType {
  const char* name;     // of the torch.dtype
  const char* storage;  // class; empty: an untyped one
  at::ScalarType type;
};
inline constexpr StorageType storage_types[] = {{"float64", "DoubleStorage", at::kDouble},
                                                {"float32", "FloatStorage", at::kFloat},
                                                {"float16", "HalfStorage", at::kHalf},
                                                {"bfloat16", "BFloat16Storage", at::kBFloat16},
                                                {"int64", "LongStorage", at::kLong},
                                                {"int32", "IntStorage", at::kInt},
                                                {"int16", "ShortStorage", at::kShort},
                                                {"int8", "CharStorage", at::kChar},
                                                {"uint8", "ByteStorage", at::kByte},
                                                {"bool", "BoolStorage", at::kBool},
                                                {"complex64", "ComplexFloatStorage", at::kComplexFloat},
                                                {"uint64", "", at::kUInt64},
                                                {"uint32", "", at::kUInt32},
                                                {"uint16", "", at::kUInt16},
                                                {"float8_e5m2fnuz", "", at::kFloat8_e5m2fnuz},
                                                {"float8_e4m3fnuz", "", at::kFloat8_e4m3fnuz},
                                                {"float8_e8m0fnu", "", at::kFloat8_e8m0fnu},
                                                {"float8_e4m3fn", "", at::kFloat8_e4m3fn},
                                                {"float8_e5m2", "", at::kFloat8_e5m2}};

}  // namespace shoal
