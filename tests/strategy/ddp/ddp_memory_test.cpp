// Memory of DDP compared with the formula: buckets of the gradients' size, and twice that without bucket views.

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "comm/group/group_state.h"
#include "comm/rendezvous/world_state.h"
#include "shoal/ddp.h"
#include "tests/support/memory_meter.h"
#include "tests/support/world.h"

namespace shoal::ddp_memory_test {
namespace {

using test::world;

struct Use {
  int64_t held;  // after a step, gradients in place
  int64_t peak;  // within a later step
};

constexpr int64_t layers = 8;
constexpr int64_t width = 256;
constexpr int64_t gradient_bytes = layers * width * width * 4;

// Bytes of memory that ranks share: the buckets, if there are several ranks.
int64_t shared_bytes() {
  return static_cast<int64_t>(state_of(world().group())->world->memory->bytes_in_use());
}

int64_t live() {
  return test::MemoryMeter::instance().live() + shared_bytes();
}

Use train(bool view, bool set_to_none) {
  torch::manual_seed(1);
  torch::nn::Sequential model;
  for (int64_t i = 0; i < layers; ++i) {
    model->push_back(torch::nn::Linear(torch::nn::LinearOptions(width, width).bias(false)));
  }
  const auto x = at::ones({1, width});
  auto& meter = test::MemoryMeter::instance();
  world().group().broadcast(at::zeros({1000}), 0).wait();  // makes the staging buffer, which stays
  const auto before = live();
  DistributedDataParallel parallel(model, world().group(), {.gradient_as_bucket_view = view});
  for (int step = 0; step < 3; ++step) {
    if (step == 2) meter.reset_peak();
    parallel.forward(x).sum().backward();
    if (step < 2) model->zero_grad(set_to_none);
  }
  // Buckets are allocated once, so that the peak of shared memory is its present size.
  return {live() - before, meter.peak() + shared_bytes() - before};
}

TEST(DdpMemory, DDP05_bucket_views_save_the_gradients_size) {
  for (const bool set_to_none : {true, false}) {
    const auto with = train(true, set_to_none);
    const auto without = train(false, set_to_none);
    // Tails and activations are small compared with the gradients.
    constexpr double tolerance = 0.02 * gradient_bytes;
    EXPECT_NEAR(static_cast<double>(with.held), gradient_bytes, tolerance) << "the buckets";
    EXPECT_NEAR(static_cast<double>(without.held), 2 * gradient_bytes, tolerance) << "the buckets and the gradients";
    // Within a backward, one gradient at a time exists twice.
    constexpr double one_gradient = gradient_bytes / static_cast<double>(layers);
    EXPECT_LE(static_cast<double>(with.peak), gradient_bytes + 2 * one_gradient + tolerance);
    EXPECT_GE(static_cast<double>(without.peak - with.peak), gradient_bytes - 2 * one_gradient - tolerance);
  }
}

}  // namespace
}  // namespace shoal::ddp_memory_test
