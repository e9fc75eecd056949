// FSDP12: models whose parameters have no memory until their unit is sharded, and that would fit no single rank.

#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <fstream>
#include <optional>

#include "checkpoint/format/safetensors.h"
#include "comm/group/group_state.h"
#include "comm/rendezvous/world_state.h"
#include "shoal/ddp.h"
#include "shoal/deferred_init.h"
#include "shoal/error.h"
#include "shoal/fsdp.h"
#include "shoal/optim.h"
#include "tests/support/memory_meter.h"
#include "tests/support/page_meter.h"
#include "tests/support/temp_folder.h"
#include "tests/support/world.h"

namespace shoal::fsdp_deferred_test {
namespace {

using test::group;
using torch::optim::AdamWOptions;
using Options = FullyShardedDataParallelOptions;

struct NetImpl : torch::nn::Module {
  NetImpl(int64_t layers, int64_t width) {
    for (int64_t i = 0; i < layers; ++i) {
      list.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(width, width)));
    }
    norm = register_module("norm", torch::nn::BatchNorm1d(width));
    list.front()->weight.requires_grad_(false);
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : list) x = layer(x).tanh();
    return norm(x);
  }
  std::vector<torch::nn::Linear> list;
  torch::nn::BatchNorm1d norm = nullptr;
};

std::shared_ptr<NetImpl> make(bool defer, int64_t layers, int64_t width) {
  const auto scope = defer ? std::make_unique<DeferredInit>() : nullptr;
  return std::make_shared<NetImpl>(layers, width);
}

Options by_layer() {
  return {.auto_wrap_policy = wrap_type<torch::nn::LinearImpl>()};
}

std::map<std::string, at::Tensor> trained(bool defer, const Options& options) {
  torch::manual_seed(7 + group().rank());  // rank 0's values count
  const auto model = make(defer, 3, 5);
  FullyShardedDataParallel<NetImpl> parallel(model, group(), options);
  FullyShardedOptimizer<FusedAdamW> optimizer(parallel, AdamWOptions(1e-2));
  torch::manual_seed(100 + group().rank());
  for (int step = 0; step < 3; ++step) {
    const auto x = at::randn({4, 5});
    parallel.forward(x).square().sum().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  return parallel.full_state_dict();
}

TEST(FsdpDeferred, FSDP12_trains_to_the_same_bits_as_a_model_that_had_memory_from_the_start) {
  std::map<std::string, Options> cases{{"by layer", by_layer()}, {"one unit", Options()}};
  for (const auto& [strategy, name] :
       {std::pair(ShardingStrategy::no_shard, "no_shard"), std::pair(ShardingStrategy::shard_grad_op, "grad_op")}) {
    cases[name] = by_layer();
    cases[name].sharding_strategy = strategy;
  }
  cases["bfloat16"] = by_layer();
  cases["bfloat16"].param_dtype = cases["bfloat16"].buffer_dtype = at::kBFloat16;
  cases["whole parameters"] = by_layer();
  cases["whole parameters"].shard_by_parameter = true;
  for (const auto& [name, options] : cases) {
    SCOPED_TRACE(name);
    const auto eager = trained(false, options);
    for (const auto& [parameter, value] : trained(true, options)) {
      if (parameter.find("running") != std::string::npos || parameter.find("num_batches") != std::string::npos)
        continue;
      EXPECT_TRUE(at::equal(value, eager.at(parameter))) << parameter;
    }
  }
}

TEST(FsdpDeferred, FSDP12_other_strategies_give_the_whole_model_memory) {
  torch::manual_seed(7 + group().rank());
  const auto model = make(true, 2, 4);
  DistributedDataParallel<NetImpl> parallel(model, group());
  for (const auto& parameter : model->parameters()) EXPECT_FALSE(is_deferred(parameter));
  parallel.forward(at::ones({2, 4})).sum().backward();
}

TEST(FsdpDeferred, FSDP12_a_parameter_on_the_meta_device_is_refused_by_name) {
  struct MetaImpl : torch::nn::Module {
    MetaImpl() { weight = register_parameter("weight", at::empty({2, 2}, at::kMeta)); }
    at::Tensor forward(const at::Tensor& x) { return x.matmul(weight); }
    at::Tensor weight;
  };
  try {
    FullyShardedDataParallel<MetaImpl> parallel(std::make_shared<MetaImpl>(), group());
    ADD_FAILURE() << "accepted";
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("weight is on the meta device"), std::string::npos) << error.what();
  }
}

// Bytes in use: this process's allocator, and its share of shared memory.
double held() {
  const auto shared = static_cast<double>(state_of(group())->world->memory->bytes_in_use());
  return static_cast<double>(test::MemoryMeter::instance().live()) + shared;
}

double sum_over_ranks(double value) {
  auto sum = at::full({1}, value, at::kDouble);
  group().all_reduce(sum).wait();
  return sum.item<double>();
}

void save(const FullyShardedDataParallel<NetImpl>& parallel, const std::string& path) {
  std::vector<SafetensorsFile::Entry> entries;
  for (const auto& item : parallel.module()->named_parameters()) {
    entries.push_back({item.key(), item.value().scalar_type(), item.value().sizes().vec()});
  }
  for (const auto& item : parallel.module()->named_buffers()) {
    entries.push_back({item.key(), item.value().scalar_type(), item.value().sizes().vec()});
  }
  std::unique_ptr<SafetensorsFile> file;
  if (group().rank() == 0)
    file = std::make_unique<SafetensorsFile>(path, entries, std::map<std::string, std::string>());
  parallel.visit_full_state(0, [&](const std::string& name, const at::Tensor& value) { file->write(name, value); });
  if (file) file->complete();
}

// Training needs 16 bytes per parameter with AdamW in float32. On N ranks no rank ever holds more than 1 / N of that
// and a few units.
TEST(FsdpDeferred, FSDP12_a_model_of_world_size_times_a_ranks_memory_is_built_trained_and_saved) {
  test::return_freed_memory();
  constexpr int64_t layers = 48, width = 320;
  constexpr double unit = 4.0 * (width * width + width);
  constexpr double parameters = layers * unit / 4;
  const double ranks = group().size();
  group().broadcast(at::zeros({1000}), 0).wait();  // makes the staging buffer, which is never freed
  auto& meter = test::MemoryMeter::instance();
  const double before = held();
  const double pages_before = static_cast<double>(test::proportional_bytes());
  meter.reset_peak();
  const double live_before = static_cast<double>(meter.live());

  const auto model = make(true, layers, width);
  EXPECT_LT(static_cast<double>(meter.peak()) - live_before, 0.2 * unit) << "the scope needs no memory";
  FullyShardedDataParallel<NetImpl> parallel(model, group(), by_layer());
  // After construction: this rank's shards of parameters and gradients; during it, at most one unit in three forms.
  const double built = static_cast<double>(meter.peak()) - live_before;
  EXPECT_LT(built, 8 * parameters / ranks + 4 * unit);

  FullyShardedOptimizer<FusedAdamW> optimizer(parallel, AdamWOptions(1e-3));
  double pages = 0;
  for (int step = 0; step < 8; ++step) {
    const auto x = at::randn({8, width});
    parallel.forward(x).square().sum().backward();
    optimizer.step();
    optimizer.zero_grad();
    if (step == 6) pages = static_cast<double>(test::proportional_bytes()) - pages_before;
  }
  const double live = static_cast<double>(meter.peak()) - live_before;
  // In flight: up to five buckets, over Gloo each with a receive buffer of its size; three pages; a gradient.
  const double share = 16 * parameters / ranks;
  EXPECT_LT(live, share + 16 * unit) << "by this rank's allocator";
  const double all_pages = sum_over_ranks(pages);
  if (!test::counts_freed_memory) {
    EXPECT_LT(all_pages, 16 * parameters + ranks * 16 * unit) << "by pages, all ranks";
  }
  EXPECT_GT(sum_over_ranks(held() - before), 0.5 * 16 * parameters) << "the meters measure";

  const test::TempFolder folder;
  meter.reset_peak();
  const double live_then = static_cast<double>(meter.live());
  const auto path = folder.file("model.safetensors");
  save(parallel, path);
  EXPECT_LT(static_cast<double>(meter.peak()) - live_then, 4 * unit) << "saved one by one";
  if (group().rank() != 0) return;
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  EXPECT_GT(static_cast<double>(file.tellg()), 4 * parameters);
}

// One step of a model that is whole in this process.
void train_whole(int64_t layers, int64_t width) {
  const auto model = make(false, layers, width);
  FusedAdamW optimizer(model->parameters(), AdamWOptions(1e-3));
  model->forward(at::randn({8, width})).square().sum().backward();
  optimizer.step();
}

// Builds and trains for two steps under a limit of bytes, if any; returns whether ranks shared the parameters' memory.
bool train_sharded(int64_t layers, int64_t width, std::optional<int64_t> allowed) {
  std::shared_ptr<NetImpl> model;
  std::optional<FullyShardedDataParallel<NetImpl>> parallel;
  std::optional<FullyShardedOptimizer<FusedAdamW>> optimizer;
  // Ends first, because a module from shared memory gets a whole copy of its own back.
  std::optional<test::DataLimit> limit;
  if (allowed) limit.emplace(*allowed);
  model = make(true, layers, width);
  parallel.emplace(model, group(), by_layer());
  optimizer.emplace(*parallel, AdamWOptions(1e-3));
  for (int step = 0; step < 2; ++step) {
    parallel->forward(at::randn({8, width})).square().sum().backward();
    optimizer->step();
    optimizer->zero_grad();
  }
  return parallel->shared();
}

// The system limits each rank to its present memory, its share of what training needs, and 80 MiB for units in flight
// and the transport's threads. If ranks share memory, parameters and sums of gradients lie there, and the limit applies
// to the rank's own memory.
TEST(FsdpDeferred, FSDP12_a_model_that_the_systems_limit_keeps_from_being_whole_is_built_and_trained) {
  if (group().size() == 1) GTEST_SKIP() << "nobody to share it with";
  if (test::counts_freed_memory) GTEST_SKIP() << "the address sanitizer takes memory of its own";
  test::return_freed_memory();
  constexpr int64_t layers = 160, width = 320;
  constexpr int64_t parameters = layers * (width * width + width);
  // Makes threads and staging buffers, which are never freed.
  const bool shared = train_sharded(2, width, std::nullopt);
  train_whole(2, width);
  const int64_t allowed = (shared ? 8 : 16) * parameters / group().size() + (80 << 20);
  {
    const test::DataLimit limit(allowed);
    EXPECT_ANY_THROW(train_whole(layers, width)) << "the limit holds";
  }
  EXPECT_NO_THROW(train_sharded(layers, width, allowed));
}

}  // namespace
}  // namespace shoal::fsdp_deferred_test
