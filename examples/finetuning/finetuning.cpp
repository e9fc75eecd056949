// Fine-tuning by LoRA of a Llama in Hugging Face's layout: loads model.safetensors, compares its logits with those of
// the library transformers, trains adapters on text with DistributedDataParallel, and writes the merged model, which
// transformers opens. Method: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (ICLR 2022).
//
//   cmake -S . -B build -DCMAKE_PREFIX_PATH="SHOAL_PREFIX;LIBTORCH" && cmake --build build
//   python make_model.py llama && cp -r llama tuned      # a small one with random weights
//   shoal launch -n 2 -- build/finetuning llama /usr/share/common-licenses/GPL-3 tuned/model.safetensors 200
//   python make_model.py tuned --compare
//
// Arguments: folder of the model, file of text (bytes are tokens), file for the merged model, steps (200).

#include <shoal/shoal.h>
#include <torch/torch.h>

#include <cmath>
#include <fstream>
#include <iterator>

namespace nn = torch::nn;

// As in config.json.
constexpr int64_t vocabulary = 256, width = 128, hidden = 256, layers = 2, heads = 4, key_value_heads = 2;
constexpr double rope_theta = 10000, norm_eps = 1e-6;

// y = W x + B A x. W is frozen; A and B are the adapter, while there is one.
struct LinearImpl : nn::Module {
  LinearImpl(int64_t in, int64_t out) {
    weight = register_parameter("weight", torch::empty({out, in}), /*requires_grad=*/false);
  }

  void add_adapter(int64_t rank) {
    down = register_module("lora_A", nn::Linear(nn::LinearOptions(weight.size(1), rank).bias(false)));
    up = register_module("lora_B", nn::Linear(nn::LinearOptions(rank, weight.size(0)).bias(false)));
    nn::init::zeros_(up->weight);
  }

  void merge_adapter() {
    const torch::NoGradGuard no_grad;
    weight.add_(torch::mm(up->weight, down->weight));
    unregister_module("lora_A");
    unregister_module("lora_B");
    down = up = nullptr;
  }

  torch::Tensor forward(const torch::Tensor& x) {
    const auto y = torch::linear(x, weight);
    return down.is_empty() ? y : y + up(down(x));
  }

  torch::Tensor weight;
  nn::Linear down{nullptr}, up{nullptr};
};
TORCH_MODULE(Linear);

struct RMSNormImpl : nn::Module {
  RMSNormImpl() { weight = register_parameter("weight", torch::ones({width}), /*requires_grad=*/false); }
  torch::Tensor forward(const torch::Tensor& x) { return torch::rms_norm(x, {width}, weight, norm_eps); }
  torch::Tensor weight;
};
TORCH_MODULE(RMSNorm);

// Rotary position embedding of x [batch, heads, length, size].
torch::Tensor rotate(const torch::Tensor& x) {
  const auto length = x.size(2), size = x.size(3);
  const auto frequency = torch::pow(rope_theta, -torch::arange(0, size, 2).to(torch::kFloat) / size);
  const auto angle = torch::outer(torch::arange(length).to(torch::kFloat), frequency).repeat({1, 2});
  const auto halves = x.chunk(2, -1);
  return x * angle.cos() + torch::cat({-halves[1], halves[0]}, -1) * angle.sin();
}

struct AttentionImpl : nn::Module {
  AttentionImpl() {
    q_proj = register_module("q_proj", Linear(width, width));
    k_proj = register_module("k_proj", Linear(width, key_value_heads * width / heads));
    v_proj = register_module("v_proj", Linear(width, key_value_heads * width / heads));
    o_proj = register_module("o_proj", Linear(width, width));
  }

  torch::Tensor forward(const torch::Tensor& x) {
    const auto split = [&](const torch::Tensor& y) {
      return y.view({x.size(0), x.size(1), -1, width / heads}).transpose(1, 2);
    };
    const auto several = [](const torch::Tensor& y) { return y.repeat_interleave(heads / key_value_heads, 1); };
    const auto q = rotate(split(q_proj(x))), k = rotate(split(k_proj(x))), v = split(v_proj(x));
    const auto y = torch::scaled_dot_product_attention(q, several(k), several(v), {}, 0, /*is_causal=*/true);
    return o_proj(y.transpose(1, 2).reshape_as(x));
  }

  Linear q_proj{nullptr}, k_proj{nullptr}, v_proj{nullptr}, o_proj{nullptr};
};
TORCH_MODULE(Attention);

struct MlpImpl : nn::Module {
  MlpImpl() {
    gate_proj = register_module("gate_proj", Linear(width, hidden));
    up_proj = register_module("up_proj", Linear(width, hidden));
    down_proj = register_module("down_proj", Linear(hidden, width));
  }
  torch::Tensor forward(const torch::Tensor& x) { return down_proj(torch::silu(gate_proj(x)) * up_proj(x)); }
  Linear gate_proj{nullptr}, up_proj{nullptr}, down_proj{nullptr};
};
TORCH_MODULE(Mlp);

struct LayerImpl : nn::Module {
  LayerImpl() {
    input_layernorm = register_module("input_layernorm", RMSNorm());
    self_attn = register_module("self_attn", Attention());
    post_attention_layernorm = register_module("post_attention_layernorm", RMSNorm());
    mlp = register_module("mlp", Mlp());
  }
  torch::Tensor forward(torch::Tensor x) {
    x = x + self_attn(input_layernorm(x));
    return x + mlp(post_attention_layernorm(x));
  }
  RMSNorm input_layernorm{nullptr}, post_attention_layernorm{nullptr};
  Attention self_attn{nullptr};
  Mlp mlp{nullptr};
};
TORCH_MODULE(Layer);

struct LlamaImpl : nn::Module {
  LlamaImpl() {
    auto model = register_module("model", std::make_shared<nn::Module>());
    embed_tokens = model->register_module("embed_tokens", nn::Embedding(vocabulary, width));
    embed_tokens->weight.set_requires_grad(false);
    for (int64_t i = 0; i < layers; ++i) blocks->push_back(Layer());
    model->register_module("layers", blocks);
    norm = model->register_module("norm", RMSNorm());
    lm_head = register_module("lm_head", Linear(width, vocabulary));
  }

  torch::Tensor forward(const torch::Tensor& tokens) {
    auto x = embed_tokens(tokens);
    for (auto& block : *blocks) x = block->as<Layer>()->forward(x);
    return lm_head(norm(x));
  }

  nn::Embedding embed_tokens{nullptr};
  nn::ModuleList blocks;
  RMSNorm norm{nullptr};
  Linear lm_head{nullptr};
};
TORCH_MODULE(Llama);

// What make_model.py writes beside the model.
struct Reference : nn::Module {
  torch::Tensor tokens = register_buffer("tokens", torch::empty({2, 32}, torch::kLong));
  torch::Tensor logits = register_buffer("logits", torch::empty({2, 32, vocabulary}));
};

double difference(Llama model, const Reference& reference) {
  const torch::NoGradGuard no_grad;
  return (model->forward(reference.tokens) - reference.logits).abs().max().item<double>();
}

torch::Tensor read_bytes(const char* path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  if (bytes.size() < 1000) throw std::runtime_error(std::string(path) + ": too little text");
  return torch::from_blob(bytes.data(), {int64_t(bytes.size())}, torch::kByte).to(torch::kLong);
}

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: finetuning MODEL TEXT MERGED [STEPS]\n");
    return 2;
  }
  const std::string folder = argv[1];
  const int64_t steps = argc > 4 ? std::stoll(argv[4]) : 200, length = 64, batch_size = 16;
  const shoal::World world = shoal::init();

  Llama model;
  shoal::load_module(folder, model);
  Reference reference;
  shoal::load_module(folder + "/reference.safetensors", reference);
  const double before = difference(model, reference);
  if (world.rank() == 0) std::printf("largest difference of logits from those of transformers: %.3g\n", before);
  if (before > 1e-4) return 1;

  torch::manual_seed(1 + world.rank());
  for (const auto& part : model->modules()) {
    if (auto* linear = part->as<Linear>()) linear->add_adapter(/*rank=*/8);
  }
  shoal::DistributedDataParallel parallel(model, world.group());  // frozen parameters are not reduced
  std::vector<torch::Tensor> trainable;
  for (const auto& parameter : model->parameters()) {
    if (parameter.requires_grad()) trainable.push_back(parameter);
  }
  torch::optim::AdamW optimizer(trainable, torch::optim::AdamWOptions(5e-3).weight_decay(0));
  shoal::CosineWithWarmup schedule(optimizer, {.total_steps = steps, .warmup_steps = steps / 20});

  const auto text = read_bytes(argv[2]);
  for (int64_t step = 1; step <= steps; ++step) {
    const auto begins = torch::randint(text.size(0) - length, {batch_size, 1});
    const auto windows = text.index({begins + torch::arange(length + 1)});
    const auto logits = parallel.forward(windows.slice(1, 0, -1));
    auto loss = torch::cross_entropy_loss(logits.flatten(0, 1), windows.slice(1, 1).flatten());
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    schedule.step();
    if (step % 50 == 0 && world.rank() == 0) std::printf("step %ld: loss %.3f\n", step, loss.item<double>());
  }

  for (const auto& part : model->modules()) {
    if (auto* linear = part->as<Linear>()) linear->merge_adapter();
  }
  if (world.rank() == 0) {
    std::printf("largest difference after fine-tuning: %.5g\n", difference(model, reference));
    shoal::save_module(argv[3], model);
  }
}
