// Benchmark of the memory that saving and loading a training need, on as many ranks as the launcher starts.
//
//   shoal launch --ranks 4 --threads 1 -- bench_checkpoint_memory FOLDER LAYERS
//
// FullyShardedDataParallel with AdamW over LAYERS linear layers of 4096 x 4096; 12 layers are 201 million parameters.
// Prints, as JSON, the maximum over ranks in MiB: of the rank's own part (parameters and optimizer state), and of the
// growth of resident memory in save, save_async with wait, and load.

#include <fmt/format.h>
#include <malloc.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>

#include "cli/train/memory.h"
#include "shoal/checkpoint.h"
#include "shoal/fsdp.h"
#include "shoal/optim.h"
#include "shoal/world.h"

namespace {

using namespace shoal;

constexpr int64_t width = 4096;
constexpr double mebibyte = 1 << 20;

// Growth in MiB on the rank with the most.
template <class Act>
double growth(const Group& group, const Act& act) {
  group.barrier().wait();
  cli::reset_peak();
  const auto before = cli::resident_mib();
  act();
  auto grown = at::full({1}, cli::peak_resident_mib() - before, at::kDouble);
  group.all_reduce(grown, ReduceOp::max).wait();
  return grown.item<double>();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "bench_checkpoint_memory FOLDER LAYERS\n");
    return 2;
  }
  mallopt(M_MMAP_THRESHOLD, 1 << 16);  // freed memory goes back to the system, and does not count
  const std::string folder = argv[1];
  const auto world = init();
  const auto& group = world.group();
  torch::nn::Sequential model;
  for (int i = 0; i < std::stoi(argv[2]); ++i) model->push_back(torch::nn::Linear(width, width));
  FullyShardedDataParallel parallel(model, group, {.auto_wrap_policy = wrap_size(width * width)});
  FullyShardedOptimizer<FusedAdamW> optimizer(parallel, torch::optim::AdamWOptions(1e-4));
  TrainingState training(parallel, optimizer);
  const auto input = at::rand({2, width});
  parallel.forward(input).sum().backward();
  optimizer.step();
  optimizer.zero_grad();

  double part = 0;
  for (const auto& piece : parallel.own_parameters()) part += 3 * static_cast<double>(piece.nbytes()) / mebibyte;
  nlohmann::json result{{"ranks", group.size()}, {"own_part", part}};
  result["save"] = growth(group, [&] { save(folder, training, {.step = 1}); });
  result["save_async"] = growth(group, [&] {
    save_async(folder, training, {.step = 2, .keep_last = 1});
    training.wait();
  });
  result["load"] = growth(group, [&] { load(folder, training); });
  if (group.rank() == 0) fmt::print("{}\n", result.dump());
  return 0;
}
