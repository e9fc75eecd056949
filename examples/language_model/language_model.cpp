// A GPT on bytes of text with FullyShardedDataParallel: parameters in bfloat16 with float32 main copies, a cosine
// schedule, checkpoints from which it resumes exactly, and a sample at the end.
//
//   cmake -S . -B build -DCMAKE_PREFIX_PATH="SHOAL_PREFIX;LIBTORCH" && cmake --build build
//   shoal launch -n 2 -- build/language_model /usr/share/common-licenses runs/licences 600
//
// Arguments: file or folder of text; folder of checkpoints, where training goes on if it has one; steps (600); the step
// at which this run ends, as if its time were over (the last).

#include <shoal/shoal.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>

namespace nn = torch::nn;
namespace fs = std::filesystem;

constexpr int64_t context = 128, width = 128, heads = 4, layers = 4;

struct BlockImpl : nn::Module {
  BlockImpl() {
    norm1 = register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({width})));
    norm2 = register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({width})));
    attention = register_module("attention", nn::Linear(width, 3 * width));
    projection = register_module("projection", nn::Linear(width, width));
    mlp =
        register_module("mlp", nn::Sequential(nn::Linear(width, 4 * width), nn::GELU(), nn::Linear(4 * width, width)));
  }

  torch::Tensor forward(torch::Tensor x) {
    const auto batch = x.size(0), length = x.size(1);
    const auto parts = attention(norm1(x)).view({batch, length, 3, heads, width / heads}).permute({2, 0, 3, 1, 4});
    const auto y = torch::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0, /*is_causal=*/true);
    x = x + projection(y.transpose(1, 2).reshape({batch, length, width}));
    return x + mlp->forward(norm2(x));
  }

  nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  nn::Linear attention{nullptr}, projection{nullptr};
  nn::Sequential mlp{nullptr};
};
TORCH_MODULE(Block);

struct GPTImpl : nn::Module {
  GPTImpl() {
    tokens = register_module("tokens", nn::Embedding(256, width));
    positions = register_module("positions", nn::Embedding(context, width));
    for (int64_t i = 0; i < layers; ++i) blocks->push_back(Block());
    register_module("blocks", blocks);
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({width})));
    for (auto& parameter : parameters()) {
      if (parameter.dim() == 2) nn::init::normal_(parameter, 0, 0.02);
    }
  }

  torch::Tensor forward(const torch::Tensor& input) {
    auto x = tokens(input) + positions(torch::arange(input.size(1)));
    for (auto& block : *blocks) x = block->as<Block>()->forward(x);
    return torch::linear(norm(x), tokens->weight);  // the output layer is the embedding
  }

  nn::Embedding tokens{nullptr}, positions{nullptr};
  nn::ModuleList blocks;
  nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(GPT);

torch::Tensor read_text(const fs::path& path) {
  std::set<fs::path> files;
  if (!fs::is_directory(path)) files.insert(path);
  if (fs::is_directory(path)) {
    for (const auto& entry : fs::directory_iterator(path)) {
      if (entry.is_regular_file() && !entry.is_symlink()) files.insert(entry.path());
    }
  }
  std::vector<char> bytes;
  for (const auto& name : files) {
    std::ifstream file(name, std::ios::binary);
    bytes.insert(bytes.end(), std::istreambuf_iterator<char>(file), {});
  }
  if (bytes.size() < 100 * context) throw std::runtime_error(path.string() + ": too little text");
  return torch::from_blob(bytes.data(), {int64_t(bytes.size())}, torch::kByte).clone();
}

std::string sample(GPT model, std::string text, int64_t length) {
  const torch::NoGradGuard no_grad;
  while (int64_t(text.size()) < length) {
    const auto begin = std::max<int64_t>(0, int64_t(text.size()) - context);
    const auto input = torch::from_blob(text.data() + begin, {1, int64_t(text.size()) - begin}, torch::kByte);
    const auto logits = model->forward(input.to(torch::kLong)).select(1, -1).squeeze(0) / 0.8;  // temperature
    text.push_back(char(logits.softmax(0).multinomial(1).item<int64_t>()));
  }
  return text;
}

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: language_model TEXT RUN [STEPS] [STOP]\n");
    return 2;
  }
  const std::string run = argv[2];
  const int64_t steps = argc > 3 ? std::stoll(argv[3]) : 600, stop = argc > 4 ? std::stoll(argv[4]) : steps;
  const int64_t batch_size = 16;
  const shoal::World world = shoal::init();
  torch::manual_seed(1 + world.rank());
  const auto text = read_text(argv[1]);

  GPT model;
  shoal::FullyShardedDataParallel parallel(model, world.group(),
                                           {.auto_wrap_policy = shoal::wrap_type<BlockImpl>(),
                                            .param_dtype = torch::kBFloat16,
                                            .reduce_dtype = torch::kFloat});
  shoal::FullyShardedOptimizer<shoal::FusedAdamW> optimizer(
      parallel, torch::optim::AdamWOptions(2e-3).betas({0.9, 0.95}).weight_decay(0.1), {.clip_grad = 1});
  shoal::CosineWithWarmup schedule(optimizer, {.total_steps = steps, .warmup_steps = steps / 20, .final_factor = 0.1});
  shoal::TrainingState training(parallel, optimizer);
  training.with(schedule);

  int64_t step = 0;
  if (const auto loaded = shoal::load_latest(run, training)) {
    step = loaded->step;
    if (world.rank() == 0) std::printf("resumed at step %ld\n", step);
  }

  while (step < stop) {
    ++step;
    // Random windows of the text, other ones on each rank; a checkpoint has the state of each rank's generator.
    const auto begins = torch::randint(text.size(0) - context, {batch_size, 1});
    const auto windows = text.index({begins + torch::arange(context + 1)}).to(torch::kLong);
    const auto logits = parallel.forward(windows.slice(1, 0, -1));
    auto loss = torch::cross_entropy_loss(logits.flatten(0, 1).to(torch::kFloat), windows.slice(1, 1).flatten());
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    schedule.step();
    if (step % 100 == 0 && step < stop) shoal::save_async(run, training, {.step = step, .keep_last = 2});
    if (step % 20 == 0 || step == stop) {
      auto mean = loss.detach();
      world.group().all_reduce(mean, shoal::ReduceOp::avg).wait();
      if (world.rank() == 0) std::printf("step %ld: loss %.6f\n", step, mean.item<double>());
    }
  }
  shoal::save(run, training, {.step = step, .keep_last = 2});

  parallel.unwrap();  // every rank has the whole model again
  if (world.rank() == 0 && step == steps) std::printf("%s\n", sample(model, "The licens", 400).c_str());
}
