#pragma once
// A small elastic training under LocalUpdates whose ranks write down their values.

#include <fmt/format.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/types.h>
#include <torch/utils.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <csignal>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "shoal/elastic.h"
#include "shoal/local_updates.h"
#include "tests/elastic/elastic_run.h"

namespace shoal::test {

constexpr int local_values = 4 * 3 + 3 + 3 + 1;  // parameters of LocalNet
constexpr size_t local_samples = 101;            // of an epoch
constexpr int most_local_entries = 200;

// Each rank counts its forwards in steps of its own, so that a mean of buffers can be told from a rank's.
struct LocalNet : torch::nn::Module {
  explicit LocalNet(int member = 0) : number(1 + member) {
    torch::manual_seed(7);
    first = register_module("first", torch::nn::Linear(4, 3));
    second = register_module("second", torch::nn::Linear(3, 1));
    steps = register_buffer("steps", at::zeros({1}, at::kDouble));
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) {
    steps.add_(number);
    return second(at::tanh(first(x)));
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
  at::Tensor steps;
  int number;
};

// What a schedule makes of the learning rate in a step.
inline double local_rate(int64_t step) {
  return learning_rate * std::pow(0.97, static_cast<double>(step));
}

inline void set_rate(torch::optim::Optimizer& optimizer, int64_t step) {
  for (auto& group : optimizer.param_groups()) group.options().set_lr(local_rate(step));
}

// What a program may do to the parameters between two steps.
inline void write(LocalNet& net) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : net.parameters()) parameter.mul_(0.99);
}

inline at::Tensor local_loss(LocalNet& net, const std::vector<size_t>& samples) {
  const auto x = inputs_of(samples).to(at::kDouble);
  return loss_of(net.forward(x), x);
}

inline at::Tensor flat(const LocalNet& net) {
  std::vector<at::Tensor> list;
  for (const auto& parameter : net.parameters()) list.push_back(parameter.detach().flatten());
  return at::cat(list);
}

inline void assign(LocalNet& net, const at::Tensor& values) {
  const torch::NoGradGuard no_grad;
  int64_t offset = 0;
  for (auto& parameter : net.parameters()) {
    parameter.copy_(values.slice(0, offset, offset + parameter.numel()).view(parameter.sizes()));
    offset += parameter.numel();
  }
}

// A rank began to compute a step, or saw it complete.
struct LocalEntry {
  int64_t step = 0;
  uint64_t generation = 0;
  int ranks = 0;
  int rank = 0;
  int count = 0;
  int samples[batch_size] = {};
  double values[local_values] = {};  // parameters after a complete step
  double buffer = 0;
  uint64_t common = 0;  // digest of what all ranks have in common
};

struct LocalList {
  std::atomic<int> count;
  LocalEntry entries[most_local_entries];

  void add(const LocalEntry& entry) {
    if (count == most_local_entries) throw std::runtime_error("the list of entries is full");
    entries[count] = entry;
    ++count;
  }
  const LocalEntry* begin() const { return entries; }
  const LocalEntry* end() const { return entries + count.load(); }
};

struct LocalRecord {
  std::atomic<int> started;
  std::atomic<int64_t> last_step;  // that ranks may compute so far; 0: any
  std::atomic<int> fragment_of[local_values];
  LocalList begun[most_members];
  LocalList complete[most_members];
};

using SharedLocalRecord = InSharedMemory<LocalRecord>;

inline void note_fragments(const LocalNet& net, const LocalUpdates& local, LocalRecord& record) {
  const auto fragments = local.fragments();
  int64_t at = 0;
  for (const auto& parameter : net.named_parameters()) {
    int number = 0;
    while (std::count(fragments[number].begin(), fragments[number].end(), parameter.key()) == 0) ++number;
    for (int64_t i = 0; i < parameter.value().numel(); ++i) record.fragment_of[at++] = number;
  }
}

// writes: changes the parameters between steps.
struct LocalMethod {
  LocalUpdatesOptions options{};
  bool writes = false;
};

// Trains for one epoch, and dies as told. Returns "" where all is well.
inline std::string train_locally(const World& world, LocalRecord& record, const LocalMethod& method,
                                 const std::vector<Death>& deaths = {}, const ElasticOptions& chosen = {}) {
  alarm(30);
  const int self = member_number(world);
  auto net = std::make_shared<LocalNet>(self);
  torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(learning_rate));
  LocalUpdates local(net, optimizer, world.group(), method.options);
  DistributedSampler sampler(local_samples, world.group(), {.seed = 3});
  int64_t step = 1;
  const auto reached = [&](Moment moment) {
    for (const auto& death : deaths) {
      if (death.rank == self && death.moment == moment && death.step <= step) std::raise(death.signal);
    }
  };
  net->second->weight.register_hook([&](const at::Tensor&) { reached(Moment::in_backward); });
  auto options = chosen;
  if (!options.on_change) options.on_change = [&](const ElasticChange&) { reached(Moment::after_recovery); };
  Elastic elastic(world, local, sampler, options);
  step = elastic.steps() + 1;
  set_rate(optimizer, elastic.steps());
  note_fragments(*net, local, record);
  ++record.started;
  for (auto epoch = elastic.first_epoch(); epoch < 1; ++epoch) {
    sampler.set_epoch(epoch);
    while (elastic.in_epoch()) {
      auto division = sampler;
      division.reset();
      while (const auto batch = division.next(batch_size)) {
        LocalEntry entry{.generation = elastic.generation(), .count = static_cast<int>(batch->size())};
        std::copy(batch->begin(), batch->end(), entry.samples);
        const auto compute = [&] {
          entry.step = step;
          entry.ranks = world.size();
          entry.rank = world.rank();
          record.begun[self].add(entry);
          while (record.last_step != 0 && step > record.last_step) usleep(200);
          reached(Moment::before_forward);
          local_loss(*net, *batch).backward();
          reached(Moment::before_commit);
        };
        const auto update = [&] {
          reached(Moment::before_update);
          local.step();
          reached(Moment::after_update);
        };
        if (!elastic.step(static_cast<int64_t>(batch->size()), compute, update)) break;
        const auto values = flat(*net);
        std::copy_n(values.data_ptr<double>(), local_values, entry.values);
        // What is in flight may be sent again to other ranks meanwhile.
        Hash hash;
        for (const auto& [name, state] : elastic.together([&] { return local.state_dict(); })) {
          for (const auto& [field, tensor] : state.tensors) {
            if (field != "in_flight") hash.add(tensor);
          }
        }
        entry.common = hash.value;
        entry.buffer = net->steps.item<double>();
        record.complete[self].add(entry);
        local.zero_grad();
        set_rate(optimizer, step);
        if (method.writes) {
          write(*net);
          local.parameters_loaded();
        }
        if (elastic.steps() != step || local.steps() != step) {
          return fmt::format("{} and {} steps, not {}", elastic.steps(), local.steps(), step);
        }
        ++step;
        reached(Moment::between_steps);
      }
    }
  }
  const auto own = flat(*net);
  const bool agree = elastic.together([&] {
    const auto mean = local.mean_parameters();
    reached(Moment::evaluation);
    const auto most = flat(*net);
    world.group().all_reduce(most, ReduceOp::max).wait();
    return most.equal(flat(*net));
  });
  if (!agree) return "the mean of the parameters differs from rank to rank";
  return own.equal(flat(*net)) ? "" : "the parameters are not back after the evaluation";
}

}  // namespace shoal::test
