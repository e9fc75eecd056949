#include "models/registry.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <functional>
#include <mutex>
#include <utility>

#include "models/cnn.h"
#include "models/mlp.h"
#include "models/reference_init.h"
#include "shoal/error.h"

namespace shoal::models {
namespace {

// Pairs, in the order of the help text.
template <class Value>
using Table = std::vector<std::pair<std::string, Value>>;

const Table<GptConfig>& gpt_sizes() {
  static const Table<GptConfig> configs{
      {"tiny", {.layers = 2, .heads = 4, .width = 64, .context = 32}},
      {"small", {.layers = 8, .heads = 8, .width = 512, .context = 128}},
      {"large", {.layers = 16, .heads = 16, .width = 1024, .context = 128}},
      {"gpt2", {.layers = 12, .heads = 12, .width = 768, .context = 1024}},
  };
  return configs;
}

template <class Value>
std::vector<std::string> names_of(const Table<Value>& table) {
  std::vector<std::string> names;
  for (const auto& [name, value] : table) names.push_back(name);
  return names;
}

template <class Value>
const Value& find(const Table<Value>& table, const std::string& name, const std::string& what) {
  for (const auto& [known, value] : table) {
    if (known == name) return value;
  }
  throw UsageError(fmt::format("unknown {} '{}': choose one of {}", what, name, fmt::join(names_of(table), ", ")));
}

using Factory = std::function<std::shared_ptr<Model>()>;

// Factory for each size of a model.
template <class Module, class Config>
Table<Factory> factories(const Table<Config>& sizes) {
  Table<Factory> result;
  for (const auto& [size, config] : sizes) {
    result.emplace_back(size, [config = config] { return std::make_shared<Module>(config); });
  }
  return result;
}

const Table<Table<Factory>>& families() {
  static const Table<Table<Factory>> table{
      {"mlp", factories<Mlp, int64_t>({{"tiny", 128}, {"small", 1024}})},
      {"cnn", factories<Cnn, int64_t>({{"tiny", 8}, {"small", 64}})},
      {"gpt", factories<Gpt>(gpt_sizes())},
  };
  return table;
}

const Table<Factory>& sizes_of(const std::string& name) {
  return find(families(), name, "model");
}

const Factory& factory_of(const std::string& name, const std::string& size) {
  return find(sizes_of(name), size, "size of " + name);
}

// Seeds the default generator, which libtorch's initialisations use, and restores it.
class SeededGenerator {
 public:
  explicit SeededGenerator(uint64_t seed) : generator_(at::detail::getDefaultCPUGenerator()) {
    const std::lock_guard lock(generator_.mutex());
    before_ = generator_.get_state();
    generator_.set_current_seed(seed);
  }
  SeededGenerator(const SeededGenerator&) = delete;
  SeededGenerator& operator=(const SeededGenerator&) = delete;
  ~SeededGenerator() {
    const std::lock_guard lock(generator_.mutex());
    generator_.set_state(before_);
  }

 private:
  at::Generator generator_;
  at::Tensor before_;
};

// Unlike torch::nn::Module::to(), keeps the dtype of integer buffers, such as batch norm's counter.
void cast(torch::nn::Module& module, at::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  for (const auto& tensors : {module.parameters(), module.buffers()}) {
    for (const auto& tensor : tensors) {
      if (tensor.is_floating_point()) tensor.set_data(tensor.to(dtype));
    }
  }
}

}  // namespace

std::vector<std::string> model_names() {
  return names_of(families());
}

std::vector<std::string> model_sizes(const std::string& name) {
  return names_of(sizes_of(name));
}

void require_model(const std::string& name, const std::string& size) {
  factory_of(name, size);
}

GptConfig gpt_config(const std::string& size) {
  return find(gpt_sizes(), size, "size of gpt");
}

std::shared_ptr<Model> make_model(const std::string& name, const std::string& size, Init init, uint64_t seed,
                                  at::ScalarType dtype) {
  const SeededGenerator seeded(seed);
  auto model = factory_of(name, size)();
  if (init == Init::reference) reference_init(*model, seed);
  if (dtype != at::kFloat) cast(*model, dtype);
  return model;
}

}  // namespace shoal::models
