#pragma once
// Byte-level decoder whose output projection is the transposed token embedding.

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include "models/model.h"

namespace shoal::models {

struct GptConfig {
  int64_t layers;
  int64_t heads;
  int64_t width;
  int64_t context;  // maximum length of a sequence, in tokens

  static constexpr int64_t vocabulary = 256;
};

// Pre-norm transformer block: x + attention(ln1(x)), then x + mlp(ln2(x)).
class BlockImpl : public torch::nn::Module {
 public:
  BlockImpl(int64_t width, int64_t heads);
  at::Tensor forward(at::Tensor x);

 private:
  at::Tensor attention(const at::Tensor& x);

  int64_t heads_;
  torch::nn::LayerNorm ln1_;
  torch::nn::Linear qkv_, proj_;
  torch::nn::LayerNorm ln2_;
  torch::nn::Linear fc_, out_;
};
TORCH_MODULE(Block);

class Gpt : public Model {
 public:
  explicit Gpt(const GptConfig& config);
  // UsageError for sequences longer than the context.
  at::Tensor forward(at::Tensor input) override;
  std::vector<std::shared_ptr<torch::nn::Module>> units() const override;

 private:
  int64_t context_;
  torch::nn::Embedding wte_, wpe_;
  torch::nn::ModuleList blocks_;
  torch::nn::LayerNorm ln_f_;
};

}  // namespace shoal::models
