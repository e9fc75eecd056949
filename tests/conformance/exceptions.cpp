#include "tests/conformance/exceptions.h"

namespace shoal::test {

Exceptions operator+(Exceptions a, const Exceptions& b) {
  a.insert(b.begin(), b.end());
  return a;
}

Exceptions all(const std::vector<std::string>& behaviours, const Exception& exception) {
  Exceptions list;
  for (const auto& name : behaviours) list.emplace(name, exception);
  return list;
}

// Parameters that a module gets after it was wrapped.
const Exceptions& of_wrapped() {
  static const Exceptions list =
      all({"a_module_replaced_before_the_first_step", "a_module_replaced_between_steps",
           "an_optimizer_of_torch_for_a_part_that_was_replaced"},
          {Exception::refused, {"has a new parameter third.weight", "construct "}}) +
      all({"a_module_replaced_and_given_to_the_optimizer", "a_parameter_registered_between_steps"},
          {Exception::refused, {"construct "}});
  return list;
}

// What no wrapper takes.
const Exceptions& of_all() {
  static const Exceptions list =
      all({"an_expanded_buffer"}, {Exception::refused, {"buffer graph has several elements in one place of memory"}}) +
      all({"a_sparse_buffer"}, {Exception::refused, {"buffer graph is sparse", "ignore it"}});
  return list;
}

namespace {

// Ranks hold the same parameters.
const Exceptions& of_equal_ranks() {
  static const Exceptions list =
      all({"an_embedding_with_max_norm"}, {Exception::refused, {"words.weight", "max_norm"}});
  return list;
}

}  // namespace

// Parameters belong to one wrapper, and get other memory.
const Exceptions& of_sole_wrappers() {
  static const Exceptions list =
      of_all() +
      all({"program_actor_and_critic_with_one_encoder"},
          {Exception::refused, {"encoder.first.weight", "is in another wrapper"}}) +
      all({"two_parameters_on_one_memory", "a_buffer_on_the_memory_of_a_parameter"},
          {Exception::refused, {"inside.weight and ", "are two tensors on the same memory"}});
  return list;
}

namespace {

// An optimizer of parameters, which get other memory, knows neither their names nor buffers.
const Exceptions& of_owned_parameters() {
  static const Exceptions list =
      all({"two_parameters_on_one_memory"},
          {Exception::refused, {"parameter 0 and parameter 2 are two tensors on the same memory"}}) +
      all({"a_buffer_on_the_memory_of_a_parameter"},
          {Exception::differs,
           {"OSS does not know the buffers; what shares a parameter's memory keeps the former values"},
           2});
  return list;
}

}  // namespace

// What reads gradients, or edits them in place, between backward and step.
const std::vector<std::string>& gradients_read() {
  static const std::vector<std::string> list{"clip_grad_norm_of_torch",
                                             "clip_grad_norm_of_torch_by_the_largest",
                                             "clip_grad_norm_of_torch_of_a_part",
                                             "clip_grad_value_of_torch",
                                             "clip_by_norm_in_a_loop",
                                             "clip_by_value_then_norm_logged_then_scaled",
                                             "clip_by_torch_after_accumulation",
                                             "clip_by_torch_of_each_micro_batch",
                                             "clip_by_torch_of_each_micro_batch_under_no_sync",
                                             "norms_of_gradients_logged",
                                             "gradients_kept_in_a_list_for_clipping",
                                             "gradients_kept_without_a_copy",
                                             "views_of_gradients_kept",
                                             "a_penalty_on_grad_with_create_graph",
                                             "norm_logged_then_clip_by_torch",
                                             "norms_logged_after_the_step",
                                             "noise_added_to_gradients",
                                             "gradients_cloned",
                                             "gradients_printed",
                                             "gradients_checked_for_nan",
                                             "gradients_clamped_through_data",
                                             "gradients_scaled_by_hand",
                                             "gradients_scaled_then_clipped_by_value",
                                             "gradients_divided_after_accumulation",
                                             "gradients_assigned_from_themselves",
                                             "weight_decay_added_by_hand",
                                             "an_update_by_hand",
                                             "an_optimizer_of_torch_in_place_of_the_strategys",
                                             "a_row_of_a_gradient_zeroed",
                                             "one_gradient_zeroed_then_clip",
                                             "gradients_read_after_step",
                                             "program_language_model_clipped_by_torch",
                                             "program_dqn_with_clamped_gradients",
                                             "program_that_logs_norms_and_skips_steps",
                                             "program_sharpness_aware"};
  return list;
}

namespace {

// Where a rank does not hold whole gradients, what reads them is refused.
Exceptions of_parts(const std::string& holder, int from_ranks = 1) {
  const Exception refused{Exception::refused, {" takes the gradient of parameter ", "which " + holder}, from_ranks};
  return all(gradients_read(), refused) + all({"clip_by_torch_in_a_closure"}, refused) +
         all({"gradients_in_a_flat_tensor"},
             {Exception::refused, {"lies in memory that the program has given it"}, from_ranks});
}

// Nor this rank's own under no_sync.
Exceptions of_hidden(const std::string& holder) {
  return of_parts(holder) + all({"gradients_scaled_under_no_sync"},
                                {Exception::refused, {" takes the gradient of parameter ", "which " + holder}});
}

// Under no_sync grad() is this rank's own, as PyTorch's is. A mean has no graph.
const Exceptions& of_own_gradients() {
  static const Exceptions list =
      all({"clip_by_torch_of_each_micro_batch_under_no_sync"},
          {Exception::differs, {"under no_sync a rank clips its own gradients"}, 2}) +
      all({"a_penalty_on_grad_with_create_graph"}, {Exception::throws, {"has no graph", "torch::autograd::grad"}});
  return list;
}

// Ranks that hold one model between them.
const Exceptions& of_replicas() {
  static const Exceptions list = of_wrapped() + of_all() + of_equal_ranks() +
                                 all({"load_of_values_of_their_own_that_are_averaged", "load_of_rank_0_alone"},
                                     {Exception::refused, {"parameters that were loaded or written"}, 2});
  return list;
}

const Exceptions& of_unused() {
  static const Exceptions list = all({"a_parameter_that_no_rank_uses_without_the_option"},
                                     {Exception::refused, {"right.weight", "find_unused_parameters"}});
  return list;
}

// Backward computes a gradient several times, in recomputed blocks.
Exceptions of_repeats(const std::vector<std::string>& behaviours, const std::string& advice) {
  return all(behaviours, {Exception::refused, {"again after its reduction had begun", advice}});
}

}  // namespace

// libtorch's optimizer takes what it finds.
const Exceptions& of_ddp() {
  static const Exceptions list =
      of_unused() + of_replicas() + of_own_gradients() +
      of_repeats({"a_block_recomputed_twice", "a_loss_recomputed_in_parts"}, "set static_graph") +
      all({"step_after_no_sync_alone"}, {Exception::differs, {"the optimizer takes this rank's own gradients"}, 2});
  return list;
}

namespace {

const Exceptions& of_sharded_optimizers() {
  static const Exceptions list =
      all({"torch_save_of_the_optimizer_and_back"}, {Exception::refused, {"shoal::save"}}) +
      all({"a_param_group_that_is_there_already"}, {Exception::refused, {"param group 1 with a parameter [7, 6]"}}) +
      all({"step_after_no_sync_alone"}, {Exception::refused, {"accumulated under no_sync"}});
  return list;
}

}  // namespace

const Exceptions& of_zero1() {
  static const Exceptions list =
      of_unused() + of_replicas() + of_owned_parameters() + of_own_gradients() + of_sharded_optimizers() +
      of_repeats({"a_block_recomputed_twice", "a_loss_recomputed_in_parts"}, "set static_graph") +
      all({"a_param_group_added_through_the_base_class"}, {Exception::refused, {"torch::optim::Optimizer&"}});
  return list;
}

namespace {

// One rank keeps whole sums in grad(), in the bucket, whose memory the next step overwrites.
const Exceptions& of_one_rank_with_sums() {
  static const Exceptions list =
      all({"gradients_kept_in_a_list_for_clipping", "gradients_kept_without_a_copy", "views_of_gradients_kept"},
          {Exception::differs, {"a kept tensor is the bucket's"}}) +
      all({"gradients_in_a_flat_tensor"}, {Exception::refused, {"lies in memory that the program has given it"}}) +
      all({"a_penalty_on_grad_with_create_graph"}, {Exception::throws, {"does not require grad"}});
  return list;
}

}  // namespace

const Exceptions& of_zero2() {
  static const Exceptions list =
      of_owned_parameters() + of_unused() + of_replicas() + of_sole_wrappers() + of_sharded_optimizers() +
      of_parts("ShardedDataParallel", 2) + of_one_rank_with_sums() +
      of_repeats({"a_block_recomputed_twice", "a_loss_recomputed_in_parts"}, "reduce()") +
      all({"a_param_group_added_through_the_base_class"}, {Exception::refused, {"first.bias", "belongs to no"}});
  return list;
}

namespace {

// Shards are those of the construction.
const Exceptions& of_shards() {
  static const Exceptions list =
      of_sole_wrappers() + all({"to_float_for_good"}, {Exception::refused, {"first.weight", "module.to(dtype)"}}) +
      all({"a_param_group_added_through_the_base_class"}, {Exception::refused, {"first.bias", "belongs to no"}}) +
      all({"program_seq2seq_with_one_optimizer"}, {Exception::refused, {"is not a sharded parameter of the module"}}) +
      all({"program_transfer_that_thaws_a_layer"}, {Exception::refused, {"hidden.weight", "requires_grad_(false)"}});
  return list;
}

// Its clip is an option.
const Exceptions& of_distributed_optimizers() {
  static const Exceptions list =
      of_replicas() + of_shards() +
      all({"clip_by_the_strategy", "clip_twice", "clip_then_zero_grad", "clip_after_accumulation"},
          {Exception::lacks, {"clip_grad of the options"}});
  return list;
}

}  // namespace

const Exceptions& of_megatron() {
  static const Exceptions list = of_distributed_optimizers() + of_sharded_optimizers() +
                                 of_hidden("DistributedOptimizer") +
                                 of_repeats({"a_block_recomputed_twice"}, "set overlap_grad_reduce to false");
  return list;
}

const Exceptions& of_megatron_in_grads() {
  static const Exceptions list =
      of_megatron() + all({"zero_grad_never", "zero_grad_every_second_step", "zero_grad_at_the_start_only",
                           "zero_grad_of_a_sub_module_before_forward", "step_twice_after_one_backward",
                           "accumulation_carried_over_a_step"},
                          {Exception::refused, {"first.weight", "has given its memory to the updated parameters"}});
  return list;
}

// Updates that are waited for by the first operator.
const Exceptions& of_megatron_late_gather() {
  static const Exceptions list =
      of_megatron() +
      all({"parameters_read_by_accessor", "torch_save_of_the_model_between_steps", "torch_save_of_a_list_of_parameters",
           "load_what_was_saved_in_training", "torch_save_of_the_model_on_one_rank"},
          {Exception::throws, {"updates of other ranks", "finish_param_sync()"}, 2});
  return list;
}

const Exceptions& of_megatron_no_overlap() {
  static const Exceptions list = [] {
    auto before = of_megatron();
    before.erase("step_after_no_sync_alone");  // it sums up what there is
    before.erase("a_block_recomputed_twice");
    return before +
           all({"steps_with_weights_within_another_backward"}, {Exception::refused, {"with and without a weight"}});
  }();
  return list;
}

const Exceptions& of_fsdp() {
  static const Exceptions list = of_replicas() + of_shards() + of_sharded_optimizers() +
                                 of_hidden("FullyShardedDataParallel") +
                                 of_repeats({"a_block_recomputed_twice"}, "backward({}, 0)");
  return list;
}

// Where parameters are gathered, forward is collective. Between uses they are not in memory, which what reads past the
// operators finds out, nor when the wrapper has gone.
Exceptions of_gathered(Exception::Where where) {
  return all({"evaluation_of_one_rank_while_others_wait"},
             {Exception::refused,
              {"ranks wait for each other in different groups", "which unit FullyShardedDataParallel gathers"},
              2,
              where}) +
         all({"program_reinforce"}, {Exception::refused, {"all ranks must call the wrapper's forward"}, 2, where}) +
         all({"parameters_read_by_accessor", "torch_save_of_the_model_between_steps",
              "torch_save_of_a_list_of_parameters", "load_what_was_saved_in_training",
              "torch_save_of_the_model_between_backward_and_step", "torch_save_of_the_model_on_one_rank"},
             {Exception::throws, {"not in memory on this rank", "summon_full_params()"}, 2, where}) +
         all({"parameters_to_vector_of_torch"}, {Exception::refused, {"aten::cat", "summon_full_params()"}, 2, where}) +
         all({"a_wrapper_made_again", "a_wrapper_destroyed_between_backward_and_step"},
             {Exception::refused, {"first.weight", "unwrap()"}, 2, where}) +
         all({"a_model_read_when_the_wrapper_has_gone"},
             {Exception::throws, {"has been destroyed", "unwrap()"}, 2, where});
}

// With 3 ranks each is a host of its own.
const Exceptions& of_shard_gossip() {
  static const Exceptions list =
      all({"param_groups_with_options_of_their_own", "a_param_group_added_through_the_base_class", "ignored_parameters",
           "program_seq2seq_with_one_optimizer"},
          {Exception::lacks, {"param groups"}}) +
      of_fsdp() +
      all({"load_between_steps",
           "load_between_backward_and_step",
           "load_between_zero_grad_and_forward",
           "load_twice_in_a_row",
           "load_of_a_sub_module",
           "load_through_an_archive",
           "load_replaces_buffers",
           "load_what_was_saved_in_training",
           "load_of_rank_0_alone",
           "load_of_values_of_their_own_that_are_averaged",
           "set_data_of_one_parameter_between_steps",
           "set_data_of_one_parameter_between_backward_and_step",
           "set_data_in_forward",
           "set_data_with_other_strides",
           "data_method_assigned_in_place",
           "to_float_and_back",
           "written_in_place_between_steps",
           "written_in_place_between_backward_and_step",
           "weights_clamped_after_each_step",
           "weights_scaled_in_place_after_each_step",
           "copied_from_another_module_each_step",
           "vector_to_parameters_of_torch",
           "tied_weights_loaded"},
          {Exception::differs, {"other hosts mix in what they have been shown before: call global_avg()"}, 3}) +
      all({"a_loss_scale_with_inf_on_one_rank"}, {Exception::differs, {"that host alone does not update"}, 3});
  return list;
}

}  // namespace shoal::test
