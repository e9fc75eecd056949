#include "tests/conformance/strategy.h"

namespace shoal::test {
namespace {

Part divided(const Group& group) {
  return {group.rank(), group.size()};
}
// Ranks that train on their own for a while have the same batch.
Part same(const Group&) {
  return {};
}
Part divided_in_host(const Group& group) {
  return {group.rank() % ranks_per_host(group), ranks_per_host(group)};
}

Exceptions operator+(Exceptions a, const Exceptions& b) {
  a.insert(b.begin(), b.end());
  return a;
}

Exceptions all(const std::vector<std::string>& behaviours, const Exception& exception) {
  Exceptions list;
  for (const auto& name : behaviours) list[name] = exception;
  return list;
}

// Backward updates; there is no optimizer to step, and no gradient after backward.
const Exceptions& of_decentralized() {
  static const Exceptions list =
      all({"zero_grad_of_the_base_class_before_forward", "zero_grad_of_the_base_class_between_forward_and_backward",
           "zero_grad_of_the_base_class_after_step", "zero_grad_of_the_base_class_to_zero_before_forward",
           "zero_grad_of_the_base_class_to_zero_between_forward_and_backward",
           "zero_grad_of_the_base_class_to_zero_after_step", "zero_grad_to_none_then_step",
           "zero_grad_to_zero_then_step", "a_loop_through_the_base_class", "a_step_with_a_closure",
           "accumulation_zeroed_by_the_base_class_to_zero", "rate_changed_in_the_options",
           "momentum_changed_in_the_options", "schedule_of_torch", "schedule_of_torch_on_a_plateau",
           "schedule_of_shoal", "torch_save_of_the_optimizer_and_back", "a_param_group_that_is_there_already"},
          {Exception::lacks, {"an optimizer to step"}}) +
      all({"clip_by_the_strategy", "clip_twice", "clip_then_zero_grad", "clip_after_accumulation"},
          {Exception::lacks, {"clip_grad of the options"}}) +
      all({"param_groups_with_options_of_their_own", "a_param_group_added_through_the_base_class", "ignored_parameters",
           "program_seq2seq_with_one_optimizer"},
          {Exception::lacks, {"param groups"}}) +
      all({"unequal_numbers_of_batches"}, {Exception::lacks, {"Join"}}) +
      all({"norms_of_gradients_logged", "gradients_cloned", "gradients_scaled_by_hand", "weight_decay_added_by_hand",
           "one_gradient_zeroed_by_hand"},
          {Exception::throws, {"undefined Tensor"}}) +
      all({"zero_grad_never",
           "zero_grad_every_second_step",
           "zero_grad_at_the_start_only",
           "zero_grad_of_the_module_then_step",
           "zero_grad_of_a_sub_module_then_step",
           "zero_grad_of_a_sub_module_to_zero_then_step",
           "one_gradient_reset_by_hand",
           "zero_grad_of_a_sub_module_before_forward",
           "zero_grad_between_two_backwards",
           "zero_grad_between_two_backwards_by_the_module",
           "zero_grad_drops_what_no_sync_has_added_up",
           "clip_grad_norm_of_torch",
           "clip_grad_norm_of_torch_by_the_largest",
           "clip_grad_norm_of_torch_of_a_part",
           "clip_grad_value_of_torch",
           "gradients_printed",
           "gradients_replaced_by_hand",
           "gradients_given_without_a_backward",
           "gradients_from_autograd_grad_given_by_hand",
           "step_twice_after_one_backward",
           "step_after_no_sync_alone",
           "step_every_second_backward",
           "two_forwards_then_two_backwards",
           "one_forward_two_backwards_of_its_graph",
           "one_forward_two_losses_backward_by_backward",
           "accumulation_without_no_sync",
           "accumulation_carried_over_a_step",
           "an_exception_after_backward_before_step"},
          {Exception::differs, {"every backward is a step, and drops its gradients"}}) +
      all({"load_between_backward_and_step", "set_data_of_one_parameter_between_backward_and_step",
           "written_in_place_between_backward_and_step", "evaluation_without_gradients_between_backward_and_step",
           "evaluation_in_inference_mode_between_backward_and_step",
           "evaluation_by_the_module_between_backward_and_step", "parameters_cloned_between_backward_and_step"},
          {Exception::differs, {"after backward parameters are updated already"}}) +
      all({"data_method_assigned_in_place", "written_in_place_between_steps", "weights_clamped_after_each_step",
           "weights_scaled_in_place_after_each_step", "copied_from_another_module_each_step"},
          {Exception::differs, {"neighbours mix in what they have been shown before"}, 2}) +
      all({"load_between_steps", "load_between_zero_grad_and_forward", "load_twice_in_a_row", "load_of_a_sub_module",
           "load_through_an_archive", "load_what_was_saved_in_training", "load_replaces_buffers",
           "load_of_values_of_their_own_that_are_averaged", "set_data_of_one_parameter_between_steps",
           "set_data_in_forward", "set_data_with_other_strides", "to_float_and_back", "tied_weights_loaded"},
          {Exception::refused, {"weight", "global_avg()"}, 2}) +
      all({"to_float_for_good"}, {Exception::refused, {"module.to(dtype)"}});
  return list;
}

// Where a rank does not hold whole gradients, what reads them is refused.
Exceptions of_parts(const std::string& holder, int from_ranks = 1) {
  return all({"clip_grad_norm_of_torch", "clip_grad_norm_of_torch_by_the_largest", "clip_grad_norm_of_torch_of_a_part",
              "clip_grad_value_of_torch", "norms_of_gradients_logged", "gradients_cloned", "gradients_printed",
              "gradients_scaled_by_hand", "weight_decay_added_by_hand", "gradients_read_after_step",
              "program_language_model_clipped_by_torch"},
             {Exception::refused, {" takes the gradient of parameter ", "whose sum " + holder}, from_ranks});
}

// Ranks that hold one model between them.
const Exceptions& of_replicas() {
  static const Exceptions list =
      all({"load_of_rank_0_alone", "load_of_values_of_their_own_that_are_averaged"},
          {Exception::refused, {"parameters that were loaded, replaced or written", "weight"}, 2});
  return list;
}

const Exceptions& of_unused() {
  static const Exceptions list = all({"a_parameter_that_no_rank_uses_without_the_option"},
                                     {Exception::refused, {"right.weight", "find_unused_parameters"}});
  return list;
}

const Exceptions& of_sharded_optimizers() {
  static const Exceptions list =
      all({"torch_save_of_the_optimizer_and_back"}, {Exception::refused, {"shoal::save"}}) +
      all({"a_param_group_added_through_the_base_class"}, {Exception::refused, {"torch::optim::Optimizer&"}});
  return list;
}

const Exceptions& of_megatron() {
  static const Exceptions list =
      of_replicas() + of_parts("DistributedOptimizer") + of_sharded_optimizers() +
      all({"to_float_for_good"}, {Exception::refused, {"first.weight", "module.to(dtype)"}}) +
      all({"clip_by_the_strategy", "clip_twice", "clip_then_zero_grad", "clip_after_accumulation"},
          {Exception::lacks, {"clip_grad of the options"}});
  return list;
}

const Exceptions& of_fsdp() {
  static const Exceptions list = of_replicas() + of_parts("FullyShardedDataParallel") + of_sharded_optimizers() +
                                 all({"to_float_for_good"}, {Exception::refused, {"first.weight", "module.to(dtype)"}});
  return list;
}

const Exceptions& of_local_updates() {
  static const Exceptions list =
      all({"unequal_shares_with_weights", "unequal_shares_with_weights_accumulated"},
          {Exception::lacks, {"a backward with a weight"}}) +
      all({"unequal_numbers_of_batches"}, {Exception::lacks, {"step(false)"}}) +
      all({"load_of_rank_0_alone"}, {Exception::differs, {"ranks' own values are averaged"}, 2}) +
      all({"to_float_for_good"}, {Exception::refused, {"LocalUpdates: parameter first.weight"}});
  return list;
}

}  // namespace

const Strategy& one_process() {
  static const Strategy strategy{"one_process", same, without_shoal()};
  return strategy;
}

const std::vector<Strategy>& strategies() {
  static const std::vector<Strategy> list{
      {"ddp", divided, with_ddp(), of_unused() + of_replicas()},
      {"ddp_own_gradients", divided, with_ddp({.gradient_as_bucket_view = false}), of_unused() + of_replicas()},
      {"zero1", divided, with_zero1(), of_unused() + of_replicas() + of_sharded_optimizers()},
      {"zero2", divided, with_zero2(),
       of_unused() + of_replicas() + of_sharded_optimizers() + of_parts("ShardedDataParallel", 2)},
      {"megatron", divided, with_megatron(), of_megatron()},
      {"megatron_in_grads", divided, with_megatron({.reuse_grad_buf_for_param_gather = true}), of_megatron()},
      {"megatron_late_gather", divided, with_megatron({.overlap_param_gather = true}), of_megatron()},
      {"megatron_no_overlap", divided, with_megatron({.overlap_grad_reduce = false}), of_megatron()},
      {"fsdp", divided, with_fsdp(ShardingStrategy::full_shard), of_fsdp()},
      {"fsdp_grad_op", divided, with_fsdp(ShardingStrategy::shard_grad_op), of_fsdp()},
      {"fsdp_no_shard", divided, with_fsdp(ShardingStrategy::no_shard), of_fsdp()},
      {"fsdp_hybrid", divided, with_fsdp(ShardingStrategy::hybrid_shard), of_fsdp()},
      {"fsdp_hybrid_grad_op", divided, with_fsdp(ShardingStrategy::hybrid_shard_grad_op), of_fsdp()},
      {"decentralized", same, with_decentralized(), of_decentralized()},
      {"local_sgd", same, with_local_updates({.every = 1}), of_local_updates()},
      {"diloco", same, with_local_updates({.every = 1, .outer = OuterNesterov{.lr = 1, .momentum = 0}}),
       of_local_updates()},
      {"shard_gossip", divided_in_host, with_shard_gossip(), of_fsdp()},
  };
  return list;
}

}  // namespace shoal::test
