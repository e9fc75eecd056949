// DiLoCo: ranks that are joined by slow links train by themselves and exchange parameters every 20 steps, in two parts
// and in bfloat16, while the next steps go on. A recurrent model of bytes reads any text.
// Method: Douillard et al., "DiLoCo" (2023) and "Streaming DiLoCo with overlapping communication" (2025).
//
//   cmake -S . -B build -DCMAKE_PREFIX_PATH="SHOAL_PREFIX;LIBTORCH" && cmake --build build
//   shoal launch -n 2 -- build/diloco /usr/share/common-licenses/GPL-3 400
//
// On two hosts: MASTER_ADDR=HOST0 MASTER_PORT=29500 WORLD_SIZE=2 RANK=0 build/diloco ..., and with RANK=1 on the other.
// Arguments: file of text, steps (400).

#include <shoal/shoal.h>
#include <torch/torch.h>

#include <fstream>
#include <iterator>

namespace nn = torch::nn;

struct ByteModelImpl : nn::Module {
  explicit ByteModelImpl(int64_t width) {
    embedding = register_module("embedding", nn::Embedding(256, width));
    gru = register_module("gru", nn::GRU(nn::GRUOptions(width, width).batch_first(true)));
    head = register_module("head", nn::Linear(width, 256));
  }

  torch::Tensor forward(const torch::Tensor& tokens) { return head(std::get<0>(gru->forward(embedding(tokens)))); }

  nn::Embedding embedding{nullptr};
  nn::GRU gru{nullptr};
  nn::Linear head{nullptr};
};
TORCH_MODULE(ByteModel);

torch::Tensor read_bytes(const char* path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  if (bytes.empty()) throw std::runtime_error(std::string(path) + ": no text there");
  return torch::from_blob(bytes.data(), {int64_t(bytes.size())}, torch::kByte).to(torch::kLong);
}

// The loss of predicting each byte of `windows` [n, length + 1] from those before it.
torch::Tensor loss_of(ByteModel model, const torch::Tensor& windows) {
  const auto logits = model->forward(windows.slice(1, 0, -1));
  return torch::cross_entropy_loss(logits.flatten(0, 1), windows.slice(1, 1).flatten());
}

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: diloco TEXT [STEPS]\n");
    return 2;
  }
  const int64_t steps = argc > 2 ? std::stoll(argv[2]) : 400;
  const int64_t length = 64, batch_size = 16, every = 20;
  const shoal::World world = shoal::init();
  torch::manual_seed(1 + world.rank());

  // The last tenth is for evaluation; the rest is cut into one part per rank.
  const auto windows = read_bytes(argv[1]).unfold(0, length + 1, length / 2);
  const int64_t held_out = windows.size(0) / 10, train = (windows.size(0) - held_out) / world.size();
  const auto mine = windows.narrow(0, world.rank() * train, train);

  ByteModel model(128);
  torch::optim::AdamW optimizer(model->parameters(), 4e-3);
  shoal::LocalUpdates local(model, optimizer, world.group(),
                            {.every = every,
                             .outer = shoal::OuterNesterov{.lr = 0.7, .momentum = 0.9},
                             .fragments = 2,                      // one half of the model every 10 steps
                             .delay = 2,                          // sent while two more steps are computed
                             .reduce_dtype = torch::kBFloat16});  // half the bytes

  const auto bytes_before = world.group().statistics().bytes;
  double sum = 0;
  for (int64_t step = 1; step <= steps; ++step) {
    const auto batch = mine.index({torch::randint(train, {batch_size})});
    auto loss = loss_of(model, batch);
    loss.backward();
    nn::utils::clip_grad_norm_(model->parameters(), 1);
    local.step();
    local.zero_grad();
    sum += loss.item<double>();
    if (step % 50 == 0 && world.rank() == 0) std::printf("step %ld: loss %.3f\n", step, sum / 50);
    if (step % 50 == 0) sum = 0;
  }
  const double sent = double(world.group().statistics().bytes - bytes_before);

  const auto mean = local.mean_parameters();  // what to evaluate, and to give to save_module()
  const torch::NoGradGuard no_grad;
  const double held_out_loss = loss_of(model, windows.slice(0, -held_out)).item<double>();
  std::printf("rank %d: loss of held-out text %.6f\n", world.rank(), held_out_loss);
  if (world.rank() == 0) {
    double every_step = 0;
    for (const auto& parameter : model->parameters()) every_step += double(steps) * double(parameter.nbytes());
    std::printf("exchanged %.2f MB; gradients in every step would be %.2f MB\n", sent / 1e6, every_step / 1e6);
  }
}
