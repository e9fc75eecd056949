#include "shoal/hooks.h"

#include <fmt/format.h>
#include <torch/utils.h>

#include "engine/hooks/int8_format.h"
#include "engine/hooks/residuals.h"
#include "shoal/error.h"

namespace shoal {
namespace {

// Cuts `flat` into rows and pads each with zeros to `columns`.
at::Tensor in_rows(const at::Tensor& flat, int64_t rows, int64_t columns) {
  const auto share = (flat.numel() + rows - 1) / rows;
  auto padded = at::zeros({rows, columns}, flat.options());
  for (int64_t row = 0; row < rows; ++row) {
    const auto begin = std::min(row * share, flat.numel());
    const auto size = std::min(share, flat.numel() - begin);
    padded[row].narrow(0, 0, size).copy_(flat.narrow(0, begin, size));
  }
  return padded;
}

// Inverse of in_rows(): [numel].
at::Tensor out_of_rows(const at::Tensor& rows, int64_t numel) {
  const auto share = (numel + rows.size(0) - 1) / rows.size(0);
  return rows.narrow(1, 0, share).reshape({-1}).narrow(0, 0, numel);
}

// Sum in the order of the rows, so that every rank gets the same bits.
at::Tensor added_up(const at::Tensor& rows) {
  auto sum = rows[0].clone();
  for (int64_t row = 1; row < rows.size(0); ++row) sum.add_(rows[row]);
  return sum;
}

}  // namespace

void QuantizeOptions::validate() const {
  if (block >= 1) return;
  throw UsageError(fmt::format("QuantizeHook: block {}: give at least 1 element", block));
}

struct QuantizeHook::Memory {
  explicit Memory(bool error_feedback) : residuals(error_feedback) {}
  Residuals residuals;
};

QuantizeHook::QuantizeHook(const QuantizeOptions& options)
    : options_(options), memory_(std::make_unique<Memory>(options.error_feedback)) {
  options_.validate();
}

QuantizeHook::~QuantizeHook() = default;

std::string QuantizeHook::name() const {
  return fmt::format("int8, block {}, error feedback {}", options_.block, options_.error_feedback);
}

std::vector<const CommunicationHook*> QuantizeHook::with_memory() const {
  if (!options_.error_feedback) return {};
  return {this};
}

PendingExchange QuantizeHook::begin(const GradientBucket& bucket) {
  const auto& group = bucket.group;
  const auto numel = bucket.gradients.numel();
  if (numel == 0) return {};  // on every rank
  const int64_t rows = bucket.result == SumResult::owner ? 1 : group.size();
  const auto columns = (numel + rows - 1) / rows;
  const Int8Format format(columns, std::min(options_.block, columns));
  const auto wanted = memory_->residuals.add_to(bucket);
  const auto own = format.encode(in_rows(wanted, rows, format.columns()));
  if (memory_->residuals.on()) {
    memory_->residuals.keep_all(bucket, wanted - out_of_rows(format.decode(own), numel).to(wanted.scalar_type()));
  }
  if (bucket.result == SumResult::owner) {
    at::Tensor all;
    std::vector<at::Tensor> received;
    if (bucket.owner == group.rank()) {
      all = at::empty({group.size(), format.row_bytes()}, own.options());
      received = all.unbind(0);
    }
    PendingExchange pending{.work = group.gather(std::move(received), own.view({-1}), bucket.owner, bucket.label)};
    if (all.defined()) {
      pending.finish = [all, format, to = bucket.sum] {
        at::Tensor(to).copy_(added_up(format.decode(all)).narrow(0, 0, to.numel()));
      };
    }
    return pending;
  }
  const auto all = at::empty_like(own);  // this rank's part of the bucket, from every rank
  PendingExchange pending{.work = group.all_to_all(all.view({-1}), own.view({-1}), bucket.label)};
  if (bucket.result == SumResult::ranges) {
    pending.finish = [all, format, to = bucket.sum] {
      at::Tensor(to).copy_(added_up(format.decode(all)).narrow(0, 0, to.numel()));
    };
    return pending;
  }
  pending.next_stage = [all, format, group, to = bucket.sum, label = bucket.label] {
    const auto part = format.encode(added_up(format.decode(all)).unsqueeze(0));
    PendingExchange spread{.work = group.all_gather(all.view({-1}), part.view({-1}), label)};
    spread.finish = [all, format, to] { at::Tensor(to).copy_(out_of_rows(format.decode(all), to.numel())); };
    return spread;
  };
  return pending;
}

void QuantizeHook::reset() {
  memory_->residuals.clear();
}

CommunicationHook::State QuantizeHook::state() const {
  State state;
  memory_->residuals.save(state);
  return state;
}

void QuantizeHook::load_state(const State& state) {
  for (const auto& [entry, value] : state) {
    if (memory_->residuals.load(entry, value)) continue;
    throw UsageError(fmt::format("communication hook {}: '{}' is not part of its state", name(), entry));
  }
}

}  // namespace shoal
