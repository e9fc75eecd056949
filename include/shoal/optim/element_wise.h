#pragma once
// Which optimizers may be given pieces of a parameter.

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "shoal/optim/accum_adam.h"
#include "shoal/optim/fused_adagrad.h"
#include "shoal/optim/fused_adam.h"
#include "shoal/optim/fused_adamw.h"
#include "shoal/optim/fused_sgd.h"

namespace shoal {

// True when every element's update depends on this element's own gradient and state only, so that updating the pieces
// of a parameter on different ranks equals updating the whole. A strategy that cuts parameters asks for it; for other
// optimizers (LAMB's norms, Adafactor's rows and columns, Muon's products) a rank must own whole parameters.
//
// False unless stated, also for classes derived from these. For an element-wise optimizer of your own:
//
//   template <>
//   inline constexpr bool shoal::element_wise<MyOptimizer> = true;
template <class Optimizer>
inline constexpr bool element_wise = false;

template <>
inline constexpr bool element_wise<torch::optim::SGD> = true;
template <>
inline constexpr bool element_wise<torch::optim::Adam> = true;
template <>
inline constexpr bool element_wise<torch::optim::AdamW> = true;
template <>
inline constexpr bool element_wise<torch::optim::RMSprop> = true;
template <>
inline constexpr bool element_wise<torch::optim::Adagrad> = true;
template <>
inline constexpr bool element_wise<FusedSGD> = true;
template <>
inline constexpr bool element_wise<FusedAdam> = true;
template <>
inline constexpr bool element_wise<FusedAdamW> = true;
template <>
inline constexpr bool element_wise<FusedAdagrad> = true;
template <>
inline constexpr bool element_wise<AccumAdam> = true;
template <>
inline constexpr bool element_wise<AccumAdamW> = true;

}  // namespace shoal
