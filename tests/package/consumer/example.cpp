#include <shoal/shoal.h>
#include <torch/torch.h>

int main() {
  shoal::World world = shoal::init();  // torchrun, mpirun, srun, shoal launch, or alone
  torch::manual_seed(1 + world.rank());
  torch::nn::Sequential model(torch::nn::Linear(8, 32), torch::nn::Tanh(), torch::nn::Linear(32, 1));
  shoal::DistributedDataParallel parallel(model, world.group());
  torch::optim::AdamW optimizer(model->parameters(), 1e-2);
  torch::Tensor loss;
  for (int step = 0; step < 200; ++step) {
    auto x = torch::randn({16, 8});
    auto y = x.pow(2).sum(1, /*keepdim=*/true);
    const auto scope = parallel.no_sync(step % 2 == 0);  // two micro-batches per update
    loss = torch::mse_loss(parallel.forward(x), y);
    loss.backward();  // gradients are the mean over all ranks when this returns
    if (step % 2 == 0) continue;
    optimizer.step();
    optimizer.zero_grad();
  }
  if (world.rank() == 0) std::printf("loss %.3f on %d ranks\n", loss.item<float>(), world.size());
}
