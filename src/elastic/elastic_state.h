#pragma once
// State of an elastic training, and what its steps and recoveries do with it.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "comm/membership/generations.h"
#include "elastic/admission.h"
#include "elastic/comparison.h"
#include "elastic/earlier_gradients.h"
#include "elastic/elastic_parts.h"
#include "elastic/global_batch.h"
#include "elastic/step_copies.h"
#include "shoal/elastic.h"

namespace shoal {

// Whether this rank can finish the step, or the exchange after it, in which a death has cut it off.
enum class Ready {
  no,
  // It has its own gradients, which say nothing of other ranks: it can if another rank has finished the step.
  if_another_has,
  yes,  // It has what comes from all ranks.
};

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
  // UsageError if the ranks' greatest and least passes, and numbers of epochs, differ.
  void require_one_pass(const std::vector<double>& most);
  // Grows as this rank begins and ends passes, and as it learns that others have: odd within a pass.
  int64_t progress() const { return std::max(2 * pass - (epoch ? 1 : 0), 2 * passes_over); }

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
  // A first function that throws, and a loop that goes on, leave a step in which the other ranks are.
  void count_dropped();
  // UsageError on all ranks, which names those that have left more steps than others since the last complete one.
  static void require_equal_drops(const std::vector<double>& by_rank);
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
  // Of this rank in the world's group: to longest_wait, or, where newcomers are waited for, to `for_newcomers` if that
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
  // Finishes the step if some rank may have finished it, which then all can; otherwise undoes it. Repeatable: a rank
  // that has done so before another one died has what the others now decide on. Returns by rank who has come without
  // the job's state.
  std::vector<bool> settle(const std::function<void()>* update);
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
  int64_t steps_before;
  StepCopies copies;
  EarlierGradients earlier;
  std::optional<Comparison> compared;  // in a job that ranks have joined: this rank's when the step began
  GlobalBatch batch;
  JoinTerms terms;
  Admission admission;
  std::unique_ptr<Generations> generations;

  int64_t done = 0;
  int64_t decisions = 0;          // over hosts, in this generation
  int64_t changes = 0;            // steps and exchanges that this rank has finished
  int64_t samples = 0;            // of a share in the step
  int64_t places = 0;             // of the epoch that the step takes
  int64_t reductions_before = 0;  // of the wrapper, when the step began
  int64_t began_at = 0;           // the wrapper's step then
  int64_t dropped = 0;            // steps since the last complete one that this rank has left, and that have not ended
  bool running = false;           // step() has not returned
  bool failed = false;            // an update of this rank has thrown
  bool in_step = false;           // a step has begun and is neither finished nor undone
  Ready ready = Ready::no;        // the step in which this rank is, or the exchange after it
  bool outdated = false;          // the loader's division is the former world's
  bool asked = false;             // processes ask to join, as all ranks know
  bool begun = true;              // this rank's loop, in a newcomer
  bool in_place = true;           // this rank's sampler is in the job's epoch, in a newcomer
  size_t job_epoch = 0;           // the job's sampler's when this rank came, in a newcomer
  size_t first_epoch = 0;
  bool proven = true;                        // this rank has completed a step with others; false: a newcomer
  bool differ = false;                       // ranks do, as all of them have found, and newcomers may be why
  MemberList trial;                          // members of the present generation that have not, as all ranks know
  double step_seconds = 0;                   // the longest complete step so far
  std::chrono::milliseconds longest_wait{};  // for a late rank; 0: the world's limit
  int64_t ended = 0;                         // calls of together() that this rank has ended
  int64_t most_ended = 0;                    // the most of all ranks, at the last recovery
  size_t taken = 0;                          // places of the epoch behind which the rest begins
  size_t skipped = 0;                        // behind those: of steps that this rank has left by an error
  std::optional<size_t> epoch;               // the sampler's, within a pass
  int64_t pass = 0;         // passes through the samples that this rank has begun, whatever their epoch's number
  int64_t passes_over = 0;  // of them, those that some rank has ended, as of the last recovery
  bool asks = false;        // this rank has called in_epoch()
  std::optional<int64_t> left_step;  // began_at of a step that this rank has left by an error
};

}  // namespace shoal
