#include "optim/param_groups.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/serialize.h>

#include <algorithm>
#include <sstream>

namespace shoal {

using torch::optim::OptimizerParamGroup;

namespace {

// "betas (0.9, 0.999), eps 1e-08, lr 0.001": what the options say of themselves when they are serialised.
std::string describe(const torch::optim::OptimizerOptions& options) {
  torch::serialize::OutputArchive written;
  options.serialize(written);
  std::stringstream stream;
  written.save_to(stream);
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  auto keys = archive.keys();
  std::sort(keys.begin(), keys.end());
  std::ostringstream text;
  for (const auto& key : keys) {
    c10::IValue value;
    archive.read(key, value);
    text << (text.tellp() > 0 ? ", " : "") << key << " " << value;
  }
  return text.str();
}

}  // namespace

std::vector<OptimizerParamGroup> empty_like(const std::vector<OptimizerParamGroup>& groups) {
  std::vector<OptimizerParamGroup> empty;
  for (const auto& group : groups) empty.emplace_back(std::vector<at::Tensor>(), group.options().clone());
  return empty;
}

void copy_options(const std::vector<OptimizerParamGroup>& groups, torch::optim::Optimizer& share) {
  for (size_t number = 0; number < groups.size(); ++number) {
    share.param_groups()[number].set_options(groups[number].options().clone());
  }
}

std::vector<std::string> describe(const std::vector<OptimizerParamGroup>& groups) {
  std::vector<std::string> lines;
  for (size_t number = 0; number < groups.size(); ++number) {
    lines.push_back(fmt::format("param group {}: {}", number, describe(groups[number].options())));
    for (const auto& parameter : groups[number].params()) {
      lines.push_back(fmt::format("parameter {} [{}]{}", c10::toString(parameter.scalar_type()),
                                  fmt::join(parameter.sizes(), ", "), parameter.requires_grad() ? "" : " frozen"));
    }
  }
  return lines;
}

}  // namespace shoal
