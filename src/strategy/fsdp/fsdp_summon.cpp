// summon_full_params: a scope in which parameters are whole.

#include <c10/util/ScopeExit.h>
#include <fmt/format.h>
#include <torch/utils.h>

#include <exception>
#include <map>
#include <utility>

#include "engine/changes/outside_inference_mode.h"
#include "engine/wrapper/logging.h"
#include "memory/views.h"
#include "shoal/error.h"
#include "shoal/group.h"
#include "strategy/fsdp/ignored.h"
#include "strategy/fsdp/shards.h"

namespace shoal {
namespace {

const Label label{-1, -1, "full parameters"};

void check(const SummonFullParamsOptions& options, const at::Device& device) {
  if (options.rank0_only && options.writeback) {
    throw UsageError(
        "summon_full_params: rank0_only with writeback: the other ranks have nothing to write back; unset writeback");
  }
  if (options.offload_to_cpu && !device.is_cpu()) {
    throw UsageError(
        fmt::format("summon_full_params: offload_to_cpu: the model is on {}; offloading from there is not supported "
                    "yet: use full_state_dict or visit_full_state",
                    device.str()));
  }
}

std::vector<std::string> describe(const SummonFullParamsOptions& options) {
  return {"writeback " + yes_or_no(options.writeback), "rank0_only " + yes_or_no(options.rank0_only),
          "offload_to_cpu " + yes_or_no(options.offload_to_cpu), "with_grads " + yes_or_no(options.with_grads),
          "recurse " + yes_or_no(options.recurse)};
}

// Visits the parameters of each bucket, with the name of their unit.
template <class Visit>
void for_gathers(const FullyShardedCore::Shards& shards, const Visit& visit) {
  std::map<std::string, std::string> unit_of;
  for (const auto& unit : shards.units) {
    for (const auto& entry : unit.parameters) unit_of[entry.name] = title(unit);
  }
  shards.module->visit_gathers(
      [&](const std::string& parameter, ParameterGather& gather) { visit(unit_of.at(parameter), gather); });
}

// This rank's part of a parameter's gradient, in the order of the parameter's elements in memory.
at::Tensor own_part(const at::Tensor& parameter, const OwnedPiece& piece) {
  const auto& grad = parameter.grad();
  const auto like = at::empty_strided(parameter.sizes(), dense_strides(parameter), grad.options()).copy_(grad);
  return in_memory_order(like).narrow(0, piece.slice.in_piece.begin, piece.slice.in_piece.size());
}

void show_gradients(FullyShardedCore::Shards& shards) {
  const auto& reducer = shards.module->reducer();
  for (size_t number = 0; number < reducer.gradients().size(); ++number) {
    const auto& gradient = reducer.gradients()[number];
    auto& grad = at::Tensor(gradient.parameter).mutable_grad();
    shards.hold->grads.push_back(grad);
    if (!reducer.sums().has_part(number)) continue;
    const auto sum = shards.assemble(gradient.parameter, gradient.dtype(), gradient.name,
                                     [](const OwnedPiece& piece) { return piece.sum; });
    if (shards.hold->here) grad = sum.to(gradient.parameter.scalar_type());
  }
}

// Writes changed elements of summoned gradients back to the sums; unchanged ones keep the sum's precision.
void take_gradients(FullyShardedCore::Shards& shards) {
  const auto& gradients = shards.module->reducer().gradients();
  if (!shards.hold->options.writeback) return;
  for (const auto& piece : shards.module->pieces()) {
    const auto& grad = gradients[piece.gradient].parameter.grad();
    if (!grad.defined() || grad.is_same(shards.hold->grads[piece.gradient])) continue;
    const auto now = own_part(gradients[piece.gradient].parameter, piece);
    const auto sum = piece.sum.as_strided({piece.sum.numel()}, {1});
    sum.copy_(at::where(now != sum.to(now.scalar_type()), now.to(sum.scalar_type()), sum));
  }
  for (size_t number = 0; number < gradients.size(); ++number) {
    if (!gradients[number].parameter.grad().defined()) shards.hold->grads[number].reset();  // the caller dropped it
  }
}

}  // namespace

bool FullyShardedCore::Shards::holds(const std::string& parameter) const {
  if (!hold || !hold->here) return false;
  for (const auto& unit : units) {
    for (const auto& entry : unit.parameters) {
      if (entry.name == parameter) return !hold->left_out.contains(title(unit));
    }
  }
  return false;
}

FullParameters FullyShardedCore::summon_full_params(const SummonFullParamsOptions& options) {
  return {*this, options};
}

FullParameters FullyShardedCore::summon_full_params(bool writeback) {
  return summon_full_params(SummonFullParamsOptions{.writeback = writeback});
}

FullParameters::FullParameters(FullyShardedCore& core, const SummonFullParamsOptions& options, bool reads_only) {
  auto wrappers = options.recurse ? wrappers_within(*core.module(), core) : std::vector<FullyShardedCore*>();
  wrappers.push_back(&core);
  for (auto* wrapper : wrappers) wrapper->check_hold(options);
  auto undo = c10::make_scope_exit([&] {
    for (auto* wrapper : held_) wrapper->drop_hold();
  });
  held_.reserve(wrappers.size());
  for (auto* wrapper : wrappers) {
    wrapper->hold(options, reads_only);
    held_.push_back(wrapper);
  }
  undo.release();
}

FullParameters::~FullParameters() {
  try {
    end();
  } catch (...) {  // NOLINT(bugprone-empty-catch): see the header
  }
}

void FullParameters::end() {
  std::exception_ptr failure;
  for (auto* wrapper : std::exchange(held_, {})) {
    try {
      wrapper->release();
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

// Checks before the scope takes effect, so that nothing has to be undone after an error.
void FullyShardedCore::check_hold(const SummonFullParamsOptions& options) const {
  const OutsideInferenceMode outside;
  if (shards_->hold) {
    throw UsageError("summon_full_params() within another one; end that scope first, or use one scope for both");
  }
  check(options, state().tensors.parameters.front().tensor.device());
  agree(shards_->groups.all, "the options of summon_full_params", describe(options));
  auto& shards = *shards_;
  shards.module->wait(label, /*at_first_touch=*/false);
  if (options.with_grads) shards.module->reducer().prepare_sums("summon_full_params");
}

// Where ranks share memory, parameters are private meanwhile: else each rank's `weight.mul_(3)` would count.
void FullyShardedCore::hold(const SummonFullParamsOptions& options, bool reads_only) {
  auto& shards = *shards_;
  const OutsideInferenceMode outside;
  const torch::NoGradGuard no_grad;
  reads_only ? shards.module->agree_on_changes(label) : shards.module->adopt_changes(label);
  auto& hold = shards.hold.emplace(Shards::Hold{
      .options = options, .here = !options.rank0_only || shards.groups.all.rank() == 0, .reads_only = reads_only});
  auto undo = c10::make_scope_exit([&] { drop_hold(); });
  for (const auto& unit : shards.units) {
    if (!options.recurse && !unit.name.empty()) hold.left_out.insert(title(unit));
  }
  shards.module->notice_writes(false);  // this scope decides which writes are kept
  if (shards.pager) {
    shards.pager->unshard_all(hold.here, hold.left_out);
  } else if (!reads_only) {
    for_gathers(shards, [&](const std::string& unit, ParameterGather& gather) {
      const bool held = hold.here && !hold.left_out.contains(unit);
      const bool dropped = !options.writeback || !held;
      if (gather.shared() ? held : dropped) gather.make_private();
    });
  }
  shards.module->lend(true);
  if (options.with_grads) show_gradients(shards);
  undo.release();
}

void FullyShardedCore::drop_hold() noexcept {
  auto& shards = *shards_;
  const OutsideInferenceMode outside;
  const torch::NoGradGuard no_grad;
  const auto& gradients = shards.module->reducer().gradients();
  const bool reads_only = shards.hold->reads_only;
  for (size_t number = 0; number < shards.hold->grads.size(); ++number) {
    at::Tensor(gradients[number].parameter).mutable_grad() = shards.hold->grads[number];
  }
  shards.hold.reset();
  shards.module->lend(false);
  try {
    if (shards.pager) shards.pager->reshard_all(/*store=*/false);
    shards.module->visit_gathers([&](const std::string&, ParameterGather& gather) {
      if (!reads_only) gather.end_private(false);
    });
  } catch (...) {  // NOLINT(bugprone-empty-catch): a peer is gone; whoever calls the group next is told
  }
  shards.module->notice_writes(true);
}

void FullyShardedCore::release() {
  auto& shards = *shards_;
  const OutsideInferenceMode outside;
  const torch::NoGradGuard no_grad;
  const auto drop_the_rest = c10::make_scope_exit([&] { drop_hold(); });
  const auto& hold = *shards.hold;
  if (hold.options.with_grads) take_gradients(shards);
  if (!shards.pager) shards.groups.shard.barrier(label).wait();  // no rank reads the former values any more
  if (!hold.options.writeback) return;
  shards.module->note_written();
  if (shards.pager) {
    shards.pager->reshard_all(/*store=*/true);
  } else {
    for_gathers(shards, [&](const std::string& unit, ParameterGather& gather) {
      gather.end_private(/*keep=*/!hold.left_out.contains(unit));
    });
    shards.groups.shard.barrier(label).wait();  // all ranks have written theirs
    for_gathers(shards, [](const std::string&, ParameterGather& gather) { gather.wait(label); });
  }
  for (const auto& piece : shards.module->pieces()) piece.take_back();
  for (const auto& piece : shards.module->second_pieces()) piece.take_back();
  for (const auto& frozen : shards.frozen) {
    for (const auto& piece : frozen.pieces) piece.take_back();
  }
}

}  // namespace shoal
