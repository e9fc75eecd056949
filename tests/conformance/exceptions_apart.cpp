// Differences of strategies whose ranks have models of their own.

#include "tests/conformance/exceptions.h"

namespace shoal::test {

// Backward updates; there is no optimizer to step, and no gradient after backward.
const Exceptions& of_decentralized() {
  static const Exceptions list =
      all({"zero_grad_of_the_base_class_before_forward", "zero_grad_of_the_base_class_between_forward_and_backward",
           "zero_grad_of_the_base_class_after_step", "zero_grad_of_the_base_class_to_zero_before_forward",
           "zero_grad_of_the_base_class_to_zero_between_forward_and_backward",
           "zero_grad_of_the_base_class_to_zero_after_step", "zero_grad_to_none_then_step",
           "zero_grad_to_zero_then_step", "a_loop_through_the_base_class", "a_step_with_a_closure",
           "accumulation_zeroed_by_the_base_class_to_zero", "clip_by_torch_in_a_closure", "rate_changed_in_the_options",
           "momentum_changed_in_the_options", "schedule_of_torch", "schedule_of_torch_on_a_plateau",
           "schedule_of_shoal", "torch_save_of_the_optimizer_and_back"},
          {Exception::lacks, {"an optimizer to step"}}) +
      all({"clip_by_the_strategy", "clip_twice", "clip_then_zero_grad", "clip_after_accumulation"},
          {Exception::lacks, {"clip_grad of the options"}}) +
      all({"param_groups_with_options_of_their_own", "a_param_group_added_through_the_base_class", "ignored_parameters",
           "program_seq2seq_with_one_optimizer"},
          {Exception::lacks, {"param groups"}}) +
      all({"a_module_replaced_and_given_to_the_optimizer", "a_parameter_registered_between_steps"},
          {Exception::lacks, {"an optimizer to step"}}) +
      of_wrapped() + of_sole_wrappers() +
      all({"unequal_numbers_of_batches", "recomputed_last_layers_and_unequal_numbers_of_batches"},
          {Exception::lacks, {"Join"}}) +
      all(gradients_read(),
          {Exception::refused, {" takes the gradient of parameter ", "has used for its update", "clip_grad"}}) +
      all({"one_gradient_zeroed_by_hand", "zero_grad_of_a_sub_module_to_zero_then_step",
           "zero_grad_of_a_sub_module_before_forward"},
          {Exception::refused, {"was zeroed or dropped, but that of", "requires_grad_(false)"}}) +
      all({"zero_grad_never",
           "zero_grad_every_second_step",
           "zero_grad_at_the_start_only",
           "zero_grad_of_the_module_then_step",
           "zero_grad_of_a_sub_module_then_step",
           "one_gradient_reset_by_hand",
           "zero_grad_between_two_backwards",
           "zero_grad_between_two_backwards_by_the_module",
           "gradients_replaced_by_hand",
           "gradients_assigned_then_clip",
           "one_gradient_assigned",
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
           "gradients_in_a_flat_tensor",
           "an_exception_after_backward_before_step"},
          {Exception::differs, {"every backward is a step, and drops its gradients"}}) +
      all({"load_between_backward_and_step", "set_data_of_one_parameter_between_backward_and_step",
           "written_in_place_between_backward_and_step", "evaluation_without_gradients_between_backward_and_step",
           "evaluation_in_inference_mode_between_backward_and_step",
           "evaluation_by_the_module_between_backward_and_step", "parameters_cloned_between_backward_and_step",
           "torch_save_of_the_model_between_backward_and_step", "a_wrapper_destroyed_between_backward_and_step"},
          {Exception::differs, {"after backward parameters are updated already"}}) +
      all({"data_method_assigned_in_place", "written_in_place_between_steps", "weights_clamped_after_each_step",
           "weights_scaled_in_place_after_each_step", "copied_from_another_module_each_step", "set_data_in_forward",
           "an_embedding_with_max_norm"},
          {Exception::differs, {"neighbours mix in what they have been shown before"}, 2}) +
      all({"load_between_steps", "load_between_zero_grad_and_forward", "load_twice_in_a_row", "load_of_a_sub_module",
           "load_through_an_archive", "load_what_was_saved_in_training", "load_replaces_buffers",
           "load_of_values_of_their_own_that_are_averaged", "set_data_of_one_parameter_between_steps",
           "set_data_with_other_strides", "to_float_and_back", "tied_weights_loaded", "load_between_backward_and_step",
           "vector_to_parameters_of_torch", "load_of_rank_0_alone"},
          {Exception::refused, {"weight", "global_avg()"}, 2}) +
      all({"set_data_of_one_parameter_between_backward_and_step"},
          {Exception::refused, {"first.bias", "global_avg()"}, 2}) +
      all({"program_dcgan", "program_dcgan_zeroed_by_the_optimizers", "program_wgan_gp"},
          {Exception::differs, {"the generator's backward updates the other model, too, unless that is frozen"}}) +
      all({"a_loss_scale_with_inf_on_one_rank"}, {Exception::differs, {"that rank alone does not update"}, 2}) +
      all({"program_transfer_that_thaws_a_layer"}, {Exception::refused, {"hidden.weight", "wrap the model again"}}) +
      all({"to_float_for_good"}, {Exception::refused, {"module.to(dtype)"}});
  return list;
}

namespace {

const Exceptions& of_local_updates() {
  static const Exceptions list =
      of_wrapped() + of_all() +
      all({"unequal_shares_with_weights", "unequal_shares_with_weights_accumulated",
           "recomputed_last_layers_with_weights", "recomputed_last_layers_with_weights_accumulated",
           "a_recomputed_loss_with_weights", "micro_batches_with_weights_within_another_backward",
           "steps_with_weights_within_another_backward", "unequal_shares_with_weights_in_two_wrappers",
           "unequal_shares_with_weights_in_two_wrappers_accumulated"},
          {Exception::lacks, {"a backward with a weight"}}) +
      all({"unequal_numbers_of_batches", "recomputed_last_layers_and_unequal_numbers_of_batches"},
          {Exception::lacks, {"step(false)"}}) +
      all({"a_loss_scale_with_inf_on_one_rank"}, {Exception::differs, {"that rank alone does not update"}, 2}) +
      all({"to_float_for_good"}, {Exception::refused, {"LocalUpdates: parameter first.weight"}}) +
      all({"a_param_group_added_through_the_base_class"}, {Exception::refused, {"first.bias"}}) +
      all({"program_seq2seq_with_one_optimizer"}, {Exception::refused, {"do not belong to the module"}}) +
      all({"program_transfer_that_thaws_a_layer"},
          {Exception::refused, {"hidden.weight", "construct LocalUpdates again"}});
  return list;
}

}  // namespace

// Plain averaging keeps nothing that a rank's own values could disagree with.
const Exceptions& of_local_sgd() {
  static const Exceptions list =
      of_local_updates() + all({"load_of_rank_0_alone"}, {Exception::differs, {"ranks' own values are averaged"}, 2});
  return list;
}

const Exceptions& of_diloco() {
  static const Exceptions list =
      of_local_updates() + all({"load_of_rank_0_alone"}, {Exception::refused, {"that were loaded or written"}, 2});
  return list;
}

}  // namespace shoal::test
