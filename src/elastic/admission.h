#pragma once
// Transfer of the job's state to processes that join.

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "elastic/elastic_parts.h"
#include "elastic/global_batch.h"
#include "elastic/join_terms.h"
#include "shoal/elastic.h"

namespace shoal {

// Where the job is, between two steps.
struct Position {
  int64_t done = 0;               // complete steps
  int64_t changes = 0;            // and exchanges after them
  int64_t steps_before = 0;       // synchronising steps of the wrapper before those
  size_t taken = 0;               // places of the epoch that complete steps have used
  std::optional<size_t> epoch{};  // in which the loop is; nothing: between two
  size_t next_epoch = 0;          // the sampler's
  bool names_epochs = false;      // whether the job's loop gives it their numbers
  int64_t pass = 0;               // passes through the samples that were begun
  int64_t passes_over = 0;        // of them, those that some rank has ended
};

// Gives newcomers the job's state, which a lone process takes before it is made one of the job's ranks.
class Admission {
 public:
  // The arguments must outlive this object.
  Admission(ElasticParts& parts, const JoinTerms& terms, const ElasticOptions& options, GlobalBatch& batch);

  // Gives the newcomers among the ranks, in rank order, the state of the lowest other one, and its `position`. Not
  // parameters and the optimizer's state where a newcomer takes part in the division of shards without any
  // (ElasticParts::gives_shards()). Collective. UsageError in a newcomer whose options differ; CommError on all other
  // ranks if the state cannot be given.
  void share(const Group& group, const std::vector<bool>& newcomers, Position& position) const;

 private:
  std::string state_text(const Position& position, bool with_shards) const;
  // with_shards: and what a strategy may divide.
  std::vector<at::Tensor> plain_tensors(bool with_shards) const;
  std::vector<size_t> learnt_order() const;
  void follow_order(const std::vector<size_t>& order) const;
  void take_state(const nlohmann::json& states, const Group& group, int from) const;
  void take(const std::string& text, const Group& group, int from, Position& position) const;

  ElasticParts& parts_;
  const JoinTerms& terms_;
  const ElasticOptions& options_;
  GlobalBatch& batch_;
};

}  // namespace shoal
