// Two spirals told apart by a small network, in an ordinary loop that goes on when ranks are killed, with the losses of
// a run in which none is. Six lines, which are numbered, make it elastic; behind the number is what a plain loop has
// there.
//
//   cmake -S . -B build -DCMAKE_PREFIX_PATH="SHOAL_PREFIX;LIBTORCH" && cmake --build build
//   shoal launch -n 3 --elastic 1 -- build/elastic 500      # and meanwhile: kill -9 one of its processes
//
// Arguments: epochs (50), file of metrics for `shoal report` (none).

#include <shoal/shoal.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdio>

namespace nn = torch::nn;

// Points of two spirals, and to which one they belong.
struct Spirals : torch::data::datasets::Dataset<Spirals> {
  torch::data::Example<> get(size_t index) override {
    const double way = static_cast<double>(index / 2) / 500, angle = 9 * way + static_cast<double>(index % 2) * M_PI;
    return {torch::tensor({way * std::cos(angle), way * std::sin(angle)}, torch::kFloat),
            torch::tensor(static_cast<int64_t>(index % 2))};
  }
  std::optional<size_t> size() const override { return 996; }
};

int main(int argc, char** argv) {
  const size_t epochs = argc > 1 ? std::stoul(argv[1]) : 50;
  const std::string metrics = argc > 2 ? argv[2] : "";
  const shoal::World world = shoal::init();
  const int64_t samples = 32 * world.size();  // in a step of all ranks
  torch::manual_seed(1);

  nn::Sequential model(nn::Linear(2, 64), nn::Tanh(), nn::Linear(64, 64), nn::Tanh(), nn::Linear(64, 2));
  shoal::DistributedDataParallel parallel(model, world.group());
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(5e-3));
  auto dataset = Spirals().map(torch::data::transforms::Stack<>());
  shoal::DistributedSampler sampler(*dataset.size(), world.group());
  const auto loss_of = [&](const torch::data::Example<>& batch) {
    return nn::functional::cross_entropy(parallel.forward(batch.data), batch.target);
  };
  shoal::Elastic elastic(world, parallel, optimizer, sampler, {.keep_global_batch = samples, .metrics = metrics});  // 1

  for (size_t epoch = 1; epoch <= epochs; ++epoch) {
    sampler.set_epoch(epoch);
    while (elastic.in_epoch()) {                                                            // 2
      auto loader = torch::data::make_data_loader(dataset, sampler, elastic.batch_size());  // 3: 32
      for (auto& batch : *loader) {
        const auto compute = [&] { loss_of(batch).backward(); };  // 4: loss_of(batch).backward();
        if (!elastic.step(batch.data.size(0), compute, [&] { optimizer.step(); })) break;  // 5: optimizer.step();
        optimizer.zero_grad();
      }
    }  // 6
    if (world.rank() == 0) std::printf("epoch %zu on %d rank(s)\n", epoch, world.size());
    std::fflush(stdout);
  }
  double norm = 0;
  for (const auto& parameter : model->parameters()) norm += parameter.norm().item<double>();
  std::printf("norm of the parameters on rank %d: %.6f\n", world.rank(), norm);
}
