#pragma once
// Elastic training: ranks may die at any moment, and the others go on in memory, with the bits of the last complete
// step; and ranks may come.

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "shoal/data.h"
#include "shoal/ddp.h"
#include "shoal/detail/elastic_training.h"
#include "shoal/error.h"
#include "shoal/local_updates.h"
#include "shoal/megatron.h"
#include "shoal/precision.h"
#include "shoal/world.h"

namespace shoal {

// How the ranks of an elastic job have changed.
struct ElasticChange {
  uint64_t generation = 0;        // number of the present one; the first is 1
  std::vector<int> lost{};        // ranks that have ended, by their number in the world before
  std::vector<int> lost_first{};  // the same by the launcher's number
  std::vector<int> joined{};      // ranks that have come, by the launcher's number
  int ranks = 0;                  // ranks that go on
  int64_t step = 0;               // complete steps
  bool finished_step = false;  // the step in which a rank died was finished by those that are left; false: it is done
                               // again, or nobody was in a step
  double seconds = 0;  // from this rank's notice of the death, or the admission's begin, until the ranks can go on
  // Who does now what the lost ranks did: "the others update its share of the parameters: rank 0 updates 1621 elements,
  // and updated 811". Empty: none was lost.
  std::string taken_over{};

  // "rank 1 (number 2 of the launcher) has ended; 3 ranks go on after step 17, which was finished, 12 ms later; the
  // others ..."
  std::string text() const;
  // The same as a line of a metrics file, which `shoal report` and `shoal top` read: {"step": 17, "event": text(),
  // "generation": 2, "lost": [2], "joined": [], "ranks": 3, "finished_step": 1, "recovery_ms": 12.1, "taken_over": "the
  // others ..."}; `lost` and `joined` by the launcher's numbers.
  std::string metrics_line() const;
};

struct ElasticOptions {
  int min_ranks = 1;  // JobLost if fewer are left, or fewer than the MIN of the launcher's --elastic
  // A rank that lives but makes no progress (stopped by a signal, in an endless loop) is killed (SIGKILL) by the ranks
  // that wait for it, and the job continues without it. They wait straggler_seconds in a collective, abandon the step,
  // and wait straggler_seconds again. A rank that answers in that time stays: the step is repeated and the limit
  // doubles. No rank is killed if fewer than min_ranks would remain, or while a debugger holds it. Choose more than a
  // step, an evaluation, or anything that one rank does alone takes, and less than half of
  // WorldOptions::timeout_seconds. 0: wait for timeout_seconds; then the job is lost.
  double straggler_seconds = 0;
  // On several hosts: a host that has sent nothing for this long (down, or cut off) is dropped with its ranks, if the
  // remaining hosts hold more than half of all ranks, or half and the first rank: two halves of a cut network must not
  // both continue. Ranks of a dropped host get JobLost if it comes back. At least 0.5.
  double silent_host_seconds = 10;
  // Samples of a step over all ranks, which ranks that are left keep up: they compute the slices of those that were
  // lost, so that losses are those of a run in which nobody dies, but for the order of sums. A multiple of the ranks;
  // needs a sampler, and loaders of Elastic::batch_size(). 0: the batch of each rank stays, and the global batch
  // shrinks and grows with the ranks. A newcomer gets the job's, and must only have one if the job has.
  int64_t keep_global_batch = 0;
  // Slices into which keep_global_batch is divided, at least as many as there will ever be ranks: more are not
  // admitted. 0: the ranks at the start.
  int64_t batch_slices = 0;
  // Loss scaler that the loop uses with DistributedDataParallel; a newcomer gets its state. nullptr: none.
  GradScaler* scaler = nullptr;
  // More state of the program that is equal on all ranks, which a newcomer gets, written in place: moving averages of
  // parameters, for example, or buffers that the wrapper ignores.
  std::vector<at::Tensor> tensors{};
  // More of the same that is no tensor (a schedule, counters), as UTF-8 text: save_state() returns it, on one rank that
  // has the job's state, and load_state() gets it in each newcomer, within Elastic's constructor. Both or neither.
  std::function<std::string()> save_state{};
  std::function<void(const std::string& text)> load_state{};
  bool state_has_scaler = false;  // a loss scaler's state is among it
  // Called on each rank, after the change, but not on those that have come. None: rank 0 writes a line to standard
  // error.
  std::function<void(const ElasticChange& change)> on_change{};
  // Metrics file to which rank 0 of those that are left appends metrics_line(). Empty: none.
  std::string metrics{};
  // Folder to which the program saves its checkpoints (shoal/checkpoint.h): JobLost names the last one in it. Empty:
  // none.
  std::string checkpoints{};

  // Throws UsageError that lists all faults. ranks: at the start of the job.
  void validate(int ranks) const;
};

// Makes a loop outlive its ranks, with DistributedDataParallel, OSS (ZeRO-1 and ZeRO-2), DistributedOptimizer,
// FullyShardedDataParallel (also with ShardGossipOptimizer) or LocalUpdates (local SGD, SlowMo, DiLoCo):
//
//   shoal::DistributedDataParallel parallel(model, world.group());
//   torch::optim::AdamW optimizer(model->parameters());
//   shoal::DistributedSampler sampler(dataset.size().value(), world.group());
//   shoal::Elastic elastic(world, parallel, optimizer, sampler, {.min_ranks = 2});              // 1
//   for (size_t epoch = elastic.first_epoch(); epoch < epochs; ++epoch) {                       // 2
//     sampler.set_epoch(epoch);
//     while (elastic.in_epoch()) {                                                              // 3
//       auto loader = torch::data::make_data_loader(dataset, sampler, 64);
//       for (auto& batch : *loader) {
//         const auto compute = [&] { cross_entropy(parallel.forward(batch.data), batch.target).backward(); };  // 4
//         if (!elastic.step(batch.data.size(0), compute, [&] { optimizer.step(); })) break;     // 5
//         optimizer.zero_grad();
//       }
//     }                                                                                         // 6
//   }
//
// A rank that is killed, crashes or ends ends the communication of the others at once. They agree on who is left and go
// on as a smaller world: `world`, its copies, wrapper, optimizer and sampler follow. The step in which a rank died is
// finished if a rank may have finished it, and otherwise undone and done again with the data divided anew. Parameters
// and optimizer state are, to the bit, those of the last complete step.
//
// - `compute` has all micro-batches of a step and what changes gradients, such as clipping; it may be run again.
// - `update` steps the optimizer, once per complete step, and must not communicate: UsageError. A rank on which it
// throws
//   anything but a UsageError has left the job.
// - Gradients do not accumulate over steps: zero_grad() after each one, or at the beginning of `compute`. UsageError on
//   all ranks if `compute` adds to a gradient that is not zero.
// - Errors are caught within `compute`. If it throws before its backward on some ranks and their loops go on, the step
// is
//   a UsageError on all, unless abandon_step() has ended it for all.
// - Other communication, such as an evaluation, runs in together(), or the loop catches CommError and calls recover().
//   Handles on groups of the former world end (CommError): take world.group() again.
// - In a process that comes to the job world.joining() is true. It constructs all of this alone, without a checkpoint
// and
//   without communication; the constructor gives it the job's state. Its loop begins with first_epoch(), and its own
//   counters follow from steps().
//
// All ranks compute on the CPU. Errors: UsageError names what is not supported, and what a loop does wrong; JobLost
// where the job cannot go on, which is no CommError. Not thread-safe: one thread trains.
//
// docs/guides/elastic.md has the other strategies' loops, several hosts, joining, limits and what a loop must keep to.
class Elastic {
 public:
  // The arguments must outlive this object. Collective; from its return on all ranks, ranks may die. Throws UsageError.
  Elastic(const World& world, DataParallelCore& parallel, torch::optim::Optimizer& optimizer,
          DistributedSampler& sampler, const ElasticOptions& options = {});
  // For a loop that divides its data itself, by world.rank() and world.size(), anew after each change.
  Elastic(const World& world, DataParallelCore& parallel, torch::optim::Optimizer& optimizer,
          const ElasticOptions& options = {});
  // The same for DistributedOptimizer, which needs no wrapper.
  Elastic(const World& world, DistributedOptimizerCore& optimizer, DistributedSampler& sampler,
          const ElasticOptions& options = {});
  Elastic(const World& world, DistributedOptimizerCore& optimizer, const ElasticOptions& options = {});
  // The same for LocalUpdates, whose step() is the update.
  Elastic(const World& world, LocalUpdates& updates, DistributedSampler& sampler, const ElasticOptions& options = {});
  Elastic(const World& world, LocalUpdates& updates, const ElasticOptions& options = {});
  // The same for a training of the registry (shoal/training.h) under one of elastic_strategies():
  //
  //   auto training = shoal::make_training("zero2", model, recipe, world.group(), {.clip_grad = 1.0});
  //   shoal::Elastic elastic(world, *training, sampler);
  //   elastic.step(batch.data.size(0), [&] { training->backward(cross_entropy(training.forward(x), y)); },
  //                [&] { training->step(); });
  //   training->zero_grad();
  //
  // Clipping by TrainingOptions::clip_grad comes between the two functions, where it communicates. replan() is not for
  // a training that has an Elastic.
  Elastic(const World& world, ElasticTraining& training, DistributedSampler& sampler,
          const ElasticOptions& options = {});
  Elastic(const World& world, ElasticTraining& training, const ElasticOptions& options = {});
  // This rank may end from now on without the others taking it for a failure. Not collective.
  ~Elastic();
  Elastic(const Elastic&) = delete;
  Elastic& operator=(const Elastic&) = delete;

  // True at the beginning of a pass through the samples (after sampler.set_epoch()), and again after each change of the
  // ranks while samples are left: the loop then makes a new loader, because a loader's threads have read ahead by the
  // former division, and its copy of the sampler has that one (UsageError when it begins again). False at the end of
  // the pass, which is wherever a loop asks again without a change. So one that leaves `while (in_epoch())` itself must
  // name the next epoch by set_epoch(); otherwise its next call ends the pass that was left. set_epoch() may also stand
  // within the while, before the first step. All ranks must make the same passes: UsageError in the commit of a step if
  // they are in different ones. A rank that learns in a recovery that others have left the pass leaves it, too.
  // Communicates nothing.
  bool in_epoch();

  // One step with `samples` samples of this rank's sampler. True if the step is complete on all ranks; false if it is
  // not, because the ranks have changed: the loop leaves its loader, and in_epoch() says whether to make another.
  // UsageError if a loop with a sampler goes on after a change without ever having called in_epoch(). `compute` may run
  // partly, and again for the same samples on any rank; `update` runs once per complete step. Collective.
  bool step(int64_t samples, const std::function<void()>& compute, const std::function<void()>& update);
  // The same with `compute` for the samples [begin, end) of this rank's: one slice of the global batch after the other,
  // all but the last one under no_sync(). The loss is the mean over these samples. Without keep_global_batch there is
  // one slice.
  bool step(int64_t samples, const std::function<void(int64_t begin, int64_t end)>& compute,
            const std::function<void()>& update);
  // The same with `prepare`, once on every rank after all of its slices, before the ranks agree that the step is
  // complete. It may communicate: clipping belongs there, since within `compute` there are the gradients of some of the
  // slices.
  bool step(int64_t samples, const std::function<void(int64_t begin, int64_t end)>& compute,
            const std::function<void()>& prepare, const std::function<void()>& update);
  // This rank's samples in a step with keep_global_batch; more once ranks are lost. For each loader, after in_epoch().
  int64_t batch_size() const;

  // Runs `work`, which communicates, and runs it again from its beginning on all ranks whenever the ranks change in it;
  // returns its result. Ends with a barrier, so that no rank goes on while another one runs it again. For evaluation
  // and other communication between steps. Collective.
  template <class Work>
  auto together(const Work& work) -> decltype(work()) {
    require_begun();
    if constexpr (std::is_void_v<decltype(work())>) {
      together([&] {
        work();
        return true;
      });
    } else {
      std::optional<decltype(work())> result;
      while (true) {
        try {
          result.emplace(work());
          end_together();
          return std::move(*result);
        } catch (const CommError& error) {
          recover_from(error);
          if (has_ended_elsewhere(result.has_value())) return std::move(*result);
          result.reset();  // a scope ends before the next attempt
        } catch (const DisagreeError& error) {
          recover_from(error);
          if (has_ended_elsewhere(result.has_value())) return std::move(*result);
          result.reset();  // a scope ends before the next attempt
        }
      }
    }
  }

  // Makes the world of the ranks that are left. For a loop that catches CommError between steps itself. Collective over
  // the ranks that are left.
  void recover();

  // A newcomer's loop begins: for one that communicates, in together(), before its first in_epoch() or step(), as the
  // others do when the ranks have changed. Elsewhere it does nothing.
  void begin_loop();
  // The epoch with which this rank's loop over epochs begins: 0, or the job's present one in a process that has come to
  // it. Where the job's loop never calls set_epoch(), it is the number of passes through the samples that have ended.
  size_t first_epoch() const;
  int64_t steps() const;        // complete steps of the job since its beginning
  uint64_t generation() const;  // 1, and more after each change of the ranks

 private:
  struct State;
  // UsageError in a newcomer whose loop has not begun.
  void require_begun() const;
  // Rethrows an error that a recovery would not mend.
  void recover_from(const CommError& error);
  void recover_from(const DisagreeError& error);
  void recover_or_leave(const std::string& why);
  // What ranks do together ends with a barrier. Ranks that fail in it while others have passed it do not run it again.
  void end_together();
  bool has_ended_elsewhere(bool has_result);

  std::unique_ptr<State> state_;
};

}  // namespace shoal
