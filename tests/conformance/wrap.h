#pragma once
// Wrapping of a module by each strategy.

#include <torch/nn/modules/container/sequential.h>

#include <functional>
#include <memory>

#include "shoal/ddp.h"
#include "shoal/fsdp.h"
#include "shoal/group.h"
#include "shoal/local_updates.h"
#include "shoal/megatron.h"
#include "tests/conformance/trained.h"

namespace shoal::test {

// Collective.
struct Wrap {
  std::function<std::unique_ptr<Trained>(std::shared_ptr<Network>, const Setup&, const Group&)> network;
  std::function<std::unique_ptr<Trained>(std::shared_ptr<torch::nn::SequentialImpl>, const Setup&, const Group&)>
      sequential;
};

Wrap without_shoal();
Wrap with_ddp(const DistributedDataParallelOptions& options = {});
Wrap with_zero1();
Wrap with_zero2();
Wrap with_megatron(const DistributedOptimizerOptions& options = {});
Wrap with_fsdp(ShardingStrategy kind);
Wrap with_decentralized();
Wrap with_local_updates(const LocalUpdatesOptions& options);
Wrap with_shard_gossip();

// Number of ranks that share a model under the hybrid strategies and shard gossip.
inline int ranks_per_host(const Group& group) {
  return group.size() % 2 == 0 ? 2 : 1;
}

}  // namespace shoal::test
