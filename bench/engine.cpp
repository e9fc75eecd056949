// What the engine costs per step, apart from communication: DDP on one rank (identity transport) beside the bare
// module.

#include <ATen/Parallel.h>
#include <benchmark/benchmark.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <filesystem>
#include <set>

#include "data/reference.h"
#include "engine/operator_watch.h"
#include "models/loss.h"
#include "models/registry.h"
#include "shoal/comm/timeline.h"
#include "shoal/comm/world.h"
#include "shoal/strategy/ddp.h"

namespace {

torch::nn::Sequential make_model(int64_t layers) {
  torch::nn::Sequential model;
  for (int64_t i = 0; i < layers; ++i) model->push_back(torch::nn::Linear(64, 64));
  return model;
}

// Takes part in every use of memory and does nothing: what FSDP's pages cost besides gathering.
class Nobody : public shoal::MemoryUser {
  void begin_use(const std::string&, std::span<c10::StorageImpl* const>) override {}
  void end_use(std::span<c10::StorageImpl* const>) noexcept override {}
};

// A small operator on tensors that are not watchable, watchable, and watched.
void small_operator(benchmark::State& state) {
  Nobody nobody;
  auto a = at::ones({64});
  const auto b = at::ones({64});
  if (state.range(0) >= 1) a = shoal::watchable(a);
  auto* storage = a.storage().unsafeGetStorageImpl();
  if (state.range(0) == 2) shoal::watch(storage, nobody);
  for (auto _ : state) benchmark::DoNotOptimize(at::add(a, b));
  if (state.range(0) == 2) shoal::unwatch(storage);
}

// Forward and backward of gpt tiny, its parameters not watchable, watchable, and watched.
void gpt_tiny(benchmark::State& state) {
  Nobody nobody;
  const auto model = shoal::models::make_model("gpt", "tiny", shoal::models::Init::torch, 1);
  const auto batch = shoal::data::reference_batch("gpt", "tiny", {.seed = 1}, 4);
  std::set<c10::StorageImpl*> watched;
  for (auto& parameter : model->parameters()) {
    if (state.range(0) >= 1) parameter.set_data(shoal::watchable(parameter.detach()));
    if (state.range(0) == 2) watched.insert(parameter.storage().unsafeGetStorageImpl());
  }
  for (auto* storage : watched) shoal::watch(storage, nobody);
  for (auto _ : state) {
    model->zero_grad();
    shoal::models::loss_of(model->forward(batch.data), batch.target).backward();
  }
  for (auto* storage : watched) shoal::unwatch(storage);
}

void bare(benchmark::State& state) {
  auto model = make_model(state.range(0));
  const auto x = at::ones({1, 64});
  for (auto _ : state) {
    model->zero_grad();
    model->forward(x).sum().backward();
  }
}

void ddp(benchmark::State& state) {
  const auto world = shoal::init({.rank = 0, .size = 1});
  auto model = make_model(state.range(0));
  shoal::DistributedDataParallel parallel(model, world.group(), {.gradient_as_bucket_view = state.range(1) != 0});
  const auto x = at::ones({1, 64});
  for (auto _ : state) {
    model->zero_grad();
    parallel.forward(x).sum().backward();
  }
}

// A collective's way through a group of one rank, alone, with the flight recorder, and with a timeline: what telemetry
// adds to each.
void collective(benchmark::State& state) {
  const auto folder = std::filesystem::temp_directory_path() / "shoal-bench-flight";
  shoal::WorldOptions options;
  options.rank = 0;
  options.size = 1;
  if (state.range(0) == 1) options.flight_recorder = folder;
  if (state.range(0) == 2) options.timeline = std::make_shared<shoal::Timeline>();
  const auto world = shoal::init(options);
  const auto tensor = at::ones({16});
  int64_t step = 0;
  for (auto _ : state) {
    world.group()
        .all_reduce(tensor, shoal::ReduceOp::sum, {step++, 3, "transformer.h.3.mlp.c_fc.weight, 7 more"})
        .wait();
  }
  std::filesystem::remove_all(folder);
}

BENCHMARK(collective)->Arg(0)->Arg(1)->Arg(2)->ArgName("telemetry")->Iterations(300000);
BENCHMARK(small_operator)->Arg(0)->Arg(1)->Arg(2)->ArgName("watched");
BENCHMARK(gpt_tiny)->Arg(0)->Arg(1)->Arg(2)->ArgName("watched")->Unit(benchmark::kMicrosecond);
BENCHMARK(bare)->Arg(4)->Arg(32)->Unit(benchmark::kMicrosecond);
BENCHMARK(ddp)->ArgsProduct({{4, 32}, {0, 1}})->ArgNames({"layers", "view"})->Unit(benchmark::kMicrosecond);

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}
