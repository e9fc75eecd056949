// A GAN that learns a mixture of eight Gaussians on a circle: two networks, two wrappers, two optimizers, in the usual
// order of calls.
//
//   cmake -S . -B build -DCMAKE_PREFIX_PATH="SHOAL_PREFIX;LIBTORCH" && cmake --build build
//   shoal launch -n 2 -- build/gan 1000
//
// Argument: steps (1000).

#include <shoal/shoal.h>
#include <torch/torch.h>

#include <cmath>

namespace nn = torch::nn;

constexpr int64_t modes = 8, noise = 2, batch_size = 128;
constexpr double deviation = 0.2;

torch::Tensor centres() {
  const auto angle = torch::arange(modes) * (2 * M_PI / modes);
  return 2 * torch::stack({angle.cos(), angle.sin()}, 1);
}

torch::Tensor real_samples(int64_t count) {
  return centres().index({torch::randint(modes, {count})}) + deviation * torch::randn({count, 2});
}

nn::Sequential mlp(int64_t in, int64_t out) {
  const auto slope = nn::LeakyReLUOptions().negative_slope(0.2);
  return nn::Sequential(nn::Linear(in, 128), nn::LeakyReLU(slope), nn::Linear(128, 128), nn::LeakyReLU(slope),
                        nn::Linear(128, out));
}

int main(int argc, char** argv) {
  const int64_t steps = argc > 1 ? std::stoll(argv[1]) : 1000;
  const shoal::World world = shoal::init();
  torch::manual_seed(1 + world.rank());  // every rank has its own samples; the wrappers broadcast rank 0's weights

  auto generator = mlp(noise, 2);
  auto discriminator = mlp(2, 1);
  shoal::DistributedDataParallel parallel_generator(generator, world.group());
  shoal::DistributedDataParallel parallel_discriminator(discriminator, world.group());
  torch::optim::Adam generator_optimizer(generator->parameters(), torch::optim::AdamOptions(1e-3).betas({0, 0.9}));
  torch::optim::Adam discriminator_optimizer(discriminator->parameters(),
                                             torch::optim::AdamOptions(2e-3).betas({0, 0.9}));

  const auto is_real = torch::ones({batch_size, 1}), is_fake = torch::zeros({batch_size, 1});
  nn::BCEWithLogitsLoss loss;

  for (int64_t step = 1; step <= steps; ++step) {
    // The discriminator: two backwards, whose gradients add up.
    discriminator_optimizer.zero_grad();
    auto loss_real = loss(parallel_discriminator.forward(real_samples(batch_size)), is_real);
    loss_real.backward();
    const auto fake = parallel_generator.forward(torch::randn({batch_size, noise}));
    auto loss_fake = loss(parallel_discriminator.forward(fake.detach()), is_fake);
    loss_fake.backward();
    discriminator_optimizer.step();

    // The generator, through the discriminator.
    generator_optimizer.zero_grad();
    auto loss_generator = loss(parallel_discriminator.forward(fake), is_real);
    loss_generator.backward();
    generator_optimizer.step();

    if (world.rank() == 0 && step % 250 == 0) {
      std::printf("step %ld: discriminator %.3f, generator %.3f\n", step, (loss_real + loss_fake).item<double>(),
                  loss_generator.item<double>());
    }
  }

  // How many samples lie close to a centre, and how many centres have samples.
  const torch::NoGradGuard no_grad;
  const auto [distance, nearest] = torch::cdist(generator->forward(torch::randn({1000, noise})), centres()).min(1);
  const auto close = distance < 4 * deviation;
  auto counts = torch::bincount(nearest.index({close}), {}, modes);
  world.group().all_reduce(counts).wait();
  const int64_t covered = (counts > 10 * world.size()).sum().item<int64_t>();
  if (world.rank() == 0) {
    std::printf("%ld of %ld modes, %.3f of the samples within %.2f of one\n", covered, modes,
                counts.sum().item<double>() / (1000 * world.size()), 4 * deviation);
  }
  std::printf("norm of the generator on rank %d: %.9g\n", world.rank(),
              nn::utils::parameters_to_vector(generator->parameters()).norm().item<double>());
}
