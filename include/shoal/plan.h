#pragma once
// Plan of a training: memory per rank and communication per step under each strategy, without running it.

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <memory>
#include <string>
#include <vector>

#include "shoal/training.h"

namespace shoal {

// Communication of rank 0, in the terms of GroupStatistics. That of the others is equal, except that bytes differ where
// compressed gradients go to owners of unequal shares, and that under hybrid, with an optimizer that is not
// element-wise, each rank sends the sums of the parameters that it owns to the other hosts.
struct PlannedCalls {
  int64_t calls = 0;
  int64_t bytes = 0;

  void add(int64_t call_bytes) {
    ++calls;
    bytes += call_bytes;
  }
};

// Memory of one rank in bytes.
struct RankMemory {
  int64_t parameters = 0;
  int64_t gradients = 0;  // at the end of a step
  int64_t state = 0;      // of the optimizer, including float32 main copies
  int64_t buffers = 0;
  int64_t second_owner_bytes = 0;  // of shards whose second owner the rank is, with PlanOptions::elastic

  int64_t total() const { return parameters + gradients + state + buffers + second_owner_bytes; }
};

struct StrategyPlan {
  std::string strategy;
  std::vector<RankMemory> ranks;
  bool parameters_once = false;  // the ranks of a host share one copy of the parameters
  bool gathers = false;          // parameters are gathered unit by unit when used; those gathers are not counted
  PlannedCalls first_step;       // buckets follow the order of registration
  PlannedCalls rebuild;          // between the first and the second step: agreement on the order of gradients
  int64_t plain_steps = 0;       // number of steps before a communication hook starts to compress
  PlannedCalls plain_step;       // each of these steps after the first
  PlannedCalls per_step;         // each step after those, unless a scaler skips it
  int hosts = 1;                 // that each have all of it: hybrid
  PlannedCalls between_hosts;    // those of per_step, under hybrid
  // With PlanOptions::elastic, beside per_step and the commit of Elastic: sums of gradients that go to second owners,
  // sent and received, and the question whether they have changed since.
  PlannedCalls to_second_owners;

  // Memory of the rank that needs most.
  const RankMemory& largest() const;
  // Memory of all ranks. A copy of the parameters that those of a host share counts once.
  int64_t total() const;
};

struct PlanOptions {
  int ranks = 2;
  // Of plannable_strategies(); empty: all of them, hybrid with several hosts only.
  std::vector<std::string> strategies{};
  // Hosts of equally many ranks. Only hybrid divides ranks by host, and its hosts use their host transports.
  int hosts = 1;
  // The ranks are those of an elastic job (shoal/elastic.h). Under zero1, zero2, megatron and fsdp, where they do not
  // share memory, each shard then has a second owner on another host.
  bool elastic = false;
  // The ranks are on one host and use its host transport: sharded strategies then hold one copy of the parameters for
  // all of them.
  bool one_host = true;
  // Forward that returns the loss, of any sample; it runs once, with its backward, which shows the order of gradients
  // and so the buckets. Gradients, buffers and random numbers are as before afterwards. None: gradients are expected in
  // reverse order of registration.
  std::function<at::Tensor()> loss{};
  // As for make_training(). Each strategy takes those of training.options that it has. A compression is given as the
  // option `compress`.
  TrainingOptions training{};
};

struct Plan {
  std::vector<StrategyPlan> strategies;

  // One row for each strategy: MiB of the rank that holds most, collectives and bytes per step of one rank.
  std::string table() const;
};
std::ostream& operator<<(std::ostream& out, const Plan& plan);

// Names of the strategies that can be planned.
std::vector<std::string> plannable_strategies();

// Plans the training of a module with an optimizer. The module has the dtype that it will be trained in; its values do
// not matter, and it stays as it is.
//
//   const auto plan = shoal::plan(model, shoal::optimizer_recipe<shoal::FusedAdamW>(1e-3),
//                                 {.ranks = 8, .loss = [&] { return cross_entropy(model->forward(x), y); }});
//   std::cout << plan;
//
// Communicates with no one: one process plans for any number of ranks. UsageError for a strategy that cannot be
// planned, for options that no planned strategy has, for a loss that is not one number with a gradient, for param
// groups that leave out a trainable parameter, and for an optimizer whose state is not registered
// (shoal/optimizer_state.h).
Plan plan(const std::shared_ptr<torch::nn::Module>& module, const OptimizerRecipe& recipe,
          const PlanOptions& options = {});
template <class Module>
Plan plan(const torch::nn::ModuleHolder<Module>& module, const OptimizerRecipe& recipe,
          const PlanOptions& options = {}) {
  return plan(module.ptr(), recipe, options);
}

}  // namespace shoal
