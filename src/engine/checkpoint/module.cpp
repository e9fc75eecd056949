// Loading of a checkpoint's parameters and buffers into a bare module.

#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>

#include "checkpoint/format/safetensors.h"
#include "checkpoint/loading/match.h"
#include "checkpoint/loading/reader.h"
#include "checkpoint/pt/pt_file.h"
#include "engine/checkpoint/resized_buffers.h"
#include "module/walk.h"
#include "shoal/checkpoint.h"
#include "shoal/deferred_init.h"

namespace shoal {
namespace {

// Those of the module's state.
std::vector<NamedTensor> tensors_of(const torch::nn::Module& module, std::vector<std::string>* transient = nullptr) {
  auto tensors = walk(module, {});
  auto& list = tensors.parameters;
  for (auto& entry : tensors.buffers) {
    if (!entry.transient) {
      list.push_back(std::move(entry));
    } else if (transient != nullptr) {
      transient->push_back(entry.name);
    }
  }
  return list;
}

// The file may have a tied tensor under another of its names.
void take_stored_names(std::vector<NamedTensor>& list, const CheckpointReader& reader, const std::string& prefix) {
  const auto is_stored = [&](const std::string& name) { return reader.has(prefix + name, "model"); };
  for (auto& entry : list) {
    if (entry.aliases.empty() || is_stored(entry.name)) continue;
    const auto alias = std::find_if(entry.aliases.begin(), entry.aliases.end(), is_stored);
    if (alias != entry.aliases.end()) std::swap(entry.name, *alias);
  }
}

}  // namespace

Loaded load_module(const std::filesystem::path& path, torch::nn::Module& module, const LoadModuleOptions& options) {
  const torch::NoGradGuard no_grad;
  const CheckpointReader reader(path, options.verify);
  ResizedBuffers resized;
  resized.take(module, reader, options.prefix);
  std::vector<std::string> transient;
  auto list = tensors_of(module, &transient);
  take_stored_names(list, reader, options.prefix);
  std::vector<WantedTensor> wanted;
  for (const auto& name : transient) {  // a file may have them
    const auto stored = options.prefix + name;
    if (reader.has(stored, "model")) wanted.push_back({stored, reader.index().tensors.at(stored).shape});
  }
  for (const auto& entry : list) {
    wanted.push_back({options.prefix + entry.name, entry.tensor.sizes().vec(), entry.tensor.scalar_type()});
    for (const auto& alias : entry.aliases) wanted.back().aliases.push_back(options.prefix + alias);
  }
  Match match;
  try {
    match = require_match(reader, wanted, options.partial, "model", options.prefix);
  } catch (...) {
    resized.undo();
    throw;
  }
  for (const auto& entry : list) {
    const auto name = options.prefix + entry.name;
    materialize({entry.tensor});
    if (!reader.has(name, "model")) continue;
    const auto values = entry.tensor.detach();
    const bool convert = values.is_floating_point() && at::isFloatingType(reader.tensor(name).dtype);
    reader.read(name, {0, values.numel()}, values, {.order = {}, .convert = convert});
  }
  const auto& index = reader.index();
  Loaded loaded;
  loaded.path = reader.path();
  loaded.step = index.step;
  loaded.strategy = index.strategy;
  loaded.ranks = index.world_size;
  if (!match.exact()) loaded.differences.push_back(match.describe());
  return loaded;
}

void save_module(const std::filesystem::path& file, const torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  const bool pt = file.extension() == ".pt";
  if (!pt && file.extension() != ".safetensors") {
    throw UsageError(fmt::format("save_module: {} is neither a .pt nor a .safetensors file", file.string()));
  }
  NamedTensors tensors;
  for (const auto& entry : tensors_of(module)) {
    if (entry.tensor.numel() > 0) entry.tensor.const_data_ptr();  // throws where this rank does not hold it
    const auto values = entry.tensor.detach();
    tensors.emplace_back(entry.name, values);
    for (const auto& alias : entry.aliases) {
      if (pt) tensors.emplace_back(alias, values);
    }
  }
  std::error_code error;  // writing says what is wrong
  std::filesystem::create_directories(file.parent_path(), error);
  pt ? save_pt(file, tensors) : save_safetensors(file.string(), tensors, {{"format", "pt"}});
}

}  // namespace shoal
