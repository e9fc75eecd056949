#include "checkpoint/pt/pickle.h"

#include <c10/util/accumulate.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string_view>

#include "shoal/error.h"

namespace shoal {
namespace {

class Pickler {
 public:
  void raw(std::string_view bytes) { out_ += bytes; }
  void global(std::string_view module, std::string_view name) { out_ += fmt::format("c{}\n{}\n", module, name); }
  void text(const std::string& text) {
    out_ += 'X';
    put(static_cast<uint32_t>(text.size()));
    out_ += text;
  }
  void number(int64_t number) {
    out_ += "\x8a\x08";  // a long of 8 bytes
    put(number);
  }
  void numbers(const std::vector<int64_t>& list) {
    out_ += '(';
    for (const auto number : list) this->number(number);
    out_ += 't';
  }
  std::string take() { return std::move(out_); }

 private:
  template <class T>
  void put(T value) {
    out_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }

  std::string out_;
};

void add(Pickler& pickler, const PickledTensor& tensor) {
  const auto* dtype = std::find_if(std::begin(storage_types), std::end(storage_types),
                                   [&](const StorageType& known) { return known.type == tensor.dtype; });
  if (dtype == std::end(storage_types) || *dtype->storage == 0) {
    throw UsageError(fmt::format("tensor {} is {}, which shoal does not write into .pt files; save a .safetensors file",
                                 tensor.name, c10::toString(tensor.dtype)));
  }
  pickler.text(tensor.name);
  pickler.global("torch._utils", "_rebuild_tensor_v2");
  pickler.raw("((");
  pickler.text("storage");
  pickler.global("torch", dtype->storage);
  pickler.text(tensor.storage);
  pickler.text("cpu");
  pickler.number(c10::multiply_integers(tensor.sizes));
  pickler.raw("tQ");
  pickler.number(tensor.offset);
  pickler.numbers(tensor.sizes);
  pickler.numbers(tensor.strides);
  pickler.raw("\x89");
  pickler.global("collections", "OrderedDict");
  pickler.raw(")RtR");
}

}  // namespace

std::string pickle_tensors(const std::vector<PickledTensor>& tensors) {
  Pickler pickler;
  pickler.raw("\x80\x02");
  pickler.global("collections", "OrderedDict");
  pickler.raw(")R(");
  for (const auto& tensor : tensors) add(pickler, tensor);
  pickler.raw("u.");
  return pickler.take();
}

}  // namespace shoal
