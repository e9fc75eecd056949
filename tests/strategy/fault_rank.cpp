// One rank of a training run that something happens to: fault_rank POINT RANK
//   POINT  none, start, forward, backward, all_reduce (kill -9 there in step 3), stop (SIGSTOP there), late (sleeps)
// Prints "trained" or "error: ...".

#include <fmt/format.h>
#include <torch/types.h>

#include <csignal>
#include <thread>

#include "comm/group_state.h"
#include "shoal/base/error.h"
#include "shoal/comm/world.h"
#include "shoal/strategy/ddp.h"
#include "tests/support/models.h"

namespace shoal {
namespace {

// Dies inside the collective: issued, not waited for.
class DeadlyTransport : public Transport {
 public:
  DeadlyTransport(std::shared_ptr<Transport> inner, const bool* armed) : inner_(std::move(inner)), armed_(armed) {}
  std::string name() const override { return inner_->name(); }
  std::unique_ptr<TransportWork> issue(const Call& call) override {
    auto work = inner_->issue(call);
    if (*armed_ && call.op == Op::all_reduce) std::raise(SIGKILL);
    return work;
  }

 private:
  std::shared_ptr<Transport> inner_;
  const bool* armed_;
};

void train(const std::string& point, int victim) {
  WorldOptions options;
  options.timeout_seconds = 10;
  options.stopped_timeout_seconds = 2;
  options.rendezvous_timeout_seconds = 8;
  const auto world = init(options);
  const bool here = world.rank() == victim;
  bool armed = false;
  const auto group = with_transport(world.group(), [&](std::shared_ptr<Transport> inner) -> std::shared_ptr<Transport> {
    return std::make_shared<DeadlyTransport>(std::move(inner), &armed);
  });
  auto model = test::Mlp(12, 200);
  DistributedDataParallel parallel(model, group, {.bucket_cap_mb = 0.1, .first_bucket_mb = 0.1});
  bool in_backward = false;
  model->second->weight.register_hook([&](const at::Tensor&) {
    if (in_backward) std::raise(SIGKILL);
  });
  for (int64_t step = 0; step < 6; ++step) {
    const bool now = here && step == 3;
    model->zero_grad();
    auto loss = parallel.forward(test::batch(world.rank(), step)).pow(2).mean();
    if (now && point == "forward") std::raise(SIGKILL);
    if (now && point == "stop") std::raise(SIGSTOP);
    if (now && point == "late") std::this_thread::sleep_for(std::chrono::seconds(16));
    in_backward = now && point == "backward";
    armed = now && point == "all_reduce";
    loss.backward();
  }
}

}  // namespace
}  // namespace shoal

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  at::set_num_threads(1);
  try {
    shoal::train(argv[1], std::stoi(argv[2]));
    fmt::print("trained\n");
    return 0;
  } catch (const shoal::Error& error) {
    fmt::print("error: {}\n", error.what());
    std::fflush(nullptr);
    std::_Exit(1);  // as a program would: the group is unusable
  }
}
