#include "tests/conformance/strategy.h"

#include "tests/conformance/exceptions.h"

namespace shoal::test {
namespace {

Part divided(const Group& group) {
  return {group.rank(), group.size()};
}
// Ranks that train on their own for a while have the same batch.
Part same(const Group&) {
  return {};
}
Part divided_in_host(const Group& group) {
  return {group.rank() % ranks_per_host(group), ranks_per_host(group)};
}

}  // namespace

const Strategy& one_process() {
  static const Strategy strategy{"one_process", same, without_shoal()};
  return strategy;
}

const std::vector<Strategy>& strategies() {
  static const std::vector<Strategy> list{
      {"ddp", divided, with_ddp(), of_ddp()},
      {"ddp_own_gradients", divided, with_ddp({.gradient_as_bucket_view = false}), of_ddp()},
      {"zero1", divided, with_zero1(), of_zero1()},
      {"zero2", divided, with_zero2(), of_zero2()},
      {"megatron", divided, with_megatron(), of_megatron()},
      {"megatron_in_grads", divided, with_megatron({.reuse_grad_buf_for_param_gather = true}), of_megatron_in_grads()},
      {"megatron_late_gather", divided, with_megatron({.overlap_param_gather = true}), of_megatron_late_gather()},
      {"megatron_no_overlap", divided, with_megatron({.overlap_grad_reduce = false}), of_megatron_no_overlap()},
      {"fsdp", divided, with_fsdp(ShardingStrategy::full_shard), of_fsdp() + of_gathered(Exception::on_network)},
      {"fsdp_grad_op", divided, with_fsdp(ShardingStrategy::shard_grad_op),
       of_fsdp() + of_gathered(Exception::on_network)},
      {"fsdp_no_shard", divided, with_fsdp(ShardingStrategy::no_shard), of_fsdp()},
      {"fsdp_hybrid", divided, with_fsdp(ShardingStrategy::hybrid_shard),
       of_fsdp() + of_gathered(Exception::on_network_in_pairs)},
      {"fsdp_hybrid_grad_op", divided, with_fsdp(ShardingStrategy::hybrid_shard_grad_op),
       of_fsdp() + of_gathered(Exception::on_network_in_pairs)},
      {"decentralized", same, with_decentralized(), of_decentralized()},
      {"local_sgd", same, with_local_updates({.every = 1}), of_local_sgd()},
      {"slowmo", same, with_local_updates({.every = 1, .outer = SlowMo{.slow_lr = 1, .slow_momentum = 0}}),
       of_diloco()},
      {"diloco", same, with_local_updates({.every = 1, .outer = OuterNesterov{.lr = 1, .momentum = 0}}), of_diloco()},
      {"shard_gossip", divided_in_host, with_shard_gossip(),
       of_shard_gossip() + of_gathered(Exception::on_network_in_pairs)},
  };
  return list;
}

}  // namespace shoal::test
