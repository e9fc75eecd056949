#include "optim/named_options.h"

#include <c10/util/Type.h>
#include <caffe2/serialize/inline_container.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/jit/api/compilation_unit.h>
#include <torch/csrc/jit/serialization/import_read.h>
#include <torch/serialize.h>

#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <sstream>
#include <typeinfo>
#include <utility>
#include <vector>

#include "shoal/error.h"

namespace shoal {

using Json = nlohmann::json;
using torch::optim::OptimizerOptions;

namespace {

using Values = std::map<std::string, c10::IValue>;

torch::serialize::InputArchive reread(std::istream& stream) {
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  return archive;
}

// What was written, if these are plain values and no containers with types of their own, nor archives. The first
// InputArchive that is read in a process compiles TorchScript's upgraders and registers all of its operators, which
// takes 30 ms of each rank's start: here only the pickle of the fields is read.
std::optional<Values> plain_values(std::istream& stream) {
  caffe2::serialize::PyTorchStreamReader file(&stream);
  const auto unit = std::make_shared<torch::jit::CompilationUnit>();
  bool first = true;
  const torch::jit::TypeResolver type_named = [&](const c10::QualifiedName& name) {
    TORCH_CHECK(std::exchange(first, false), "not a plain value: ", name.qualifiedName());
    return c10::StrongTypePtr(unit, c10::ClassType::create(name, unit));
  };
  // An object whose one slot holds the dictionary of all fields.
  const torch::jit::ObjLoader with_fields = [](const c10::StrongTypePtr& type, c10::IValue fields) {
    auto object = c10::ivalue::Object::create(type, 1);
    object->setSlot(0, std::move(fields));
    return object;
  };
  Values values;
  try {
    const auto module =
        torch::jit::readArchiveAndTensors("data", "", "data/", type_named, with_fields, std::nullopt, file);
    for (const auto& field : module.toObjectRef().getSlot(0).toGenericDict()) {
      values.emplace(field.key().toStringRef(), field.value());
    }
  } catch (const c10::Error&) {
    return std::nullopt;
  }
  return values;
}

// Nothing if the options cannot serialize themselves (libtorch's base class throws).
std::optional<Values> values_of(const OptimizerOptions& options) {
  torch::serialize::OutputArchive written;
  try {
    options.serialize(written);
  } catch (const c10::Error&) {
    return std::nullopt;
  }
  std::stringstream stream;
  written.save_to(stream);
  if (auto values = plain_values(stream)) return values;
  stream.clear();
  stream.seekg(0);
  auto archive = reread(stream);
  Values values;
  for (const auto& key : archive.keys()) archive.read(key, values[key]);
  return values;
}

Json to_json(const c10::IValue& value) {
  if (value.isDouble()) return json_number(value.toDouble());
  if (value.isInt()) return value.toInt();
  if (value.isBool()) return value.toBool();
  if (value.isString()) return value.toStringRef();
  if (value.isNone()) return nullptr;
  if (!value.isTuple()) return fmt::format("a {}", value.tagKind());
  auto list = Json::array();
  for (const auto& element : value.toTupleRef().elements()) list.push_back(to_json(element));
  return list;
}

// Whether it is an integer that a float cannot hold, as those beyond 2^53.
bool is_wide(const Json& value) {
  if (!value.is_number_integer()) return false;
  constexpr int64_t widest = int64_t{1} << 53;
  const auto integer = value.get<int64_t>();
  return integer > widest || integer < -widest;
}

// Converts to the kind of value that `like` is; nothing if it cannot be converted. A value of None may become a number
// or a string, and a number a wide integer and the other way round, which options of integers or floats alone refuse.
std::optional<c10::IValue> from_json(const Json& value, const c10::IValue& like) {
  const auto number = number_from(value);
  if (like.isDouble() && is_wide(value)) return c10::IValue(value.get<int64_t>());
  if ((like.isDouble() || like.isInt()) && number && !value.is_number_integer()) return c10::IValue(*number);
  if (like.isDouble() && number) return c10::IValue(*number);
  if (like.isNone() && number && !value.is_number_integer()) return c10::IValue(*number);
  if ((like.isInt() || like.isNone()) && value.is_number_integer()) return c10::IValue(value.get<int64_t>());
  if (like.isBool() && value.is_boolean()) return c10::IValue(value.get<bool>());
  if ((like.isString() || like.isNone()) && value.is_string()) return c10::IValue(value.get<std::string>());
  if (value.is_null() && !like.isTuple()) return c10::IValue();
  if (!like.isTuple() || !value.is_array() || value.size() != like.toTupleRef().elements().size()) return std::nullopt;
  std::vector<c10::IValue> elements;
  for (size_t i = 0; i < value.size(); ++i) {
    const auto element = from_json(value[i], like.toTupleRef().elements()[i]);
    if (!element) return std::nullopt;
    elements.push_back(*element);
  }
  return c10::ivalue::Tuple::create(std::move(elements));
}

[[noreturn]] void refuse(const OptimizerOptions& options, const std::string& name, const Json& value) {
  throw UsageError(fmt::format("{} have no {} that can be {}", type_of(options), name, value.dump()));
}

}  // namespace

namespace {

constexpr const char* not_finite = "float";

}  // namespace

Json json_number(double number) {
  if (std::isfinite(number)) return number;
  return {{not_finite, std::isnan(number) ? "nan" : number > 0 ? "inf" : "-inf"}};
}

std::optional<double> number_from(const Json& value) {
  if (value.is_number()) return value.get<double>();
  if (!value.is_object() || value.size() != 1 || !value.contains(not_finite)) return std::nullopt;
  constexpr auto infinity = std::numeric_limits<double>::infinity();
  const auto& name = value[not_finite];
  if (name == "inf") return infinity;
  if (name == "-inf") return -infinity;
  return name == "nan" ? std::optional(std::numeric_limits<double>::quiet_NaN()) : std::nullopt;
}

Json json_numbers(const std::map<std::string, double>& numbers) {
  auto values = Json::object();
  for (const auto& [name, number] : numbers) values[name] = json_number(number);
  return values;
}

std::map<std::string, double> numbers_from(const Json& values) {
  std::map<std::string, double> numbers;
  for (const auto& [name, value] : values.get_ref<const Json::object_t&>()) {
    const auto number = number_from(value);
    numbers[name] = number ? *number : value.get<double>();  // throws
  }
  return numbers;
}

std::string type_of(const OptimizerOptions& options) {
  if (const auto* other = dynamic_cast<const OptionsOfType*>(&options)) return other->type();
  return c10::demangle(typeid(options).name());
}

Json named_options(const OptimizerOptions& options) {
  auto named = Json::object();
  if (const auto values = values_of(options)) {
    for (const auto& [name, value] : *values) named[name] = to_json(value);
    return named;
  }
  try {
    named["lr"] = options.get_lr();
  } catch (const c10::Error&) {  // NOLINT(bugprone-empty-catch): there is none
  }
  return named;
}

void set_options(OptimizerOptions& options, const Json& named) {
  auto values = values_of(options);
  if (!values) {
    for (const auto& [name, value] : named.items()) {
      if (name != "lr" || !value.is_number()) refuse(options, name, value);
      options.set_lr(value.get<double>());
    }
    return;
  }
  bool changed = false;
  for (const auto& [name, value] : named.items()) {
    const auto place = values->find(name);
    auto fresh = place == values->end() ? std::nullopt : from_json(value, place->second);
    if (!fresh) refuse(options, name, value);
    changed = changed || *fresh != place->second;
    place->second = std::move(*fresh);
  }
  if (!changed) return;  // the first archive that is read takes 30 ms
  torch::serialize::OutputArchive written;
  for (const auto& [name, value] : *values) written.write(name, value);
  std::stringstream stream;
  written.save_to(stream);
  auto archive = reread(stream);
  const auto copy = options.clone();
  try {
    copy->serialize(archive);  // all or nothing
  } catch (const c10::Error& error) {
    throw UsageError(
        fmt::format("{} cannot be {}: {}", type_of(options), named.dump(), error.what_without_backtrace()));
  }
  options.serialize(archive);
}

std::string rounded_text(const Json& value) {
  if (value.is_number()) return fmt::format("{:.12g}", value.get<double>());
  if (!value.is_array()) return value.dump();
  std::vector<std::string> list;
  for (const auto& element : value) list.push_back(rounded_text(element));
  return fmt::format("[{}]", fmt::join(list, ","));
}

std::string describe(const OptimizerOptions& options) {
  std::vector<std::string> list;
  const auto named = named_options(options);
  for (const auto& [name, value] : named.items()) list.push_back(name + " " + value.dump());
  return fmt::format("{}", fmt::join(list, ", "));
}

}  // namespace shoal
