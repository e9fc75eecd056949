#pragma once
// State of ShardedOptimizerCore: ownership by range.

#include "engine/sharded/sharded_module.h"
#include "engine/sharded/sharded_optimizer_state.h"

namespace shoal {

struct ShardedOptimizerCore::State : ShardedOptimizerBase::State {
  std::vector<std::shared_ptr<ShardedModule>> modules{};
  std::optional<int64_t> collected{};  // main pieces have the gradients after so many reductions

  using ShardedOptimizerBase::State::State;
  template <class Visit>
  void for_pieces(const Visit& visit) const {
    for (const auto& module : modules) {
      for (auto* list : {&module->pieces(), &module->second_pieces()}) {
        for (auto& piece : *list) visit(*module, piece);
      }
    }
  }
  // Checks grad() before a step. Changes nothing if it throws.
  void prepare_gradients();
  // Pieces of all ranks; with several modules, names begin with "chunk0.", "chunk1.", ...
  std::vector<StatePiece> state_pieces() const;
  std::vector<StatePiece> pieces(const torch::nn::Module& /*module*/) const override { return state_pieces(); }

  ParamGroups shares_of(const ParamGroups& groups) override;
  void adopt_values() override;
  void begin_step() override;
  std::vector<at::Tensor> take_gradients() override;
  std::vector<at::Tensor> counted_gradients() const override;
  bool shared() const override;
  void publish() override;
  void end_step(bool scaled) override;
  UpdateTargets shared_targets(const ParamGroups& groups) override;
  void check_second_owners() override;
  void publish_deferred_update() override;
  void end_outdated() override;
  void seal_gradients() override;
  void require_sealed() const override;
  ParamGroups enable_second_owners(const ParamGroups& groups) override;
  std::vector<at::Tensor> disable_second_owners() override;
  ParamGroups own_part(const ParamGroups& groups) override { return shares_of(groups); }
  std::vector<ShardSource::Shard> shards() const override;
  ShardNames shard_names() const override;
  void take_filled() override;
  bool is_written() const override;
  void adopt_alone() override;
  std::string advice_on_groups() const override;
  std::string advice_on_adding(const std::vector<at::Tensor>& parameters) const override;
};

}  // namespace shoal
