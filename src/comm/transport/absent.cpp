#include "comm/transport/absent.h"

#include "shoal/error.h"

namespace shoal {
namespace {

class AbsentTransport : public Transport {
 public:
  std::string name() const override { return "absent"; }
  bool checks_agreement() const override { return true; }
  std::unique_ptr<TransportWork> issue(const Call& call) override {
    throw UsageError(call.describe() +
                     ": the world's group cannot communicate in a process that has rejoined the job; use "
                     "DecentralizedDataParallel::remaining()");
  }
};

}  // namespace

std::shared_ptr<Transport> make_absent_transport() {
  return std::make_shared<AbsentTransport>();
}

}  // namespace shoal
