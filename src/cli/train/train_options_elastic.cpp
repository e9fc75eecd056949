// Options for jobs that go on without ranks that have ended.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <set>
#include <string>
#include <vector>

#include "cli/train/require.h"
#include "cli/train/train_options.h"

namespace shoal::cli {
namespace {

void check_straggler_seconds(const TrainOptions& options) {
  if (!options.straggler_seconds) return;
  if (!options.elastic) throw UsageError("--straggler-seconds: give --elastic, so that the others can go on");
  if (!(*options.straggler_seconds > 0 && 2 * *options.straggler_seconds < options.timeout_seconds)) {
    throw UsageError(fmt::format("--straggler-seconds {}: give more than 0 and less than half of --timeout {}",
                                 *options.straggler_seconds, options.timeout_seconds));
  }
}

void check_keep_global_batch(const TrainOptions& options) {
  if (!options.keep_global_batch) return;
  if (!options.elastic) throw UsageError("--keep-global-batch: give --elastic, so that ranks may end");
  if (options.reference_data()) throw UsageError("--keep-global-batch: reference data has no epochs to share out");
  const std::set<std::string> alone{"local_sgd", "slowmo", "diloco"};
  if (alone.contains(options.strategy)) {
    throw UsageError(
        fmt::format("--keep-global-batch: ranks of --strategy {} have no gradients in common", options.strategy));
  }
  const auto micro_batches = int64_t{options.accumulate} * options.ranks.value_or(1);
  const bool grows = options.ranks && options.elastic_most > micro_batches;
  if (grows && options.batch * micro_batches % options.elastic_most != 0) {
    throw UsageError(fmt::format(
        "--keep-global-batch: {} samples of a step cannot be divided among {} ranks, to which --elastic lets "
        "the job grow: give another --batch or --accumulate",
        options.batch * micro_batches, options.elastic_most));
  }
}

void check_silent_host_seconds(const TrainOptions& options) {
  if (!options.silent_host_seconds) return;
  if (!options.elastic) throw UsageError("--silent-host-seconds: give --elastic, so that the other hosts can go on");
  if (!(*options.silent_host_seconds >= 0.5 && *options.silent_host_seconds < 1e6)) {
    throw UsageError(
        fmt::format("--silent-host-seconds {}: give 0.5 or more, below 1e6", *options.silent_host_seconds));
  }
}

// UsageError for what would not go on, with the reason.
void refuse_what_cannot_go_on(const TrainOptions& options) {
  const auto refuse = [](const std::string& what, const std::string& why) {
    throw UsageError(fmt::format("--elastic with {}: {}", what, why));
  };
  if (options.device != "cpu")
    refuse("--device " + options.device, "only what lies in the CPU's memory outlives a rank");
  if (!options.replan.empty())
    refuse(
        "--replan",
        "a rank that ends in the change of strategy would take its part of the state with it; leave one of them out, "
        "or give --save, and --resume latest under the other strategy");
  if (options.strategy == "ddp" && options.values().given("optimizer_in_backward")) {
    refuse("--optimizer-in-backward", "a step whose updates have begun cannot be undone; leave one of them out");
  }
  const bool oss = options.strategy == "zero1" || options.strategy == "zero2";
  if (oss && options.precision().scaler) {
    refuse(fmt::format("--strategy {} --dtype {}", options.strategy, options.dtype),
           "a loss scaler communicates in the update; take ddp, megatron or fsdp, or --dtype bf16_mixed");
  }
  const bool sockets = options.transport == "tcp" || options.transport == "gloo";
  const bool memory = options.transport == "auto" || options.transport == "host";
  const std::set<std::string> by_host{"hybrid", "hybrid_grad_op", "hybrid_gossip"};  // with shards in a host's memory
  if (memory || (sockets && !by_host.contains(options.strategy))) return;
  refuse(fmt::format("--strategy {} --transport {}", options.strategy, options.transport),
         by_host.contains(options.strategy) ? "take auto or host" : "take auto, host, tcp or gloo");
}

}  // namespace

void check_elastic(const TrainOptions& options) {
  if (options.max_restarts != 0 && options.elastic_most == 0) {
    throw UsageError("--max-restarts: give --elastic MIN:MAX, so that ranks may join");
  }
  check_straggler_seconds(options);
  check_keep_global_batch(options);
  check_silent_host_seconds(options);
  if (!options.elastic) return;
  require_at_least("--elastic", *options.elastic, 1);
  if (options.ranks && *options.elastic > *options.ranks) {
    throw UsageError(
        fmt::format("--elastic {}: give at most --ranks {}, the ranks that start", *options.elastic, *options.ranks));
  }
  if (!options.chosen().elastic) {
    throw UsageError(
        fmt::format("--elastic: --strategy {} does not go on without a rank that has ended; take one of {}",
                    options.strategy, fmt::join(elastic_strategies(), ", ")));
  }
  refuse_what_cannot_go_on(options);
}

}  // namespace shoal::cli
