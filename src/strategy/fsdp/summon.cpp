// Parameters that are whole for a while.

#include <torch/utils.h>

#include "shoal/base/error.h"
#include "strategy/fsdp/shards.h"

namespace shoal {

FullParameters::~FullParameters() {
  if (core_ == nullptr) return;
  try {
    core_->release_all(writeback_);
  } catch (const CommError&) {  // NOLINT(bugprone-empty-catch): see the header
  }
}

void FullyShardedCore::hold_all(bool writeback) {
  auto& shards = *shards_;
  const torch::NoGradGuard no_grad;
  const Label label{-1, -1, "full parameters"};
  shards.module->adopt_changes(label);
  shards.module->notice_writes(false);  // who may write, and what counts, is this scope's
  if (shards.pager) {
    shards.pager->hold_all();
  } else {
    shards.module->wait(label, /*at_first_touch=*/false);
    if (!writeback) {
      for (const auto& piece : shards.module->pieces()) shards.before_hold.push_back(piece.outgoing.clone());
    }
    shards.groups.shard.barrier(label).wait();  // nobody writes before all have what they undo to
  }
  ++shards.holds;
}

void FullyShardedCore::release_all(bool writeback) {
  auto& shards = *shards_;
  const torch::NoGradGuard no_grad;
  if (--shards.holds == 0) shards.module->notice_writes(true);
  if (shards.pager) {
    shards.pager->release_all(writeback);
  } else {
    const Label label{-1, -1, "full parameters"};
    shards.groups.shard.barrier(label).wait();  // all have written and read
    for (size_t i = 0; i < shards.before_hold.size(); ++i) {
      shards.module->pieces()[i].outgoing.copy_(shards.before_hold[i]);
    }
    if (!shards.before_hold.empty()) shards.groups.shard.barrier(label).wait();
    shards.before_hold.clear();
  }
  if (!writeback) return;
  for (auto& piece : shards.module->pieces()) {
    if (piece.copied) piece.main.as_strided({piece.main.numel()}, {1}).copy_(piece.outgoing);
  }
}

}  // namespace shoal
