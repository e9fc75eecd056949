#pragma once
// State of an elastic training, and what its steps and recoveries do with it.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/membership/generations.h"
#include "elastic/admission.h"
#include "elastic/commit_report.h"
#include "elastic/comparison.h"
#include "elastic/dropped_steps.h"
#include "elastic/earlier_gradients.h"
#include "elastic/elastic_parts.h"
#include "elastic/epoch_position.h"
#include "elastic/global_batch.h"
#include "elastic/rank_progress.h"
#include "elastic/step_copies.h"
#include "elastic/step_in_progress.h"
#include "elastic/wait_limits.h"
#include "shoal/elastic.h"

namespace shoal {

struct Elastic::State {
  // of_registry: the training whose parts these are; nullptr: the caller made them. Collective; in a newcomer, over the
  // ranks that it comes to.
  State(const World& of, std::unique_ptr<ElasticParts> trained, DistributedSampler* divides,
        const ElasticOptions& chosen, ElasticTraining* of_registry = nullptr);
  ~State();
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  // elastic.cpp
  void require_supported() const;
  void divide(size_t from) { batch.divide(*sampler, from); }

  // elastic_pass.cpp
  bool begin_epoch();
  // In a step: set_epoch() after in_epoch() is of the pass that this has begun.
  void follow_epoch();
  // UsageError if the ranks' passes, or the numbers of their epochs, differ.
  void require_one_pass(const Extent& passes, const Extent& epochs);

  // elastic_step.cpp
  bool step(int64_t count, const std::function<void()>& compute, const std::function<void()>& update);
  void begin_step(int64_t count);
  void exchange();
  // No rank updates before all ranks have their gradients. So either every rank can finish the step or no rank has
  // begun.
  void commit();
  // The meeting of all ranks before it: what they compare, and whether memory must be mapped.
  bool meet(bool map);
  // The same where hosts have equal shares: passes on all ranks of all hosts, or on none.
  void commit_over_hosts(bool map);
  void finish(const std::function<void()>& update);
  void finish_step(const std::function<void()>& update);
  void publish_update(int64_t done_before_step);
  void leave_step();
  void skip_step();
  // UsageError within a step, and after an update that has failed.
  void require_between_steps(const char* what) const;
  bool try_step(int64_t count, const std::function<void()>& compute, const std::function<void()>& update);
  void undo();

  // elastic_trial.cpp: a newcomer is on trial until its first complete step. What fails until then is put down to it.
  // In a newcomer, its groups communicate from here on.
  void begin_loop();
  // Compares what ranks may set for themselves. UsageError on all ranks; none has the step's gradients then.
  void compare_in_trial();
  // UsageError if the ranks' maxima say that they differ.
  void require_alike(const Comparison& own, const std::vector<double>& most);
  bool is_one_of(const MemberList& members) const;
  // Whether there are newcomers, beside other ranks, to which a difference between ranks is put down; not to such as
  // have shards that the others lack.
  bool can_blame() const;
  // Whether this rank is one of them, and ranks do differ.
  bool is_to_blame() const;
  // Between steps, or when one has failed: whether newcomers are dropped, so that a recovery helps.
  bool blame_newcomers(const std::string& why);
  // Rethrows the present exception; on trial, this rank leaves the job, with a UsageError.
  [[noreturn]] void rethrow_from_trial();
  // Of this rank in the world's group: to waits.longest, or, where newcomers are waited for, to `for_newcomers` if that
  // is more.
  void limit_waits(std::chrono::milliseconds for_newcomers = {});
  // A rank was late, and may only be slow.
  void wait_longer();
  // While newcomers get the state, the others wait for them for a limited time.
  void begin_admission();
  // For ranks whose job has given them its state.
  void begin_trial();
  void end_trial();

  // elastic_recovery.cpp
  // update: of the step that was cut off; nullptr outside of one.
  // done_before_step: steps that were done before the one that is being reported; none: as many as now.
  void recover(const std::function<void()>* update, std::optional<int64_t> done_before_step = {});
  // Makes the generation of the ranks that are left, anew whenever one ends meanwhile. Returns whether newcomers were
  // among those of any try.
  bool begin_generation(const std::function<void()>* update);
  // One try of it, once the ranks have agreed on who is left.
  void follow_generation(const std::function<void()>* update);
  // The sentence of a lost job, with its last checkpoint and what is lost.
  std::string with_checkpoint(const std::string& lost) const;
  // Calls act(), whose JobLost gets it.
  template <class Act>
  auto naming_checkpoint(const Act& act) const -> decltype(act()) {
    try {
      return act();
    } catch (const JobLost& lost) {
      throw JobLost(with_checkpoint(lost.what()));
    }
  }
  RankProgress progress() const;
  // Finishes the step if some rank may have finished it, which then all can; otherwise undoes it. Repeatable: a rank
  // that has done so before another one died has what the others now decide on. Returns by rank who has come without
  // the job's state.
  std::vector<bool> finish_or_undo_step(const std::function<void()>* update);
  // The place of the epoch behind which all ranks of this rank's pass go on. own: before it has finished or undone its
  // step.
  void agree_on_position(const std::vector<RankProgress>& holders, const RankProgress& own,
                         const RecoveryDecision& decision);
  // Gives the sampler this rank's part of the epoch's rest. comes: this rank is a newcomer.
  void divide_rest(bool comes);
  // Ranks that have ended, and that have come.
  ElasticChange change_since(const MemberList& former) const;
  // Takes in the processes that ask to join, between two steps. False: there are none any more. Collective.
  bool admit();
  // Gives newcomers the job's state, or takes it.
  void share(const std::vector<bool>& newcomers);
  void open_for_newcomers() const;

  World world;
  std::unique_ptr<ElasticParts> parts;
  ElasticTraining* training;
  DistributedSampler* sampler;
  ElasticOptions options;
  int least_ranks = 1;  // min_ranks, or the launchers' MIN if that is more
  StepCopies copies;
  EarlierGradients earlier;
  GlobalBatch batch;
  JoinTerms terms;
  Admission admission;
  std::unique_ptr<Generations> generations;

  struct Counts {
    int64_t done = 0;          // complete steps of the job
    int64_t changes = 0;       // steps and exchanges that this rank has finished
    int64_t steps_before = 0;  // synchronising steps of the wrapper before those
    int64_t decisions = 0;     // over hosts, in this generation
  };
  Counts counts;
  StepInProgress current_step;
  DroppedSteps dropped;
  EpochPosition position;
  WaitLimits waits;
  // Of this rank into a job that was there before it.
  struct Arrival {
    bool proven = true;      // it has completed a step with others; false: a newcomer
    bool begun = true;       // its loop
    bool in_place = true;    // its sampler is in the job's epoch
    size_t job_epoch = 0;    // the job's sampler's when it came
    size_t first_epoch = 0;  // of its loop
  };
  Arrival arrival;
  struct Trial {
    MemberList members{};       // of the present generation, that have not completed a step with others, as all know
    bool ranks_differ = false;  // as all of them have found, and newcomers may be why
    bool requested = false;     // processes ask to join, as all ranks know
  };
  Trial trial;
  struct TogetherCalls {
    int64_t ended = 0;  // by this rank
    int64_t most = 0;   // of all ranks, at the last recovery
  };
  TogetherCalls together;
};

}  // namespace shoal
