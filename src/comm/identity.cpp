#include "comm/identity.h"

#include <torch/utils.h>

namespace shoal {
namespace {

class FinishedWork : public TransportWork {
 public:
  bool done() override { return true; }
  bool wait_for(Milliseconds, Milliseconds) override { return true; }
};

class IdentityTransport : public Transport {
 public:
  std::string name() const override { return "identity"; }
  bool checks_agreement() const override { return true; }

  std::unique_ptr<TransportWork> issue(const Call& call) override {
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < call.outputs.size(); ++i) {
      call.outputs[i].view({-1}).copy_(call.inputs[i].view({-1}));
    }
    return std::make_unique<FinishedWork>();
  }
};

}  // namespace

// 128-byte alignment: whole cache-line pairs and the widest vector loads. The CPU allocator of libtorch gives 64.
at::Tensor Transport::allocate(int64_t numel, const at::TensorOptions& options) {
  constexpr int64_t alignment = 128;
  const auto element = static_cast<int64_t>(options.dtype().itemsize());
  auto memory = at::zeros({numel + alignment / element}, options);
  const auto address = reinterpret_cast<uintptr_t>(memory.data_ptr());
  const auto skip = static_cast<int64_t>((alignment - address % alignment) % alignment) / element;
  return memory.narrow(0, skip, numel);
}

std::shared_ptr<Transport> make_identity_transport() {
  return std::make_shared<IdentityTransport>();
}

}  // namespace shoal
