#include "comm/transport/dry_run.h"

#include <torch/utils.h>

#include <algorithm>
#include <numeric>

#include "comm/group/group_state.h"
#include "comm/rendezvous/world_state.h"
#include "shoal/world.h"

namespace shoal {
namespace {

class DryRunWork : public TransportWork {
 public:
  bool done() override { return true; }
  bool wait_for(Milliseconds, Milliseconds) override { return true; }
};

class DryRunTransport : public Transport {
 public:
  std::string name() const override { return "dry run"; }
  bool checks_agreement() const override { return true; }

  // Fills every output with rank 0's input, or its part of it.
  std::unique_ptr<TransportWork> issue(const Call& call) override {
    const torch::NoGradGuard no_grad;
    for (const auto& output : call.outputs) {
      const auto to = output.view({-1});
      const auto from = call.inputs.front().view({-1});
      const auto numel = std::min(to.numel(), from.numel());
      for (int64_t begin = 0; begin < to.numel(); begin += numel) {
        to.narrow(0, begin, numel).copy_(from.narrow(0, 0, numel));
      }
    }
    return std::make_unique<DryRunWork>();
  }
};

}  // namespace

Group dry_run_group(int ranks) {
  const auto alone = init({.rank = 0, .size = 1});
  auto state = std::make_shared<GroupState>(*state_of(alone.group()));
  state->world_ranks.resize(ranks);
  std::iota(state->world_ranks.begin(), state->world_ranks.end(), 0);
  state->progress = std::make_shared<GroupProgress>();
  state->progress->calls = std::make_shared<CallHistory>(/*keeps=*/false);
  state->transport = state->progress->transport = std::make_shared<DryRunTransport>();
  return Group(std::move(state));
}

}  // namespace shoal
