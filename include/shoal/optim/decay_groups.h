#pragma once
// Param groups that leave biases and norms without weight decay.

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <utility>
#include <vector>

namespace shoal {

struct DecaySplit {
  std::vector<at::Tensor> decayed, spared;
};

// Each of the module's parameters once, a tied one by its first name. Spared: vectors and scalars (biases, and the
// weights of nearly all norms), whatever has "bias" in its own name, and torch::nn::LayerNorm's weights of any shape.
// What else is to be spared, such as embeddings, moves by hand. Not collective.
DecaySplit split_by_decay(const torch::nn::Module& module);

template <class Options>
struct DecayGroups {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  Options defaults;
};

// For an optimizer with these options: a group of what decays, then one of the rest, whose weight_decay is 0.
// `Options`: libtorch's, shoal's, or any that is made from a rate and has weight_decay.
//
//   const auto [groups, defaults] =
//       shoal::decay_groups(*model, torch::optim::AdamWOptions(1e-3).weight_decay(0.1));
//   shoal::FusedAdamW optimizer(groups, defaults);
//
// Give the optimizer these defaults and no others: libtorch 2.13 takes a group's value that equals its type's own
// default for one that was not set, and puts the optimizer's in its place. So the defaults' weight_decay is the type's.
template <class Options>
DecayGroups<Options> decay_groups(const torch::nn::Module& module, const Options& options) {
  auto split = split_by_decay(module);
  auto spared = options, defaults = options;
  spared.weight_decay(0);
  defaults.weight_decay(Options(options.lr()).weight_decay());
  DecayGroups<Options> made{{}, defaults};
  made.groups.emplace_back(std::move(split.decayed), std::make_unique<Options>(options));
  made.groups.emplace_back(std::move(split.spared), std::make_unique<Options>(spared));
  return made;
}

}  // namespace shoal
