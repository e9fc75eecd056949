#include "comm/group/coalesce.h"
#include "shoal/hooks.h"

#include <fmt/format.h>
#include <torch/utils.h>

#include "engine/hooks/step_count.h"
#include "memory/views.h"
#include "shoal/error.h"
#include "shoal/group.h"

namespace shoal {

namespace {
constexpr const char* local_sgd_carrier = "carrier.";
}  // namespace

struct PostLocalSgdHook::Memory {
  StepCount count{};
};

PostLocalSgdHook::PostLocalSgdHook(Group local, int64_t start_iteration, std::shared_ptr<CommunicationHook> carrier)
    : local_(std::move(local)),
      start_(start_iteration),
      carrier_(std::move(carrier)),
      memory_(std::make_unique<Memory>()) {
  if (start_ < 0) throw UsageError(fmt::format("PostLocalSgdHook: start_iteration {}: give at least 0", start_));
  if (!carrier_) throw UsageError("PostLocalSgdHook: the carrier is nullptr; omit it for an uncompressed sum");
}

PostLocalSgdHook::~PostLocalSgdHook() = default;

std::string PostLocalSgdHook::name() const {
  return fmt::format("post-local SGD, from step {}, groups of {}, over {}", start_, local_.size(), carrier_->name());
}

std::vector<const CommunicationHook*> PostLocalSgdHook::with_memory() const {
  auto hooks = carrier_->with_memory();
  hooks.push_back(this);
  return hooks;
}

PendingExchange PostLocalSgdHook::begin(const GradientBucket& bucket) {
  if (memory_->count.at(bucket.label.step) < start_) return carrier_->begin(bucket);
  auto among = bucket;
  among.group = local_;
  at::Tensor(among.gradients).mul_(static_cast<double>(bucket.group.size()) / local_.size());
  return carrier_->begin(among);
}

CommunicationHook::State PostLocalSgdHook::state() const {
  State state;
  memory_->count.save(state);
  for (const auto& [entry, value] : carrier_->state()) state[local_sgd_carrier + entry] = value;
  return state;
}

void PostLocalSgdHook::load_state(const State& state) {
  State of_carrier;
  for (const auto& [entry, value] : state) {
    if (memory_->count.load(entry, value)) continue;
    if (!entry.starts_with(local_sgd_carrier)) {
      throw UsageError(fmt::format("communication hook {}: '{}' is not part of its state", name(), entry));
    }
    of_carrier[entry.substr(std::string_view(local_sgd_carrier).size())] = value;
  }
  carrier_->load_state(of_carrier);
}

PeriodicModelAverager::PeriodicModelAverager(Group group, int64_t period, int64_t warmup_steps)
    : group_(std::move(group)), period_(period), warmup_steps_(warmup_steps) {
  if (period < 1) throw UsageError(fmt::format("PeriodicModelAverager: period {}: give at least 1 step", period));
  if (warmup_steps < 0) {
    throw UsageError(fmt::format("PeriodicModelAverager: warmup_steps {}: give at least 0", warmup_steps));
  }
}

bool PeriodicModelAverager::average(const std::vector<at::Tensor>& parameters) {
  const auto step = steps_++;
  if (step < warmup_steps_ || (step - warmup_steps_) % period_ != 0) return false;
  const torch::NoGradGuard no_grad;
  std::vector<at::Tensor> averaged;
  for (const auto& parameter : parameters) {
    if (parameter.is_floating_point()) averaged.push_back(parameter.detach());
  }
  for (const auto& list : coalesced(averaged)) {
    std::vector<at::Tensor> parts;
    for (const auto& tensor : list) parts.push_back(in_memory_order(tensor));
    auto flat = at::cat(parts);
    group_.all_reduce(flat, ReduceOp::avg, {step, -1, "average of parameters"}).wait();
    int64_t begin = 0;
    for (const auto& tensor : list) {
      at::Tensor(tensor).copy_(view_like(flat, begin, tensor));
      begin += tensor.numel();
    }
  }
  return true;
}

}  // namespace shoal
