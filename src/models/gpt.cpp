#include "models/gpt.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <fmt/format.h>
#include <torch/nn/init.h>

#include "shoal/error.h"

namespace shoal::models {
namespace {

torch::nn::LayerNorm layer_norm(int64_t width) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({width}));
}

// One operator: the module's own forward adds the bias to three-dimensional inputs in a second pass.
at::Tensor linear(const torch::nn::Linear& module, const at::Tensor& x) {
  return at::linear(x, module->weight, module->bias);
}

}  // namespace

BlockImpl::BlockImpl(int64_t width, int64_t heads)
    : heads_(heads),
      ln1_(layer_norm(width)),
      // No bias, because a key's bias has a gradient of rounding noise only, which Adam would turn into full-size
      // steps.
      qkv_(torch::nn::LinearOptions(width, 3 * width).bias(false)),
      proj_(width, width),
      ln2_(layer_norm(width)),
      fc_(width, 4 * width),
      out_(4 * width, width) {
  register_module("ln1", ln1_);
  register_module("qkv", qkv_);
  register_module("proj", proj_);
  register_module("ln2", ln2_);
  register_module("fc", fc_);
  register_module("out", out_);
}

at::Tensor BlockImpl::attention(const at::Tensor& x) {
  const int64_t batch = x.size(0), time = x.size(1), width = x.size(2);
  auto parts = linear(qkv_, x).split(width, 2);
  for (auto& part : parts) part = part.view({batch, time, heads_, width / heads_}).transpose(1, 2);
  const auto y = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], /*attn_mask=*/{}, /*dropout_p=*/0.0,
                                                  /*is_causal=*/true);
  return linear(proj_, y.transpose(1, 2).reshape({batch, time, width}));
}

at::Tensor BlockImpl::forward(at::Tensor x) {
  x = x + attention(ln1_(x));
  return x + linear(out_, at::gelu(linear(fc_, ln2_(x)), "tanh"));
}

Gpt::Gpt(const GptConfig& config)
    : context_(config.context),
      wte_(GptConfig::vocabulary, config.width),
      wpe_(config.context, config.width),
      ln_f_(layer_norm(config.width)) {
  // libtorch's standard deviation of 1 suits an input table; an output projection would start with a loss of dozens.
  constexpr double deviation = 0.02;
  torch::nn::init::normal_(wte_->weight, 0.0, deviation);
  torch::nn::init::normal_(wpe_->weight, 0.0, deviation);
  for (int64_t i = 0; i < config.layers; ++i) blocks_->push_back(Block(config.width, config.heads));
  register_module("wte", wte_);
  register_module("wpe", wpe_);
  register_module("blocks", blocks_);
  register_module("ln_f", ln_f_);
}

at::Tensor Gpt::forward(at::Tensor input) {
  const int64_t time = input.size(1);
  if (time > context_) {
    throw UsageError(fmt::format("gpt: a sequence of {} tokens is longer than the context of {}", time, context_));
  }
  auto x = wte_(input) + wpe_(at::arange(time, input.options()));
  for (const auto& block : *blocks_) x = block->as<BlockImpl>()->forward(x);
  // The head is not a module: libtorch would list the shared weight twice, and its optimizers would step it twice.
  return at::linear(ln_f_(x), wte_->weight);
}

std::vector<std::shared_ptr<torch::nn::Module>> Gpt::units() const {
  return blocks_->children();
}

}  // namespace shoal::models
