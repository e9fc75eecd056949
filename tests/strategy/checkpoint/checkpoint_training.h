#pragma once
// Model under any strategy, for checkpoint tests that train, save and inspect it.

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <string>

#include "checkpoint/loading/reader.h"
#include "shoal/checkpoint.h"
#include "shoal/ddp.h"
#include "shoal/decentralized.h"
#include "shoal/fsdp.h"
#include "shoal/hooks.h"
#include "shoal/local_updates.h"
#include "shoal/optim.h"
#include "shoal/shard_gossip.h"
#include "shoal/training.h"
#include "tests/support/shared_folder.h"
#include "tests/support/variants.h"
#include "tests/support/world.h"

namespace shoal::test {

// Model with a channels-last weight, buffers, a frozen parameter, sizes that no number of ranks divides, and dropout.
struct Net : torch::nn::Module {
  explicit Net(int seed) {
    torch::manual_seed(seed);
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 7, 3)));
    norm = register_module("norm", torch::nn::BatchNorm2d(7));
    frozen = register_module("frozen", torch::nn::Linear(63, 11));
    drop = register_module("drop", torch::nn::Dropout(0.3));
    fc = register_module("fc", torch::nn::Linear(11, 5));
    const torch::NoGradGuard no_grad;
    conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
    for (auto& parameter : frozen->parameters()) parameter.set_requires_grad(false);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto seen = torch::relu(norm(conv(x))).flatten(1);
    return fc(drop(torch::tanh(frozen(seen))));
  }

  torch::nn::Conv2d conv{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::Linear frozen{nullptr}, fc{nullptr};
  torch::nn::Dropout drop{nullptr};
};

inline at::Tensor images(int rank, int64_t step) {
  return at::randn({4, 3, 5, 5}, at::detail::createCPUGenerator(100 * step + rank), at::kFloat);
}

using Tensors = std::map<std::string, at::Tensor>;

struct Running {
  Running() = default;
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

  std::shared_ptr<Net> model;
  std::shared_ptr<void> wrapper, optimizer;           // in the order of construction
  std::unique_ptr<TrainingState> state;               // destroyed first
  std::function<void(const at::Tensor& input)> step;  // forward, backward, update
  // State of the whole optimizer, by the strategy's own calls; collective.
  std::function<OptimizerState()> optimizer_state;
  std::function<Tensors()> parameters;  // likewise

  ~Running() {
    step = nullptr, optimizer_state = nullptr, parameters = nullptr;
    state.reset();
    wrapper.reset();  // an OSS must outlive its wrapper
    optimizer.reset();
  }
};

inline Tensors named_copies(const torch::nn::Module& module) {
  Tensors all;
  for (const auto& entry : module.named_parameters()) all[entry.key()] = entry.value().detach().clone();
  return all;
}

inline std::vector<at::Tensor> trainable(const torch::nn::Module& module) {
  auto list = module.parameters();
  std::erase_if(list, [](const at::Tensor& parameter) { return !parameter.requires_grad(); });
  return list;
}

const inline auto adamw = torch::optim::AdamWOptions(0.01).weight_decay(0.1);

// Names that variant() knows, and: none (DistributedDataParallel, saved as a bare module), fsdp_b (bfloat16 parameters
// with float32 main copies).
inline const std::vector<std::string>& all_strategies() {
  static const std::vector<std::string> names{
      "none",   "ddp",           "zero1",       "zero2",         "megatron", "megatron_in_grads", "fsdp",
      "fsdp_b", "fsdp_no_shard", "fsdp_hybrid", "decentralized", "diloco",   "shard_gossip"};
  return names;
}

// Hooks with state, which may follow a strategy's name.
inline std::shared_ptr<CommunicationHook> hook_of(const std::string& name) {
  if (name == "powersgd") {
    return std::make_shared<PowerSgdHook>(PowerSgdOptions{.rank = 1, .start_iteration = 1, .min_compression_rate = 0});
  }
  if (name == "topk") return std::make_shared<TopKHook>(TopKOptions{.fraction = 0.2});
  if (name == "int8") return std::make_shared<QuantizeHook>(QuantizeOptions{.block = 16});
  return nullptr;
}

template <class Wrapper, class Optimizer>
void train_by(Running& running, const std::shared_ptr<Wrapper>& wrapper, const std::shared_ptr<Optimizer>& optimizer) {
  running.wrapper = wrapper;
  running.optimizer = optimizer;
  running.step = [raw = wrapper.get(), raw_optimizer = optimizer.get()](const at::Tensor& input) {
    raw->forward(input).pow(2).mean().backward();
    raw_optimizer->step();
    raw_optimizer->zero_grad();
  };
}

inline Tensors full_parameters(FullyShardedDataParallel<Net>& parallel) {
  auto all = parallel.full_state_dict();
  for (const auto& buffer : parallel.module()->named_buffers()) all.erase(buffer.key());
  return all;
}

// Starts strategies whose own objects the tests inspect; false for other strategies.
inline bool start_own(Running& running, const std::string& strategy, const std::shared_ptr<Net>& model,
                      const Group& group) {
  if (strategy == "none") {
    const auto optimizer = std::make_shared<FusedAdamW>(trainable(*model), adamw);
    train_by(running, std::make_shared<DistributedDataParallel<Net>>(model, group), optimizer);
    running.state = std::make_unique<TrainingState>(model, *optimizer, group);
    running.optimizer_state = [optimizer, model] { return shoal::optimizer_state(*optimizer, *model); };
    return true;
  }
  if (strategy == "diloco") {
    const auto optimizer = std::make_shared<FusedAdamW>(trainable(*model), adamw);
    const auto local = std::make_shared<LocalUpdates>(
        model, *optimizer, group,
        LocalUpdatesOptions{.every = 3, .outer = OuterNesterov{}, .fragments = 2, .delay = 1});
    running.wrapper = local;
    running.optimizer = optimizer;
    running.step = [raw = local.get(), model](const at::Tensor& input) {
      model->forward(input).pow(2).mean().backward();
      raw->step();
      raw->zero_grad();
    };
    running.state = std::make_unique<TrainingState>(*local);
    running.optimizer_state = [optimizer, model] { return shoal::optimizer_state(*optimizer, *model); };
    return true;
  }
  if (strategy == "shard_gossip") {
    const auto hosts = host_groups(group, ranks_per_model(group));
    const auto parallel = std::make_shared<FullyShardedDataParallel<Net>>(
        model, hosts.inside, FullyShardedDataParallelOptions{.auto_wrap_policy = wrap_size(20)});
    const auto optimizer = std::make_shared<ShardGossipOptimizer<FusedAdamW>>(*parallel, adamw, hosts.across);
    train_by(running, parallel, optimizer);
    running.state = std::make_unique<TrainingState>(*parallel, *optimizer, group);
    running.optimizer_state = [raw = optimizer.get()] { return raw->state_dict(); };
    running.parameters = [raw = parallel.get()] { return full_parameters(*raw); };
    return true;
  }
  if (strategy != "fsdp_b") return false;
  const auto parallel = std::make_shared<FullyShardedDataParallel<Net>>(
      model, group,
      FullyShardedDataParallelOptions{
          .auto_wrap_policy = wrap_size(20), .param_dtype = at::kBFloat16, .buffer_dtype = at::kBFloat16});
  const auto optimizer = std::make_shared<FullyShardedOptimizer<FusedAdamW>>(*parallel, adamw);
  train_by(running, parallel, optimizer);
  running.state = std::make_unique<TrainingState>(*parallel, *optimizer);
  running.optimizer_state = [raw = optimizer.get()] { return raw->state_dict(); };
  running.parameters = [raw = parallel.get()] { return full_parameters(*raw); };
  return true;
}

// Starts a strategy of the registry.
inline void start_registered(Running& running, const std::string& name, const std::shared_ptr<Net>& model,
                             const Group& group, const std::shared_ptr<CommunicationHook>& hook) {
  auto chosen = variant(name, group);
  add_known(chosen, {{"unit_numel", "20"}});
  const auto training =
      std::make_shared<Training<Net>>(make_training(chosen.strategy, model, optimizer_recipe<FusedAdamW>(adamw), group,
                                                    {.options = chosen.options, .communication_hook = hook}));
  running.wrapper = training;
  running.step = [raw = training.get()](const at::Tensor& input) {
    (*raw)->backward(raw->forward(input).pow(2).mean());
    (*raw)->step();
    (*raw)->zero_grad();
  };
  running.state = std::make_unique<TrainingState>((*training)->state().value());
  running.optimizer_state = [raw = training.get()] { return (*raw)->optimizer_state(); };
  if (!name.starts_with("fsdp")) return;
  running.parameters = [raw = training.get(), model] {
    const auto whole = (*raw)->full_parameters();
    return named_copies(*model);
  };
}

// name: NAME, or NAME_HOOK with a hook of hook_of().
inline std::unique_ptr<Running> start(const std::string& name, const Group& group, int seed) {
  const auto end = name.rfind('_');
  const auto hook = end == std::string::npos ? nullptr : hook_of(name.substr(end + 1));
  const auto strategy = hook ? name.substr(0, end) : name;
  auto running = std::make_unique<Running>();
  auto model = running->model = std::make_shared<Net>(seed);
  running->parameters = [model] { return named_copies(*model); };
  if (!start_own(*running, strategy, model, group)) start_registered(*running, strategy, model, group, hook);
  return running;
}

inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && at::equal(a.cpu(), b.cpu());
}

// Group of the world's first ranks, on those ranks.
inline std::optional<Group> first_ranks(int ranks) {
  std::vector<int> list(ranks);
  std::iota(list.begin(), list.end(), 0);
  if (world().group().rank() >= ranks) return std::nullopt;
  return world().group().subgroup(list);
}

inline void train(Running& running, const Group& ranks, int64_t from, int64_t to) {
  for (int64_t step = from; step < to; ++step) running.step(images(ranks.rank(), step));
}

// Expects a training's values, read without checkpoints, to equal the checkpoint's, read without strategies.
inline void expect_holds(Running& running, const CheckpointReader& reader) {
  const auto parameters = running.parameters();
  for (const auto& [name, value] : parameters) {
    auto stored = reader.read(name);
    EXPECT_TRUE(same_bits(stored.to(value.scalar_type()), value)) << name;
  }
  EXPECT_EQ(parameters.size(), running.model->named_parameters().size());
  size_t tensors = 0;
  for (const auto& [name, state] : running.optimizer_state()) {
    for (const auto& [field, value] : state.tensors) {
      if (field == "main_param") continue;
      EXPECT_TRUE(same_bits(reader.read("optimizer." + name + "." + field), value)) << name << " " << field;
      ++tensors;
    }
    const auto& ranks = reader.index().rank_states;
    const auto told = std::find_if(ranks.begin(), ranks.end(), [&, &name = name](const auto& rank) {
      return rank.contains("optimizer") && rank["optimizer"].contains(name);
    });
    ASSERT_NE(told, ranks.end()) << name;
    EXPECT_EQ((*told)["optimizer"][name]["step"].template get<double>(), state.numbers.at("step")) << name;
  }
  EXPECT_EQ(tensors, 2 * trainable(*running.model).size());
}

// The same for ranks with values of their own: the checkpoint has the mean of the parameters, here computed in float64,
// and the first rank's optimizer state.
inline void expect_mean(Running& running, const Group& ranks, const CheckpointReader& reader) {
  const auto parameters = running.parameters();
  for (const auto& [name, own] : parameters) {
    auto mean = own.to(at::kDouble).contiguous();
    ranks.all_reduce(mean).wait();
    mean /= ranks.size();
    const auto stored = reader.read(name);
    ASSERT_EQ(stored.sizes(), mean.sizes()) << name;
    EXPECT_LT((stored.to(at::kDouble) - mean).abs().max().item<double>(), 1e-6) << name;
  }
  EXPECT_EQ(parameters.size(), running.model->named_parameters().size());
  size_t tensors = 0;
  for (const auto& [name, state] : running.optimizer_state()) {
    for (const auto& [field, own] : state.tensors) {
      auto first = own.contiguous().clone();
      ranks.broadcast(first, 0).wait();
      EXPECT_TRUE(same_bits(reader.read("optimizer." + name + "." + field), first)) << name << " " << field;
      ++tensors;
    }
  }
  EXPECT_EQ(tensors, 2 * trainable(*running.model).size());
}

inline void expect_buffers(const Running& running, const CheckpointReader& reader) {
  for (const auto& buffer : running.model->named_buffers()) {
    const auto stored = reader.read(buffer.key());
    EXPECT_TRUE(same_bits(stored.to(buffer.value().scalar_type()), buffer.value())) << buffer.key();
  }
}

}  // namespace shoal::test
