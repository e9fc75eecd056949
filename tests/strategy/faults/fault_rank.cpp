// One rank of a training run with a fault: fault_rank POINT RANK [TRANSPORT [TIMEOUT]]
//   POINT  none; in step 3: forward, backward, all_reduce (kill -9 there), stop (SIGSTOP in forward), launcher (stops
//          its launcher and dies in forward), late (sleeps for longer than the timeout), leave (ends normally),
//          throw_forward, throw_backward (not caught), give_up (throws in backward, catches it and trains on); long:
//          reports that, and trains on; order, size, dtype, maximum, root, skip, extra: of its metrics
// Prints "trained" or "error: ...".

#include <fmt/format.h>
#include <torch/types.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <thread>

#include "base/end_process.h"
#include "shoal/ddp.h"
#include "shoal/error.h"
#include "shoal/world.h"
#include "tests/support/models.h"
#include "tests/support/with_transport.h"

namespace shoal {
namespace {

const std::vector<std::string> metric_faults{"order", "size", "dtype", "maximum", "root", "skip", "extra"};

// Returns when every thread of it has stopped: on a busy machine it may otherwise still see how this rank ends.
void stop_launcher() {
  const auto launcher = getppid();
  kill(launcher, SIGSTOP);
  const auto running = [&] {
    for (const auto& thread : std::filesystem::directory_iterator(fmt::format("/proc/{}/task", launcher))) {
      std::ifstream file(thread.path() / "stat");
      const std::string stat{std::istreambuf_iterator<char>(file), {}};
      if (stat.find(") T ") == std::string::npos) return true;
    }
    return false;
  };
  while (running()) std::this_thread::sleep_for(std::chrono::milliseconds(10));
}

// Transport that dies inside the collective: after issue, before the wait.
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

// Joint work of ranks after each step; `fault` selects this rank's fault.
void sum_metrics(const Group& group, int64_t step, const std::string& fault) {
  const Label loss{step, -1, "loss"};
  const Label accuracy{step, -1, "accuracy"};
  auto first = at::ones({4});
  auto second = at::ones({4});
  auto other = fault == "size" ? at::ones({5}) : fault == "dtype" ? at::ones({4}, at::kInt) : first;
  if (fault == "order") group.all_reduce(second, ReduceOp::sum, accuracy).wait();
  if (fault != "skip") group.all_reduce(other, fault == "maximum" ? ReduceOp::max : ReduceOp::sum, loss).wait();
  if (fault == "extra") group.all_reduce(first, ReduceOp::sum, {step, -1, "speed"}).wait();
  if (fault != "order") group.all_reduce(second, ReduceOp::sum, accuracy).wait();
  group.broadcast(first, fault == "root" ? 2 : 0, {step, -1, "verdict"}).wait();
}

void train(const std::string& point, int victim, const std::string& transport, int timeout) {
  WorldOptions options;
  options.transport = transport;
  options.timeout_seconds = timeout;
  options.stopped_timeout_seconds = 2;
  options.rendezvous_timeout_seconds = 8;
  const auto world = init(options);
  const bool here = world.rank() == victim;
  const bool metrics = std::count(metric_faults.begin(), metric_faults.end(), point) > 0;
  bool armed = false;
  const auto group =
      test::with_transport(world.group(), [&](std::shared_ptr<Transport> inner) -> std::shared_ptr<Transport> {
        return std::make_shared<DeadlyTransport>(std::move(inner), &armed);
      });
  auto model = test::Mlp(12, 200);
  DistributedDataParallel parallel(model, group, {.bucket_cap_mb = 0.1, .first_bucket_mb = 0.1});
  bool in_backward = false;
  model->second->weight.register_hook([&](const at::Tensor&) {
    if (!in_backward) return;
    if (point != "backward") throw std::runtime_error("injected");
    std::raise(SIGKILL);
  });
  const int64_t steps = point == "long" ? 1'000'000 : 6;
  for (int64_t step = 0; step < steps; ++step) {
    const bool now = here && step == 3;
    model->zero_grad();
    auto loss = parallel.forward(test::batch(world.rank(), step)).pow(2).mean();
    if (now && point == "forward") std::raise(SIGKILL);
    if (now && point == "stop") std::raise(SIGSTOP);
    if (now && point == "launcher") {
      stop_launcher();
      std::raise(SIGKILL);
    }
    if (step == 3 && point == "long") {
      fmt::print("training\n");
      std::fflush(nullptr);
    }
    if (now && point == "late") std::this_thread::sleep_for(std::chrono::seconds(timeout + 6));
    if (now && point == "leave") return;
    if (now && point == "throw_forward") throw std::runtime_error("injected");
    in_backward = now && (point == "backward" || point == "throw_backward" || point == "give_up");
    armed = now && point == "all_reduce";
    try {
      loss.backward();
    } catch (const StepAbandoned&) {
      continue;
    } catch (const std::runtime_error&) {
      if (!now || point != "give_up") throw;
      parallel.abandon_step();
      continue;
    }
    armed = false;
    if (metrics) sum_metrics(world.group(), step, now ? point : "");
  }
}

}  // namespace
}  // namespace shoal

int main(int argc, char** argv) {
  if (argc < 3 || argc > 5) return 2;
  at::set_num_threads(1);
  try {
    if (std::string(argv[1]) == "end_at_once") {
      shoal::init();
      return 0;
    }
    shoal::train(argv[1], std::stoi(argv[2]), argc > 3 ? argv[3] : "auto", argc > 4 ? std::stoi(argv[4]) : 10);
    fmt::print("trained\n");
    shoal::end_process(0);
  } catch (const shoal::Error& error) {
    fmt::print("error: {}\n", error.what());
    std::fflush(nullptr);
    std::_Exit(1);  // as a program would, because the group is unusable
  }
}
