// One rank of a decentralised training with a fault: gossip_rank FAULT RANK TOPOLOGY TRANSPORT
//   FAULT  none; kill: between steps; kill_in_backward; pause: once, for longer than neighbours wait; slow: every step
//          takes four times as long; uneven: fewer batches; kill_long: as kill, and the others train until the rank is
//          replaced; again: this is the replacing process; still_there: a process that wants the place too early
// Prints "trained loss=.. skipped=.. older=.. newer=.. removed=.. rejoined=.. seconds=.." and, if the remaining ranks
// can meet, "mean=.." after they have averaged. With "again", first "state=.." and "shift=..".

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <chrono>
#include <csignal>
#include <thread>

#include "base/end_process.h"
#include "shoal/decentralized.h"
#include "shoal/error.h"
#include "shoal/schedules.h"
#include "shoal/world.h"
#include "tests/support/models.h"

namespace shoal {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t fateful = 20;  // step of the fault
constexpr double shift = 400;

void sleep_ms(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

void train(const std::string& fault, int victim, const std::string& topology, const std::string& transport) {
  WorldOptions options;
  options.transport = transport;
  options.rejoin = fault == "again" || fault == "still_there";
  options.rendezvous_timeout_seconds = 20;
  const auto world = init(options);
  const bool here = world.rank() == victim;
  auto model = test::seeded(1);
  // Long runs have rate zero after 20 steps, so that later additions of one rank can be found in all ranks' parameters.
  const bool is_long = fault == "kill_long" || fault == "again";
  const ScheduleFactory rest = [](torch::optim::Optimizer& optimizer) {
    return std::make_unique<LambdaLR>(optimizer, [](int64_t done) { return done < fateful ? 1.0 : 0.0; });
  };
  DecentralizedDataParallel parallel(
      model, optimizer_recipe<torch::optim::SGD>(torch::optim::SGDOptions(0.2).momentum(is_long ? 0.5 : 0)),
      world.group(),
      {.topology = make_topology(topology, world.size()),
       .schedule = is_long ? rest : ScheduleFactory(),
       .neighbour_timeout_seconds = 0.4,
       .bucket_cap_mb = 0.001});
  bool armed = false;
  model->second->weight.register_hook([&](const at::Tensor&) {
    if (armed) std::raise(SIGKILL);
  });
  const auto target = [](const at::Tensor& x) { return x.narrow(1, 0, 5).sin(); };
  const auto loss_at = [&](int64_t step) {
    const auto x = test::batch(world.rank(), step, 0, 16);
    return (parallel.forward(x) - target(x)).pow(2).mean();
  };
  if (fault == "again") {
    const torch::NoGradGuard no_grad;
    at::Tensor(model->third->bias).add_(shift);
    double momentum = 0;
    for (const auto& [name, state] : parallel.state_dict()) {
      momentum += state.tensors.at("momentum_buffer").abs().sum().item<double>();
    }
    fmt::print("step={} state={:.4g}\n", parallel.steps(), momentum);
  }
  const auto start = Clock::now();
  // All ranks include the new process from the same step on, and make the same number of steps together.
  constexpr int64_t together = 300;
  int64_t steps = fault == "again" ? parallel.steps() + together : is_long ? 6000 : 120;
  for (auto step = parallel.steps(); step < steps; ++step) {
    if (here && step == fateful) {
      if (fault.starts_with("kill") && fault != "kill_in_backward") std::raise(SIGKILL);
      if (fault == "pause") sleep_ms(1500);
      if (fault == "uneven") break;
    }
    sleep_ms(here && fault == "slow" ? 20 : 5);
    armed = here && step == fateful && fault == "kill_in_backward";
    loss_at(step).backward();
    if (steps == 6000 && !parallel.statistics().rejoined.empty()) steps = parallel.steps() + together;
  }
  const auto seconds = std::chrono::duration<double>(Clock::now() - start).count();
  double loss = 0;
  {
    const torch::NoGradGuard no_grad;
    for (int64_t step = 1000; step < 1020; ++step) loss += loss_at(step).item<double>() / 20;
  }
  const auto& seen = parallel.statistics();
  fmt::print("trained loss={:.4f} exchanged={} skipped={} older={} newer={} removed={} rejoined={} seconds={:.2f}\n",
             loss, seen.exchanged, seen.skipped, seen.older, seen.newer, fmt::join(seen.removed, "+"),
             fmt::join(seen.rejoined, "+"), seconds);
  std::fflush(nullptr);
  // Rank 0 serves the store, without which the others cannot form a group.
  if (fault.starts_with("kill") && victim == 0) return;
  const auto before = model->third->bias.detach().mean().item<double>();
  if (fault == "uneven") return;
  parallel.global_avg();
  double sum = 0;
  for (const auto& parameter : model->parameters()) sum += parameter.abs().sum().item<double>();
  fmt::print("mean={:.17g} bias={:.17g} distance={:.3g}\n", sum, before,
             std::abs(before - model->third->bias.detach().mean().item<double>()));
}

}  // namespace
}  // namespace shoal

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  at::set_num_threads(1);
  try {
    shoal::train(argv[1], std::stoi(argv[2]), argv[3], argv[4]);
    shoal::end_process(0);
  } catch (const shoal::Error& error) {
    fmt::print("error: {}\n", error.what());
    std::fflush(nullptr);
    std::_Exit(1);
  }
}
