// Benchmark of the engine's cost per step, without communication: DDP on one rank (identity transport) beside the bare
// module.

#include <ATen/Parallel.h>
#include <benchmark/benchmark.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <set>
#include <vector>

#include "data/reference.h"
#include "engine/changes/operator_watch.h"
#include "engine/changes/parameter_watch.h"
#include "models/loss.h"
#include "models/registry.h"
#include "shoal/ddp.h"
#include "shoal/telemetry.h"
#include "shoal/world.h"

namespace {

torch::nn::Sequential make_model(int64_t layers) {
  torch::nn::Sequential model;
  for (int64_t i = 0; i < layers; ++i) model->push_back(torch::nn::Linear(64, 64));
  return model;
}

// Observer without effect: the cost of FSDP's pages except gathering.
class Nobody : public shoal::MemoryUser {
  void begin_use(std::string_view, std::span<c10::StorageImpl* const>) override {}
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
  if (state.range(0) == 2) shoal::unwatch(storage, nobody);
}

// The check in every forward and step whether one of 2 * `layers` parameters was replaced.
void parameter_watch(benchmark::State& state) {
  const shoal::ParameterWatch watch(make_model(state.range(0))->parameters());
  for (auto _ : state) benchmark::DoNotOptimize(watch.changed());
  state.SetItemsProcessed(state.iterations() * 2 * state.range(0));
}

struct Trained {
  std::shared_ptr<shoal::models::Model> model = shoal::models::make_model("gpt", "tiny", shoal::models::Init::torch, 1);
  shoal::data::Batch batch = shoal::data::reference_batch("gpt", "tiny", {.seed = 1}, 4);

  double microseconds() const {
    const auto start = std::chrono::steady_clock::now();
    model->zero_grad();
    shoal::models::loss_of(model->forward(batch.data), batch.target).backward();
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
  }
};

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// Forward and backward of gpt tiny, alternating between plain and watched parameters, so that both meet the same load.
void gpt_tiny(benchmark::State& state) {
  Nobody nobody;
  const Trained plain, watched;
  std::set<c10::StorageImpl*> memory;
  for (auto& parameter : watched.model->parameters()) {
    parameter.set_data(shoal::watchable(parameter.detach()));
    memory.insert(parameter.storage().unsafeGetStorageImpl());
  }
  for (auto* storage : memory) shoal::watch(storage, nobody);
  std::vector<double> without, with, ratio;
  for (auto _ : state) {
    without.push_back(plain.microseconds());
    with.push_back(watched.microseconds());
    ratio.push_back(with.back() / without.back());
  }
  for (auto* storage : memory) shoal::unwatch(storage, nobody);
  state.counters["plain_us"] = median(without);
  state.counters["watched_us"] = median(with);
  state.counters["ratio"] = median(ratio);
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

// Cost of a collective in a group of one rank: alone, with the flight recorder, and with a timeline.
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
BENCHMARK(parameter_watch)->Arg(4)->Arg(32)->ArgName("layers");
BENCHMARK(gpt_tiny)->Unit(benchmark::kMicrosecond);
BENCHMARK(bare)->Arg(4)->Arg(32)->Unit(benchmark::kMicrosecond);
BENCHMARK(ddp)->ArgsProduct({{4, 32}, {0, 1}})->ArgNames({"layers", "view"})->Unit(benchmark::kMicrosecond);

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}
