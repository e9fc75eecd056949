// Strategies none and local: no exchange.

#include "training/builtin.h"
#include "training/strategies/replicated.h"

namespace shoal {
namespace {

class Local : public ReplicatedTraining {
 public:
  using ReplicatedTraining::ReplicatedTraining;
  std::optional<TrainingState> state() override { return std::nullopt; }
};

void check_single(const OptionValues&, const TrainingOptions&, int ranks, std::optional<int>) {
  if (ranks != 1) throw UsageError("strategy none trains in one process");
}

}  // namespace

std::vector<Strategy> strategies_without_exchange() {
  return {{.name = "none",
           .help = "one process",
           .synchronization = Synchronization::single_rank,
           .check = check_single,
           .make = [](const TrainingParts& parts) { return std::make_unique<ReplicatedTraining>(parts); }},
          {.name = "local",
           .help = "ranks that never communicate: the floor of the step time",
           .synchronization = Synchronization::independent,
           .make = [](const TrainingParts& parts) { return std::make_unique<Local>(parts); }}};
}

}  // namespace shoal
