#include "training/wrapper_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "training/hook_text.h"

namespace shoal {

StrategyOption compress_option() {
  return {.name = "compress",
          .default_value = "none",
          .help =
              "compression of gradients: none, fp16, bf16, int8, topk:FRACTION, powersgd:RANK[:START] (from step "
              "START on, default 10; not where ranks want parts of the sums)"};
}

StrategyOption fp32_gradients_option(bool usual) {
  return {.name = "grad_reduce_in_fp32",
          .type = StrategyOption::Type::flag,
          .default_value = usual ? "true" : "false",
          .help = "gradients of 16-bit parameters are added up in float32"};
}

std::shared_ptr<CommunicationHook> hook_of(const OptionValues& values, const TrainingOptions& options) {
  return options.communication_hook ? options.communication_hook : make_hook(values.text("compress"));
}

void check_hook_of_parts(const std::string& strategy, const OptionValues& values) {
  const auto hook = make_hook(values.text("compress"));
  if (!hook || hook->serves(SumResult::ranges)) return;
  throw StrategyOptionError("compress",
                            fmt::format(" {}: gives every rank whole sums, and {} wants parts of them; it is for ddp, "
                                        "zero1, fsdp_no_shard and the hybrid strategies",
                                        values.text("compress"), strategy));
}

std::vector<StrategyOption> ddp_option_list() {
  return {{.name = "bucket_cap_mb",
           .type = StrategyOption::Type::number,
           .default_value = "25",
           .help = "MiB of gradients per all-reduce"},
          {.name = "first_bucket_mb",
           .type = StrategyOption::Type::number,
           .default_value = "1",
           .help = "MiB of the first bucket"},
          {.name = "find_unused_parameters",
           .type = StrategyOption::Type::flag,
           .default_value = "false",
           .help = "allow parameters that no rank uses"},
          {.name = "static_graph",
           .type = StrategyOption::Type::flag,
           .default_value = "false",
           .help = "every step uses the graph of the first"},
          {.name = "no_bucket_view",
           .type = StrategyOption::Type::flag,
           .default_value = "false",
           .help = "keep gradients outside of the buckets"},
          fp32_gradients_option(false),
          compress_option()};
}

DistributedDataParallelOptions ddp_options(const OptionValues& values, const TrainingOptions& options) {
  return {.find_unused_parameters = values.flag("find_unused_parameters"),
          .static_graph = values.flag("static_graph"),
          .grad_reduce_in_fp32 = values.flag("grad_reduce_in_fp32"),
          .ignored = options.ignored,
          .precision = options.precision,
          .communication_hook = hook_of(values, options),
          .bucket_cap_mb = values.number("bucket_cap_mb"),
          .first_bucket_mb = values.number("first_bucket_mb"),
          .gradient_as_bucket_view = !values.flag("no_bucket_view")};
}

std::vector<StrategyOption> zero2_option_list() {
  return {{.name = "reduce_buffer_size",
           .type = StrategyOption::Type::integer,
           .default_value = "8388608",
           .help = "elements of gradients in a bucket",
           .minimum = 1},
          {.name = "find_unused_parameters",
           .type = StrategyOption::Type::flag,
           .default_value = "false",
           .help = "allow parameters that no rank uses"},
          fp32_gradients_option(false),
          compress_option()};
}

ShardedDataParallelOptions zero2_options(const OptionValues& values, const TrainingOptions& options) {
  return {.find_unused_parameters = values.flag("find_unused_parameters"),
          .grad_reduce_in_fp32 = values.flag("grad_reduce_in_fp32"),
          .ignored = options.ignored,
          .precision = options.precision,
          .communication_hook = hook_of(values, options),
          .reduce_buffer_size = values.integer("reduce_buffer_size")};
}

std::vector<StrategyOption> megatron_option_list() {
  return {{.name = "bucket_size",
           .type = StrategyOption::Type::integer,
           .default_value = "40000000",
           .help = "elements of gradients in one reduce-scatter",
           .minimum = 1},
          {.name = "no_overlap_grad_reduce",
           .type = StrategyOption::Type::flag,
           .default_value = "false",
           .help = "sums leave in step() and not during backward"},
          {.name = "overlap_param_gather",
           .type = StrategyOption::Type::flag,
           .default_value = "false",
           .help = "step() does not wait for the other ranks' parameters: their first use does"},
          {.name = "reuse_grad_buf_for_param_gather",
           .type = StrategyOption::Type::flag,
           .default_value = "false",
           .help = "parameters are gathered in the gradients' memory"},
          fp32_gradients_option(true),
          compress_option()};
}

DistributedOptimizerOptions megatron_options(const OptionValues& values, const TrainingOptions& options) {
  return {.overlap_grad_reduce = !values.flag("no_overlap_grad_reduce"),
          .overlap_param_gather = values.flag("overlap_param_gather"),
          .reuse_grad_buf_for_param_gather = values.flag("reuse_grad_buf_for_param_gather"),
          .grad_reduce_in_fp32 = values.flag("grad_reduce_in_fp32"),
          .clip_grad = options.clip_grad,
          .scaler = options.precision.scaler,
          .ignored = options.ignored,
          .communication_hook = hook_of(values, options),
          .bucket_size = values.integer("bucket_size")};
}

}  // namespace shoal
