#include "tests/conformance/wrap.h"

#include "tests/conformance/gossiping.h"
#include "tests/conformance/replicated.h"
#include "tests/conformance/sharded.h"

namespace shoal::test {
namespace {

template <template <class> class Of, class... Options>
Wrap wrap_in(const Options&... options) {
  return {[=](std::shared_ptr<Network> model, const Setup& setup, const Group& group) {
            return std::make_unique<Of<Network>>(std::move(model), setup, group, options...);
          },
          [=](std::shared_ptr<torch::nn::SequentialImpl> model, const Setup& setup, const Group& group) {
            return std::make_unique<Of<torch::nn::SequentialImpl>>(std::move(model), setup, group, options...);
          }};
}

}  // namespace

Wrap without_shoal() {
  return wrap_in<OneProcess>();
}
Wrap with_ddp(const DistributedDataParallelOptions& options) {
  return wrap_in<Ddp>(options);
}
Wrap with_zero1() {
  return wrap_in<Zero1>();
}
Wrap with_zero2() {
  return wrap_in<Zero2>();
}
Wrap with_megatron(const DistributedOptimizerOptions& options) {
  return wrap_in<Megatron>(options);
}
Wrap with_fsdp(ShardingStrategy kind) {
  return wrap_in<Fsdp>(kind);
}
Wrap with_decentralized() {
  return wrap_in<Decentralized>();
}
Wrap with_local_updates(const LocalUpdatesOptions& options) {
  return wrap_in<Local>(options);
}
Wrap with_shard_gossip() {
  return wrap_in<Gossip>();
}

}  // namespace shoal::test
