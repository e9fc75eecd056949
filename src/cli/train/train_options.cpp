#include "cli/train/train_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/limits.h"
#include "cli/strategies/compress.h"
#include "cli/strategies/optimizers.h"
#include "cli/strategies/schedules.h"
#include "cli/strategies/strategies.h"
#include "comm/transport/transport.h"
#include "models/registry.h"
#include "shoal/error.h"

namespace shoal::cli {
namespace {

void require_one_of(const char* option, const std::string& value, const std::vector<std::string>& choices) {
  if (std::find(choices.begin(), choices.end(), value) != choices.end()) return;
  throw UsageError(fmt::format("{} {}: not in this version; available: {}", option, value, fmt::join(choices, ", ")));
}

template <class T>
void require_at_least(const char* option, T value, T least) {
  if (value < least) throw UsageError(fmt::format("{} {}: give at least {}", option, value, least));
}

void complete_saving(TrainOptions& options) {
  require_at_least<int64_t>("--save-every", options.save_every, 0);
  require_at_least<int64_t>("--keep-last", options.keep_last, 0);
  if (options.save_every > 0 && options.save.empty()) throw UsageError("--save-every needs --save DIR");
  if (options.keep_last > 0 && options.save.empty()) throw UsageError("--keep-last needs --save DIR");
  if (options.resume == "latest") {
    if (options.save.empty()) throw UsageError("--resume latest needs --save DIR: it is the latest checkpoint there");
    options.resume = options.save;
  }
  if (options.partial && options.resume.empty()) throw UsageError("--partial needs --resume PATH");
  if (options.strategy != "local") return;
  for (const auto& [option, given] :
       {std::pair("--save-every", options.save_every > 0), std::pair("--keep-last", options.keep_last > 0),
        std::pair("--resume", !options.resume.empty())}) {
    if (!given) continue;
    throw UsageError(
        fmt::format("{}: --strategy local has no checkpoints, because its ranks do not communicate; --save DIR alone "
                    "saves a model at the end",
                    option));
  }
}

void complete_local_updates(TrainOptions& options) {
  require_at_least<int64_t>("--sync-every", options.local_updates.every, 1);
  require_at_least("--fragments", options.local_updates.fragments, 1);
  require_at_least<int64_t>("--sync-delay", options.local_updates.delay, 0);
  if (!options.reduce_dtype.empty()) {
    require_one_of("--reduce-dtype", options.reduce_dtype, {"float32", "bf16"});
    options.local_updates.reduce_dtype = options.reduce_dtype == "bf16" ? at::kBFloat16 : at::kFloat;
  }
  if (options.strategy == "slowmo") {
    const SlowMo usual;
    options.local_updates.outer = SlowMo{.slow_lr = options.outer_lr.value_or(usual.slow_lr),
                                         .slow_momentum = options.outer_momentum.value_or(usual.slow_momentum)};
  } else if (options.strategy == "diloco") {
    const OuterNesterov usual;
    options.local_updates.outer = OuterNesterov{.lr = options.outer_lr.value_or(usual.lr),
                                                .momentum = options.outer_momentum.value_or(usual.momentum)};
  }
  options.local_updates.validate();
}

void complete_compression(TrainOptions& options) {
  const auto hook = make_hook(options.compress);
  if (!hook) return;
  const auto& strategy = options.strategy;
  if (strategy == "none" || strategy == "local" || strategy == "decentralized" || options.takes_local_updates()) {
    throw UsageError(fmt::format("--compress {}: --strategy {} sends no gradients{}", options.compress, strategy,
                                 strategy == "decentralized" ? ", but parameters: give --exchange-dtype" : ""));
  }
  const bool whole = strategy == "ddp" || strategy == "zero1" || strategy == "hybrid";
  if (!whole && !hook->serves(SumFor::parts)) {
    throw UsageError(fmt::format(
        "--compress {}: not supported by --strategy {}, which scatters the sums; it is for ddp, zero1 and hybrid",
        options.compress, strategy));
  }
  // One object to one wrapper: the strategy uses one of these.
  options.ddp.communication_hook = options.zero2.communication_hook = options.megatron.communication_hook = hook;
}

void check_in_backward(const TrainOptions& options) {
  if (options.optimizer_in_backward.empty()) return;
  require_one_of("--optimizer-in-backward", options.optimizer_in_backward, {"exact", "stale", "per_bucket"});
}

}  // namespace

void TrainOptions::complete() {
  require_one_of("--strategy", strategy, strategy_names());
  require_one_of("--transport", transport, transport_names());
  require_one_of("--optimizer", optimizer, optimizer_names());
  require_one_of("--schedule", schedule, schedule_names());
  require_one_of("--dtype", dtype, {"float32", "bf16_mixed", "fp16_mixed", "bf16", "float64"});
  if (ranks) {
    require_at_least("--ranks", *ranks, 1);
    if (*ranks > max_ranks) throw UsageError(fmt::format("--ranks {}: give at most {}", *ranks, max_ranks));
  }
  if (strategy == "none" && ranks && *ranks != 1) {
    throw UsageError(fmt::format("--strategy none trains in one process: --ranks {} is not possible", *ranks));
  }
  require_at_least("--threads", threads, 0);
  require_at_least("--accumulate", accumulate, 1);
  require_at_least("--timeout", timeout_seconds, 1);
  if (batch < 0) throw UsageError(fmt::format("--batch {}: give at least 1", batch));
  if (steps) require_at_least<int64_t>("--steps", *steps, 1);
  if (epochs) require_at_least("--epochs", *epochs, 1);
  if (steps && epochs) throw UsageError("--steps and --epochs exclude each other: give one of them");
  if (lr && !(*lr > 0)) throw UsageError(fmt::format("--lr {}: give more than 0", *lr));
  complete_saving(*this);
  const bool known = data == "fashion-mnist" || data.rfind("fashion-mnist:", 0) == 0 || reference_data() || text_data();
  if (!known)
    throw UsageError(fmt::format("--data {}: fashion-mnist, fashion-mnist:FOLDER, reference or text:FILE", data));
  models::require_model(model, size);
  if (text_data() && model != "gpt") throw UsageError(fmt::format("--data text: requires --model gpt, not {}", model));
  if (!text_data() && !reference_data() && model == "gpt") {
    throw UsageError("--model gpt reads bytes: give --data text:FILE or reference");
  }
  if (reference_data() && epochs) throw UsageError("--epochs: reference data has no end; give --steps");
  if (reference_data() && eval) throw UsageError("--eval: reference data has no test set");
  if (init.empty()) init = reference_data() ? "reference" : "torch";
  require_one_of("--init", init, {"torch", "reference"});
  if (reference_data() && !steps) steps = 10;
  if (!reference_data() && !steps && !epochs) epochs = 1;
  check_optimizer(*this);
  check_schedule(*this);
  require_at_least("--topology-local-size", topology_local_size, 1);
  if (strategy == "hybrid_gossip" && exchange_dtype != "float32" && exchange_dtype != "bf16") {
    throw UsageError(fmt::format("--exchange-dtype {}: hybrid_gossip exchanges float32 or bf16", exchange_dtype));
  }
  require_one_of("--exchange-dtype", exchange_dtype, {"float32", "bf16", "int8", "top_k"});
  constexpr double years = 1e8;  // more does not fit the clock
  if (!(neighbour_timeout > 0 && neighbour_timeout <= years)) {
    throw UsageError(fmt::format("--neighbour-timeout {}: give seconds above 0, up to 1e8", neighbour_timeout));
  }
  if (batch == 0) batch = reference_data() ? 4 : 64;
  if (!(clip >= 0)) throw UsageError(fmt::format("--clip {}: give a norm, or 0 for none", clip));
  complete_compression(*this);
  check_in_backward(*this);
  ddp.precision = zero2.precision = precision();
  megatron.clip_grad = clip;
  megatron.scaler = precision().scaler;
  megatron.grad_reduce_in_fp32 = true;
  ddp.validate();
  complete_local_updates(*this);
}

WholeGradient TrainOptions::whole_gradient() const {
  if (optimizer_in_backward == "stale") return WholeGradient::stale;
  return optimizer_in_backward == "per_bucket" ? WholeGradient::per_bucket : WholeGradient::exact;
}

Precision TrainOptions::precision() const {
  const bool main_copies = strategy == "megatron" || strategy.starts_with("fsdp") || strategy.starts_with("hybrid");
  if (dtype == "bf16_mixed") return main_copies ? Precision::bf16() : Precision::bf16_mixed();
  if (dtype == "fp16_mixed") return main_copies ? Precision::fp16() : Precision::fp16_mixed();
  if (dtype == "bf16") return Precision::bf16();
  return dtype == "float64" ? Precision::float64() : Precision::float32();
}

void add_train_options(CLI::App& command, TrainOptions& options) {
  command.add_option("--model", options.model, "model: cnn, mlp, gpt")->capture_default_str();
  command.add_option("--size", options.size, "model size: tiny, small; gpt also large, gpt2")->capture_default_str();
  command
      .add_option("--data", options.data,
                  "training data: fashion-mnist[:FOLDER with the four IDX files], reference (computed by a hash), "
                  "text:FILE (bytes, for gpt)")
      ->capture_default_str();
  command.add_option("--init", options.init,
                     "initial parameters: torch, reference (computed by a hash; default with --data reference)");
  command
      .add_option(
          "--strategy", options.strategy,
          "ddp, zero1, zero2, megatron, fsdp, fsdp_grad_op, hybrid (fsdp on each host), local_sgd, slowmo, "
          "diloco (ranks exchange parameters every --sync-every steps), decentralized (every rank averages with "
          "a few neighbours), hybrid_gossip (fsdp on each host, decentralized between hosts), none (one process), "
          "local (ranks that never communicate: the floor of the "
          "step time)")
      ->capture_default_str();
  command.add_option("--ranks", options.ranks, "number of processes to start (default: 2, or as set by the launcher)");
  command.add_option("--threads", options.threads,
                     "compute threads per rank (default: OMP_NUM_THREADS, else cores / ranks on this host)");
  command.add_option("--transport", options.transport, fmt::format("{}", fmt::join(transport_names(), ", ")))
      ->capture_default_str();
  command.add_flag("--check-agreement", options.check_agreement,
                   "compare the arguments of every collective over ranks first, also over gloo");
  command
      .add_option("--timeout", options.timeout_seconds, "timeout of an operation in seconds, while all ranks are alive")
      ->capture_default_str();
  command
      .add_option("--optimizer", options.optimizer,
                  fmt::format("{} (muon: for matrices of hidden layers, adamw for the rest)",
                              fmt::join(optimizer_names(), ", ")))
      ->capture_default_str();
  command.add_option("--lr", options.lr,
                     "learning rate (default: sgd 0.05; sgd_momentum, adagrad, adafactor 0.01; others 1e-3)");
  command.add_option("--accum-iter", options.accum_iter,
                     "accum_adam, accum_adamw: steps per update of the moments (default: 4)");
  command
      .add_option("--schedule", options.schedule,
                  "learning-rate schedule: constant; linear_warmup, then constant; cosine, down to 0; one_cycle, up "
                  "and down; step, down by a factor")
      ->capture_default_str();
  command.add_option("--warmup-steps", options.warmup_steps,
                     "warm-up steps of linear_warmup, cosine (default: 0) and one_cycle (default: 30 %)");
  command.add_option("--decay-every", options.decay_every, "--schedule step: steps between two reductions of the rate");
  command.add_option("--decay-factor", options.decay_factor,
                     "--schedule step: factor of each reduction (default: 0.1)");
  command.add_option("--batch", options.batch,
                     "samples per micro-batch and rank (default: 4 for reference data, 64 otherwise)");
  command.add_option("--accumulate", options.accumulate, "micro-batches per step")->capture_default_str();
  command.add_option("--steps", options.steps, "optimizer steps (default for reference data: 10)");
  command.add_option("--epochs", options.epochs, "passes over the training data (default: 1)");
  command.add_option("--dtype", options.dtype, "float32, bf16_mixed, fp16_mixed, bf16, float64")->capture_default_str();
  command
      .add_option("--compress", options.compress,
                  "compression of gradients: none, fp16, bf16, int8, topk:FRACTION, powersgd:RANK[:START] (from step "
                  "START on, default 10; ddp, zero1, and hybrid between hosts)")
      ->capture_default_str();
  command.add_option("--clip", options.clip, "clip gradients to this total norm; 0: no clipping")
      ->capture_default_str();
  command
      .add_option(
          "--optimizer-in-backward", options.optimizer_in_backward,
          "ddp: update each bucket's parameters during backward and free its gradients. With --clip and loss scaling: "
          "exact (updates wait for the last gradient; default), stale (use the norm of the last step), per_bucket")
      ->expected(0, 1)
      ->default_str("exact");
  command.add_option("--seed", options.seed, "seed of parameters, data and shuffling")->capture_default_str();
  command.add_flag("--eval", options.eval, "evaluate on the test data after every epoch");
  command.add_option("--save", options.save,
                     "folder for checkpoints (step-N) and the model alone (model.safetensors), written at the end and "
                     "on an interrupt");
  command.add_option("--save-every", options.save_every, "also save a checkpoint every N steps, in the background");
  command.add_option("--keep-last", options.keep_last, "keep the newest N checkpoints (default: all)");
  command.add_option("--resume", options.resume,
                     "resume from a checkpoint or the latest in a folder; latest: the latest in --save DIR");
  command.add_flag("--partial", options.partial,
                   "--resume loads only the parameters and buffers that the checkpoint has, and training begins at "
                   "step 0: for fine-tuning");
  command.add_option("--trace", options.trace, "folder for Chrome traces, rank-N.json; see shoal trace merge");
  command.add_option("--flight-recorder", options.flight_recorder,
                     "folder for the flight recorders, which keep each rank's last collectives; see shoal flight");
  command.add_option(
      "--metrics", options.metrics,
      "append a line of JSON to this file after every step and evaluation; loss and times are those of rank 0");
  command.add_flag("--logging-data", options.logging_data,
                   "print the logging data of rank 0's wrapper at the end (also part of --json)");
  command.add_option("--json", options.json, "write the report as JSON to this file; - is standard output");
  command.add_option("--topology", options.topology, "decentralized: name of the topology; see shoal topology --list")
      ->capture_default_str();
  command.add_option("--topology-file", options.topology_file,
                     "decentralized: read the topology from this JSON file instead");
  command
      .add_option("--topology-local-size", options.topology_local_size,
                  "decentralized: ranks per host in the topology; hybrid_gossip: ranks that share a model (1: those of "
                  "each host)")
      ->capture_default_str();
  command
      .add_option("--exchange-dtype", options.exchange_dtype,
                  "decentralized: format of the exchange: float32, bf16; compressed differences: int8, top_k (1 % of "
                  "the elements)")
      ->capture_default_str();
  command
      .add_option("--neighbour-timeout", options.neighbour_timeout,
                  "decentralized: seconds after which a late neighbour is left out")
      ->capture_default_str();
  command
      .add_option("--bucket-cap-mb", options.ddp.bucket_cap_mb,
                  "ddp: MiB of gradients per all-reduce; decentralized: MiB of parameters per exchange")
      ->capture_default_str();
  command.add_option("--first-bucket-mb", options.ddp.first_bucket_mb, "ddp: MiB of the first bucket")
      ->capture_default_str();
  command.add_flag("--find-unused-parameters", options.ddp.find_unused_parameters,
                   "ddp: allow parameters that no rank uses");
  command.add_flag("--static-graph", options.ddp.static_graph, "ddp: every step uses the graph of the first");
  command.add_flag("!--no-bucket-view", options.ddp.gradient_as_bucket_view,
                   "ddp: keep gradients outside of the buckets");
  command
      .add_option("--sync-every", options.local_updates.every,
                  "local_sgd, slowmo, diloco: steps between two exchanges of a parameter")
      ->capture_default_str();
  command
      .add_option("--fragments", options.local_updates.fragments,
                  "local_sgd, slowmo, diloco: number of parts of the model, which are exchanged at different steps")
      ->capture_default_str();
  command
      .add_option("--sync-delay", options.local_updates.delay,
                  "local_sgd, slowmo, diloco: steps between sending an exchange and applying it")
      ->capture_default_str();
  command.add_option("--reduce-dtype", options.reduce_dtype,
                     "local_sgd, slowmo, diloco: dtype of exchanges: float32, bf16 (default: dtype of the parameters)");
  command.add_option("--outer-lr", options.outer_lr,
                     "learning rate of the outer optimizer: slowmo (default: 1), diloco (0.7)");
  command.add_option("--outer-momentum", options.outer_momentum,
                     "momentum of the outer optimizer: slowmo (default: 0.5), diloco (0.9)");
}

}  // namespace shoal::cli
