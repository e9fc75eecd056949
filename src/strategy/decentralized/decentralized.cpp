#include "shoal/decentralized.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>

#include "engine/changes/separate_memory.h"
#include "engine/wrapper/data_parallel_state.h"
#include "engine/wrapper/logging.h"
#include "shoal/error.h"
#include "strategy/decentralized/averaging.h"
#include "strategy/decentralized/state.h"

namespace shoal {

DecentralizedDataParallelCore::DecentralizedDataParallelCore(std::shared_ptr<torch::nn::Module> module,
                                                             OptimizerRecipe recipe, const Group& group,
                                                             const DecentralizedDataParallelOptions& options) {
  options.validate(group.size());
  // A rank that rejoins gets its values from a neighbour.
  const bool joins = joins_again(group);
  auto wrapped = wrap(module, joins ? group.subgroup({group.rank()}) : group, "DecentralizedDataParallel",
                      options.ignored, /*sync=*/true);
  if (options.param_as_bucket_view)
    require_separate_memory(wrapped->tensors.parameters, wrapped->tensors.buffers, "DecentralizedDataParallel");
  state_ = std::make_unique<State>(std::move(module), std::move(recipe), group, std::move(wrapped->tensors), options);
  if (joins) state_->rejoin();
}

DecentralizedDataParallelCore::~DecentralizedDataParallelCore() {
  state_->tracker.detach();
}

void DecentralizedDataParallelCore::before_forward() {
  auto& state = *state_;
  if (state.tracker.phase() == BackwardTracker::Phase::running) state.give_up_step();
  const bool again = BackwardTracker::in_backward();  // a checkpoint, which may stop it early
  if (!again) {
    state.forward_range.emplace(at::RecordScope::USER_SCOPE);
    if (state.forward_range->isActive()) state.forward_range->before("shoal::forward");
  }
  if (!torch::GradMode::is_enabled()) return;
  state.known.require_no_other();
  state.adopt_changes();
  state.require_that_all_go_on(state.mixing.version() + 1);
  state.tracker.renew_hooks();
  if (state.no_sync_depth == 0 && !again) state.clock.mark(StepClock::forward_begins, state.step);
  for (const auto& entry : state.tensors.parameters) {
    const bool known = std::any_of(state.gradients.begin(), state.gradients.end(),
                                   [&](const Gradient& gradient) { return gradient.parameter.is_same(entry.tensor); });
    if (known || !entry.tensor.requires_grad()) continue;
    throw UsageError(
        fmt::format("DecentralizedDataParallel: {} requires a gradient, but was frozen when the model was wrapped; "
                    "wrap the model again",
                    entry.name));
  }
}

void DecentralizedDataParallelCore::after_forward(const std::vector<at::Tensor>& outputs) {
  state_->forward_range.reset();
  if (!torch::GradMode::is_enabled()) return;
  const bool again = BackwardTracker::in_backward();
  if (state_->no_sync_depth == 0 && !again) state_->clock.mark(StepClock::forward_ends, state_->step);
  state_->tracker.inspect(outputs);
}

void DecentralizedDataParallelCore::forward_failed() {
  state_->forward_range.reset();
}

void DecentralizedDataParallelCore::backward(const at::Tensor& loss_sum, double weight) {
  state_->backward(loss_sum, weight);
}

void DecentralizedDataParallelCore::step_without_update() {
  state_->require_present("step_without_update()");
  if (state_->no_sync_depth > 0) {
    throw UsageError(
        "DecentralizedDataParallel: step_without_update() within no_sync(), which makes no step: call it outside");
  }
  state_->step_without_update();
}

NoSync DecentralizedDataParallelCore::no_sync(bool accumulate) {
  return NoSync(accumulate ? &state_->no_sync_depth : nullptr);
}

std::string DecentralizedDataParallelCore::open_scope() const {
  return state_->no_sync_depth > 0 ? "no_sync()" : "";
}

const Precision& DecentralizedDataParallelCore::precision() const {
  return state_->options.precision;
}

at::DeviceType DecentralizedDataParallelCore::device() const {
  return state_->tensors.parameters.front().tensor.device().type();
}

void DecentralizedDataParallelCore::abandon_step() {
  state_->give_up_step();
}

std::vector<std::vector<std::string>> DecentralizedDataParallelCore::buckets() const {
  std::vector<std::vector<std::string>> names;
  for (const auto& bucket : state_->buckets) {
    auto& list = names.emplace_back();
    for (const auto& member : bucket.members()) list.push_back(member.name);
  }
  return names;
}

int64_t DecentralizedDataParallelCore::steps() const {
  return state_->step;
}

LoggingData DecentralizedDataParallelCore::logging_data() const {
  const auto& state = *state_;
  const auto& options = state.options;
  auto data = log_of("DecentralizedDataParallel", *state.module, state.group,
                     {{"topology", topology().name()},
                      {"bucket_cap_mb", fmt::format("{}", options.bucket_cap_mb)},
                      {"param_as_bucket_view", yes_or_no(options.param_as_bucket_view)},
                      {"neighbour_timeout_seconds", fmt::format("{}", options.neighbour_timeout_seconds)},
                      {"clip_grad", fmt::format("{}", options.clip_grad)},
                      {"precision", in_words(options.precision)},
                      {"scaler", yes_or_no(options.scaler.has_value())},
                      {"exchange_dtype", options.exchange_dtype ? c10::toString(*options.exchange_dtype) : "none"},
                      {"pre_average_hook", yes_or_no(options.pre_average_hook != nullptr)},
                      {"compressed_exchange", yes_or_no(options.compressed_exchange.has_value())},
                      {"ignored", fmt::format("{}", fmt::join(options.ignored, ", "))}});
  add_model(data, state.tensors);
  for (const auto& bucket : state.buckets) {
    data.bucket_bytes.push_back(bucket.numel() * static_cast<int64_t>(c10::elementSize(bucket.dtype())));
  }
  data.first_bucket_bytes = data.bucket_bytes;
  data.steps = state.step;
  const auto& arrivals = state.tracker.arrivals();
  for (size_t i = 0; state.step > 0 && i < arrivals.size(); ++i) {
    if (arrivals[i] > 0) continue;
    data.unused_parameters.push_back(state.gradients[i].name);
    data.unused_bytes += static_cast<int64_t>(state.gradients[i].parameter.nbytes());
  }
  state.clock.write_to(data);
  return data;
}

at::Tensor DecentralizedDataParallelCore::scale_loss(const at::Tensor& loss) const {
  return state_->scaler ? state_->scaler->scale(loss) : loss;
}

void DecentralizedDataParallelCore::before_loading() {
  state_->loads.begin(state_->watch.parameters());
}

void DecentralizedDataParallelCore::parameters_loaded() {
  state_->loads.end();
}

void DecentralizedDataParallelCore::global_avg() {
  const torch::NoGradGuard no_grad;
  auto& state = *state_;
  state.require_present("global_avg()");
  state.separate();
  const Label label{state.step, -1, "global average, after equal steps (step_without_update() without a batch)"};
  if (state.buckets.empty()) {
    auto parts = state.parts();
    average(state.mixing.remaining(), parts, label);
  } else {
    average(state.mixing, state.buckets, label);
  }
  state.watch.note();
  state.loads.clear();
  if (!state.options.average_buffers) return;
  for (const auto& buffer : state.tensors.buffers) {
    if (!buffer.tensor.is_floating_point()) continue;
    auto mean = buffer.tensor.to(at::kDouble).contiguous();
    state.mixing.remaining().all_reduce(mean, ReduceOp::avg, label).wait();
    at::Tensor(buffer.tensor).copy_(mean);
  }
}

double DecentralizedDataParallelCore::consensus_distance() {
  const torch::NoGradGuard no_grad;
  auto& state = *state_;
  state.require_present("consensus_distance()");
  state.separate();
  const Label label{state.step, -1, "consensus distance"};
  const auto& group = state.mixing.remaining();
  if (!state.buckets.empty()) return std::sqrt(squared_distance(group, state.buckets, label));
  auto parts = state.parts();
  return std::sqrt(squared_distance(group, parts, label));
}

void DecentralizedDataParallelCore::take_options_from(torch::optim::Optimizer& whole) {
  state_->whole.emplace(whole, state_->options.schedule != nullptr);
}

void DecentralizedDataParallelCore::leave() {
  state_->left = true;
  state_->mixing.leave();
}

const ExchangeStatistics& DecentralizedDataParallelCore::statistics() const {
  return state_->mixing.statistics();
}

const Topology& DecentralizedDataParallelCore::topology() const {
  return state_->mixing.topology();
}

const Group& DecentralizedDataParallelCore::remaining() {
  state_->require_present("remaining()");
  state_->mixing.remove_ended();
  return state_->mixing.remaining();
}

std::vector<torch::optim::Optimizer*> DecentralizedDataParallelCore::optimizers() const {
  std::vector<torch::optim::Optimizer*> list;
  for (const auto& bucket : state_->buckets) list.push_back(bucket.optimizer.get());
  return list;
}

OptimizerState DecentralizedDataParallelCore::state_dict() const {
  OptimizerState whole = state_->pending.value_or(OptimizerState());
  for (const auto& bucket : state_->buckets) whole.merge(optimizer_state(*bucket.optimizer, *state_->module));
  return whole;
}

void DecentralizedDataParallelCore::load_state_dict(const OptimizerState& state) {
  state_->pending = state;
  state_->pending_dtypes = StateDtypes::of_parameters;
  if (!state_->buckets.empty()) state_->load_pending();
}

const GradScaler* DecentralizedDataParallelCore::scaler() const {
  return state_->scaler ? &*state_->scaler : nullptr;
}

void DecentralizedDataParallelCore::check_gradients() const {
  state_->spent.check();
}

double DecentralizedDataParallelCore::last_norm() const {
  return state_->norm;
}

}  // namespace shoal
