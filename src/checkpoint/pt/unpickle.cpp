#include "checkpoint/pt/unpickle.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <unordered_map>

#include "base/printable.h"
#include "checkpoint/format/safetensors_format.h"
#include "shoal/error.h"

namespace shoal {
namespace {

// As JSON, which has the names in all other files, asks for.
bool is_utf8(const std::string& text) {
  try {
    static_cast<void>(nlohmann::json(text).dump());
  } catch (const nlohmann::json::type_error&) {
    return false;
  }
  return true;
}

// What is recalled from the memo costs two bytes of the file each time, but is copied whole.
constexpr size_t longest_word = 256;

enum class Kind { nothing, number, text, global, tuple, list, dictionary, storage, tensor, mark };

struct Value {
  Kind kind = Kind::nothing;
  int64_t number = 0;
  std::string_view text{};                  // of a global: "module name"
  std::string global{};                     // its memory
  std::vector<Value*> items{};              // of a dictionary: keys and values by turns
  std::unique_ptr<PickledTensor> tensor{};  // of a storage: its key and, where its class says so, its dtype
  bool typed = false;
};

class Unpickler {
 public:
  Unpickler(std::string_view pickle, const std::string& subject)
      : rest_(pickle), subject_(subject), room_((int64_t{64} << 20) + 4 * static_cast<int64_t>(pickle.size())) {}

  Value* run() {
    while (true) {
      const char code = take(1)[0];
      if (code == '.') return result();
      step(code);
    }
  }

  [[noreturn]] void refuse(const std::string& what) const {
    throw CheckpointError(fmt::format("{}: {}", subject_, what));
  }
  // Counts memory that is about to be taken: little in a file may stand for much here.
  void spend(int64_t bytes) {
    room_ -= bytes;
    if (room_ < 0) refuse("a pickle that stands for more than 64 MiB");
  }
  void spend(const PickledTensor& tensor) {
    const auto numbers = tensor.sizes.size() + tensor.strides.size();
    spend(static_cast<int64_t>(sizeof tensor + tensor.storage.size() + numbers * sizeof(int64_t)));
  }

 private:
  Value* result() {
    auto* value = pop();
    const bool holds = value->kind == Kind::dictionary || value->kind == Kind::list || value->kind == Kind::tuple;
    if (!holds) refuse("holds no dictionary of tensors: save model.state_dict() in Python");
    return value;
  }

  std::string_view take(uint64_t size) {
    if (size > rest_.size()) refuse("a pickle that ends early");
    const auto taken = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return taken;
  }
  template <class T>
  T number() {
    T value{};
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  std::string_view line() {
    const auto end = rest_.find('\n');
    if (end == std::string_view::npos) refuse("a pickle that ends early");
    const auto text = take(end);
    take(1);
    return text;
  }

  Value& make(Kind kind) {
    constexpr size_t most = 1'000'000;
    if (values_.size() >= most) refuse(fmt::format("a pickle of more than {} values", most));
    spend(sizeof(Value));
    auto& value = values_.emplace_back();
    value.kind = kind;
    return value;
  }
  void push(Value* value) {
    constexpr size_t most = 8'000'000;
    if (stack_.size() >= most) refuse("a pickle with a stack beyond all limits");
    stack_.push_back(value);
  }
  Value* pop() {
    if (stack_.empty()) refuse("a pickle that takes what is not there");
    auto* value = stack_.back();
    stack_.pop_back();
    return value;
  }
  Value* top() {
    auto* value = pop();
    stack_.push_back(value);
    return value;
  }
  // What lies above the last mark, which goes.
  std::vector<Value*> pop_to_mark() {
    const auto mark =
        std::find_if(stack_.rbegin(), stack_.rend(), [](const Value* v) { return v->kind == Kind::mark; });
    if (mark == stack_.rend()) refuse("a pickle that takes what is not there");
    std::vector<Value*> items(mark.base(), stack_.end());
    stack_.erase(std::prev(mark.base()), stack_.end());
    return items;
  }

  void push_number(int64_t number) {
    auto& value = make(Kind::number);
    value.number = number;
    push(&value);
  }
  void push_text(std::string_view text) {
    auto& value = make(Kind::text);
    value.text = text;
    push(&value);
  }
  void push_global(std::string_view module, std::string_view name) {
    if (module.size() > longest_word || name.size() > longest_word)
      refuse("a pickle with an object of an endless name");
    auto& value = make(Kind::global);
    value.global = fmt::format("{} {}", module, name);
    value.text = value.global;
    push(&value);
  }
  void push_tuple(std::vector<Value*> items) {
    auto& value = make(Kind::tuple);
    value.items = std::move(items);
    push(&value);
  }
  void push_last(size_t count) {
    std::vector<Value*> items(count);
    for (auto item = items.rbegin(); item != items.rend(); ++item) *item = pop();
    push_tuple(std::move(items));
  }
  void push_long(uint64_t size) {
    const auto bytes = take(size);
    if (size > sizeof(int64_t)) return push(&make(Kind::nothing));  // no size of a tensor
    uint64_t number = size > 0 && (bytes.back() & 0x80) != 0 ? ~uint64_t{0} : 0;
    std::memcpy(&number, bytes.data(), size);
    push_number(static_cast<int64_t>(number));
  }
  void extend(Kind kind, const std::vector<Value*>& items) {
    auto* container = top();
    if (container->kind != kind || (kind == Kind::dictionary && items.size() % 2 != 0)) {
      refuse("a pickle that fills what is no dictionary or list");
    }
    container->items.insert(container->items.end(), items.begin(), items.end());
  }

  void remember(uint64_t place) {
    constexpr size_t most = 1'000'000;
    memo_[place] = top();
    if (memo_.size() > most) refuse(fmt::format("a pickle of more than {} values", most));
  }
  void recall(uint64_t place) {
    const auto found = memo_.find(place);
    if (found == memo_.end()) refuse("a pickle that takes what is not there");
    push(found->second);
  }

  // Opcodes of protocols 2 to 5, without those that make objects.
  // clang-format off
  void step(char code) {
    switch (code) {
      case '\x80': return void(take(1));                                   // PROTO
      case '\x95': return void(take(8));                                   // FRAME
      case 'c': { const auto module = line(); return push_global(module, line()); }
      case '\x93': return stack_global();
      case 'q': return remember(number<uint8_t>());
      case 'r': return remember(number<uint32_t>());
      case '\x94': return remember(memo_.size());                          // MEMOIZE
      case 'h': return recall(number<uint8_t>());
      case 'j': return recall(number<uint32_t>());
      case '(': return push(&make(Kind::mark));
      case '0': return void(pop());
      case 'N': case '\x88': case '\x89': return push(&nothing_);          // None, True, False
      case 'G': take(8); return push(&nothing_);                           // a float
      case 'K': return push_number(number<uint8_t>());
      case 'M': return push_number(number<uint16_t>());
      case 'J': return push_number(number<int32_t>());
      case '\x8a': return push_long(number<uint8_t>());
      case 'X': return push_text(take(number<uint32_t>()));
      case '\x8c': return push_text(take(number<uint8_t>()));
      case '\x8d': return push_text(take(number<uint64_t>()));
      case 'B': take(number<uint32_t>()); return push(&nothing_);          // bytes
      case 'C': take(number<uint8_t>()); return push(&nothing_);
      case ')': return push_tuple({});
      case 't': return push_tuple(pop_to_mark());
      case '\x85': return push_last(1);
      case '\x86': return push_last(2);
      case '\x87': return push_last(3);
      case ']': return push(&make(Kind::list));
      case '}': return push(&make(Kind::dictionary));
      case 'a': { auto* item = pop(); return extend(Kind::list, {item}); }
      case 'e': { const auto items = pop_to_mark(); return extend(Kind::list, items); }
      case 's': { auto* value = pop(); auto* key = pop(); return extend(Kind::dictionary, {key, value}); }
      case 'u': { const auto items = pop_to_mark(); return extend(Kind::dictionary, items); }
      case 'b': return build();
      case 'Q': return push_storage();
      case 'R': return reduce();
      case '\x81': pop(); refuse_object(std::string(pop()->text));         // NEWOBJ
      default: refuse_object(fmt::format("opcode {:#04x}", static_cast<unsigned char>(code)));
    }
  }
  // clang-format on

  void stack_global() {
    const auto* name = pop();
    const auto* module = pop();
    if (name->kind != Kind::text || module->kind != Kind::text) refuse("a pickle with a nameless object");
    push_global(module->text, name->text);
  }

  [[noreturn]] void refuse_object(const std::string& what) const {
    refuse(
        fmt::format("holds a Python object ({:.100}); shoal reads tensors in dictionaries and lists: save "
                    "model.state_dict() in Python, and open files of C++'s torch::save with torch::load",
                    printable(what)));
  }

  // Attributes of a dictionary (a state_dict has its modules' versions) are left out.
  void build() {
    pop();
    if (top()->kind != Kind::dictionary) refuse_object("attributes");
  }

  // ("storage", class, key, device, number of elements)
  void push_storage() {
    const auto* id = pop();
    const auto& items = id->items;
    if (id->kind != Kind::tuple || items.size() < 3 || items[0]->text != "storage" || items[1]->kind != Kind::global ||
        items[2]->kind != Kind::text) {
      refuse("a pickle with a storage of another kind");
    }
    if (items[2]->text.size() > longest_word) refuse("a pickle with a storage of an endless name");
    auto& value = make(Kind::storage);
    value.tensor = std::make_unique<PickledTensor>();
    value.tensor->storage = items[2]->text;
    if (items[1]->text != "torch.storage UntypedStorage") {
      const auto* found =
          std::find_if(std::begin(storage_types), std::end(storage_types), [&](const StorageType& dtype) {
            return *dtype.storage != 0 && items[1]->text == fmt::format("torch {}", dtype.storage);
          });
      if (found == std::end(storage_types))
        refuse(fmt::format("a tensor on a {:.100}, whose dtype shoal does not read: save it as another one in Python",
                           printable(items[1]->global)));
      value.tensor->dtype = found->type;
      value.typed = true;
    }
    push(&value);
  }

  void reduce() {
    const auto* arguments = pop();
    const auto* called = pop();
    if (called->kind != Kind::global || arguments->kind != Kind::tuple) refuse("a pickle that calls no function");
    const auto& items = arguments->items;
    if (called->text == "collections OrderedDict" && items.empty()) return push(&make(Kind::dictionary));
    if (called->text == "torch Size" && items.size() == 1) return push(items[0]);
    if (called->text == "torch device") return push(&nothing_);
    if (called->text == "torch._utils _rebuild_parameter" && !items.empty() && items[0]->kind == Kind::tensor) {
      return push(items[0]);
    }
    const bool plain = called->text == "torch._utils _rebuild_tensor_v2" && items.size() >= 4;
    const bool wide = called->text == "torch._utils _rebuild_tensor_v3" && items.size() >= 7;
    if (!plain && !wide) refuse_object(std::string(called->text));
    rebuild(items, wide);
  }

  std::vector<int64_t> numbers(const Value& tuple) const {
    if (tuple.items.size() > most_dimensions) refuse("a tensor with too many dimensions");
    std::vector<int64_t> list;
    for (const auto* item : tuple.items) {
      if (item->kind != Kind::number || item->number < 0) refuse("a tensor with a size that is no number");
      list.push_back(item->number);
    }
    return list;
  }

  // (storage, offset, sizes, strides, requires_grad, hooks[, dtype][, {"conj": True}])
  void rebuild(const std::vector<Value*>& items, bool wide) {
    const bool fits = items[0]->kind == Kind::storage && items[0]->typed != wide && items[1]->kind == Kind::number &&
                      items[1]->number >= 0 && items[2]->kind == Kind::tuple && items[3]->kind == Kind::tuple &&
                      items[2]->items.size() == items[3]->items.size();
    if (!fits) refuse("a tensor of another kind");
    const size_t bits = wide ? 7 : 6;
    if (items.size() > bits && !items[bits]->items.empty()) {
      refuse("a tensor that is a lazy conjugate or negative: save tensor.resolve_conj().resolve_neg() in Python");
    }
    auto& value = make(Kind::tensor);
    value.tensor = std::make_unique<PickledTensor>(*items[0]->tensor);
    value.tensor->offset = items[1]->number;
    value.tensor->sizes = numbers(*items[2]);
    value.tensor->strides = numbers(*items[3]);
    spend(*value.tensor);
    if (wide) {
      const auto* found =
          std::find_if(std::begin(storage_types), std::end(storage_types),
                       [&](const StorageType& dtype) { return items[6]->text == fmt::format("torch {}", dtype.name); });
      if (found == std::end(storage_types))
        refuse(fmt::format("a tensor of {:.100}", printable(std::string(items[6]->text))));
      value.tensor->dtype = found->type;
    }
    push(&value);
  }

  std::string_view rest_;
  const std::string& subject_;
  int64_t room_;  // bytes of memory that the rest may take
  Value nothing_{};
  std::deque<Value> values_;  // all there are
  std::vector<Value*> stack_;
  std::unordered_map<uint64_t, Value*> memo_;
};

// Names of what lies in it. A pickle may hold one thing at many places, so that what is small here may be large there.
class Flattening {
 public:
  explicit Flattening(Unpickler& unpickler) : unpickler_(unpickler) {}

  void visit(const Value& value, const std::string& name, int depth) {
    constexpr int64_t most_bytes = int64_t{64} << 20;
    count(depth);
    name_bytes_ += static_cast<int64_t>(name.size());
    if (name_bytes_ > most_bytes) unpickler_.refuse("dictionaries nested beyond all limits");
    if (value.kind == Kind::tensor) {
      if (!names_.insert(name).second) unpickler_.refuse(fmt::format("tensor {:.200} occurs twice", printable(name)));
      if (!is_utf8(name)) {
        unpickler_.refuse(
            fmt::format("tensor {:.200} has a name that is no UTF-8: rename it in Python", printable(name)));
      }
      unpickler_.spend(*value.tensor);
      tensors_.push_back(*value.tensor);
      tensors_.back().name = name;
    }
    const auto inside = [&](const std::string& key) { return name.empty() ? key : name + "." + key; };
    if (value.kind == Kind::list || value.kind == Kind::tuple) {
      for (size_t i = 0; i < value.items.size(); ++i) visit(*value.items[i], inside(std::to_string(i)), depth + 1);
    }
    if (value.kind != Kind::dictionary) return;
    for (size_t i = 0; i < value.items.size(); i += 2) {
      const auto& key = *value.items[i];
      if (key.kind != Kind::text && key.kind != Kind::number) {
        if (holds_tensor(*value.items[i + 1], depth + 1)) refuse_key(key, name);
        continue;
      }
      visit(*value.items[i + 1], inside(key.kind == Kind::text ? std::string(key.text) : std::to_string(key.number)),
            depth + 1);
    }
  }
  std::vector<PickledTensor> take() { return std::move(tensors_); }

 private:
  void count(int depth) {
    constexpr int deepest = 64;
    constexpr int64_t most = 1'000'000;
    if (depth > deepest || ++visited_ > most) unpickler_.refuse("dictionaries nested beyond all limits");
  }
  bool holds_tensor(const Value& value, int depth) {
    count(depth);
    return value.kind == Kind::tensor || std::any_of(value.items.begin(), value.items.end(),
                                                     [&](const Value* item) { return holds_tensor(*item, depth + 1); });
  }
  [[noreturn]] void refuse_key(const Value& key, const std::string& name) const {
    unpickler_.refuse(
        fmt::format("a tensor{} lies under a key that is {}: shoal takes texts and whole numbers of up to 64 "
                    "bits; rename it in Python",
                    name.empty() ? "" : fmt::format(" in {:.200}", printable(name)),
                    key.kind == Kind::tuple ? "a tuple" : "None, a truth value, a float, bytes or the like"));
  }

  Unpickler& unpickler_;
  std::vector<PickledTensor> tensors_;
  std::set<std::string> names_;
  int64_t visited_ = 0;
  int64_t name_bytes_ = 0;
};

}  // namespace

std::vector<PickledTensor> unpickle_tensors(std::string_view pickle, const std::string& subject) {
  Unpickler unpickler(pickle, subject);
  const auto* value = unpickler.run();
  Flattening flattening(unpickler);
  flattening.visit(*value, "", 0);
  return flattening.take();
}

}  // namespace shoal
