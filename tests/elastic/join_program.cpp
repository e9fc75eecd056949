// A program that the launcher's ranks run, as a user writes it: a loop that ranks leave and join. Arguments: epochs,
// file of metrics. Each rank ends with the norm of its parameters.

#include <ATen/Parallel.h>
#include <torch/optim/adam.h>
#include <unistd.h>

#include <cstdio>
#include <string>

#include "tests/elastic/elastic_training.h"

int main(int argc, char** argv) {
  const size_t epochs = argc > 1 ? std::stoul(argv[1]) : 5;
  const std::string metrics = argc > 2 ? argv[2] : "";
  at::set_num_threads(1);
  const shoal::World world = shoal::init();
  auto model = std::make_shared<shoal::test::Net>();
  model->to(at::kDouble);
  shoal::DistributedDataParallel parallel(model, world.group());
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(1e-3));
  shoal::DistributedSampler sampler(96, world.group());
  shoal::Elastic elastic(world, parallel, optimizer, sampler,
                         {.keep_global_batch = 48, .batch_slices = 12, .metrics = metrics});
  for (size_t epoch = elastic.first_epoch(); epoch < epochs; ++epoch) {
    sampler.set_epoch(epoch);
    while (elastic.in_epoch()) {
      auto part = sampler;
      part.reset();
      while (const auto batch = part.next(static_cast<size_t>(elastic.batch_size()))) {
        const auto x = shoal::test::inputs_of(*batch).to(at::kDouble);
        const auto compute = [&](int64_t begin, int64_t end) {
          const auto share = x.slice(0, begin, end);
          shoal::test::loss_of(parallel.forward(share), share).backward();
        };
        if (!elastic.step(x.size(0), compute, [&] { optimizer.step(); })) break;
        optimizer.zero_grad();
      }
    }
    if (world.rank() == 0) std::printf("epoch %zu on %d rank(s)\n", epoch, world.size());
    usleep(60'000);  // so that the job does not end before ranks have come, on a quiet machine
    std::fflush(stdout);
  }
  double norm = 0;
  for (const auto& parameter : model->parameters()) norm += parameter.norm().item<double>();
  std::printf("norm %.6f after %ld steps\n", norm, static_cast<long>(elastic.steps()));
}
