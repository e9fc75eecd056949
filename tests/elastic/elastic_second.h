#pragma once
// Elastic jobs whose shards have second owners: what their tests have in common.

#include <memory>

#include "tests/elastic/elastic_hosts.h"

namespace shoal::test {

class ElasticSecondOwner : public OnHosts {};

inline FullyShardedCore& fsdp_of(const Wrapped& wrapped) {
  return dynamic_cast<FullyShardedCore&>(*wrapped.parallel);
}

inline torch::nn::Module& module_of(const Wrapped& wrapped) {
  return wrapped.parallel ? *wrapped.parallel->module() : *wrapped.megatron()->modules().front();
}

inline Group group_of(const Wrapped& wrapped) {
  return wrapped.parallel ? wrapped.parallel->group() : wrapped.megatron()->group();
}

inline void backward_of(const Wrapped& wrapped, const at::Tensor& x) {
  wrapped.backward(loss_of(wrapped.forward(x), x));
}

}  // namespace shoal::test
