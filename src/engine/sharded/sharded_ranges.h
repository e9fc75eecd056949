#pragma once
// State of ShardedOptimizerCore: ownership by range.

#include "engine/elastic/estate.h"
#include "engine/sharded/sharded_module.h"
#include "engine/sharded/sharded_optimizer_state.h"

namespace shoal {

// Of a rank of an elastic job whose ranks share no memory.
struct SecondOwnership {
  static constexpr int64_t none = -1;  // of a rank that has come, and has had no shards yet

  int64_t sealed = 0;              // number of the division of shards that all ranks have come to
  int64_t made = 0;                // of one that is complete here, and may have been sealed elsewhere
  int64_t tries = 0;               // number of the present one; no two have the same
  bool comes = false;              // this rank has come, and no division with it has been sealed yet
  bool grows = false;              // it gives shards to ranks that have come
  std::optional<Estate> former{};  // what counts while another division is made
  // That of before ranks came, until a step is complete: they may fail in it together, and take along both owners of a shard.
  std::optional<Estate> before{};
  std::vector<Estate::Shard> updated{};  // this rank's, after the last step
};

struct ShardedOptimizerCore::State : ShardedOptimizerBase::State {
  std::vector<std::shared_ptr<ShardedModule>> modules{};
  std::optional<int64_t> collected{};  // main pieces have the gradients after so many reductions
  std::optional<SecondOwnership> second{};

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
  bool has_second() const override { return second.has_value(); }
  void complete_second() override;
  void publish_second() override;
  void seal_gradients() override;
  void require_sealed() const override;
  // This rank's pieces and their state.
  std::vector<Estate::Shard> shards() const;
  // Those of all ranks, where they share memory: each of them can give all.
  Estate shared_estate(const ParamGroups& groups);
  // All ranks have come to the division with second owners that this one has made, or learn that they had.
  void seal(int64_t division);
  std::string advice_on_groups() const override;
  std::string advice_on_adding(const std::vector<at::Tensor>& parameters) const override;
};

}  // namespace shoal
