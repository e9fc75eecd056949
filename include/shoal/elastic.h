#pragma once
// Elastic training: ranks may die at any moment, and the others go on in memory, with the bits of the last complete step;
// and ranks may come.

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
#include "shoal/local_sgd.h"
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
  // Who does now what the lost ranks did: "the others update its share of the parameters: rank 0 updates 1621 elements, and
  // updated 811". Empty: none was lost.
  std::string taken_over{};

  // "rank 1 (number 2 of the launcher) has ended; 3 ranks go on after step 17, which was finished, 12 ms later; the others ..."
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
  // Samples of a step over all ranks, which ranks that are left keep up: they compute the shares of those that were lost,
  // so that losses are those of a run in which nobody dies, but for the order of sums. A multiple of the ranks; needs a
  // sampler, and loaders of Elastic::batch_size(). 0: the batch of each rank stays, and the global batch shrinks and grows
  // with the ranks. A newcomer gets the job's, and must only have one if the job has.
  int64_t keep_global_batch = 0;
  // Shares into which keep_global_batch is divided, at least as many as there will ever be ranks: more are not admitted. 0:
  // the ranks at the start.
  int64_t shares = 0;
  // Loss scaler that the loop uses with DistributedDataParallel; a newcomer gets its state. nullptr: none.
  GradScaler* scaler = nullptr;
  // More state of the program that is equal on all ranks, which a newcomer gets, written in place: moving averages of
  // parameters, for example, or buffers that the wrapper ignores.
  std::vector<at::Tensor> tensors{};
  // More of the same that is no tensor (a schedule, counters), as UTF-8 text: give() makes it, on one rank that has the job's
  // state, and take() gets it in each newcomer, within Elastic's constructor. Both or neither.
  std::function<std::string()> give{};
  std::function<void(const std::string& text)> take{};
  bool gives_scaler = false;  // a loss scaler's state is among it
  // Called on each rank, after the change, but not on those that have come. None: rank 0 writes a line to standard error.
  std::function<void(const ElasticChange& change)> on_change{};
  // Metrics file to which rank 0 of those that are left appends metrics_line(). Empty: none.
  std::string metrics{};
  // Folder to which the program saves its checkpoints (shoal/checkpoint.h): JobLost names the last one in it. Empty: none.
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
//   for (size_t epoch = 0; epoch < epochs; ++epoch) {
//     sampler.set_epoch(epoch);
//     while (elastic.in_epoch()) {                                                              // 2
//       auto loader = torch::data::make_data_loader(dataset, sampler, 64);
//       for (auto& batch : *loader) {
//         const auto compute = [&] { cross_entropy(parallel.forward(batch.data), batch.target).backward(); };  // 3
//         if (!elastic.step(batch.data.size(0), compute, [&] { optimizer.step(); })) break;     // 4
//         optimizer.zero_grad();
//         schedule.step();
//       }
//     }                                                                                         // 5
//   }
//
// A rank that is killed, crashes or ends ends the communication of the others at once. They agree on who is left, and go
// on as a smaller world: `world`, its copies, `parallel` and `sampler` are then those of the ranks that are left; nothing
// is read from disk, and no process starts again. The step in which a rank died is finished if a rank may have finished
// it, and otherwise undone and done again with the data divided anew. Parameters and optimizer state are in either case,
// to the bit, those of the last complete step, whoever died and when: a rank updates only once all ranks have their
// gradients, for which a step has one small all-reduce more.
//
// With OSS, under DistributedDataParallel or ShardedDataParallel, with DistributedOptimizer and with FullyShardedOptimizer
// each rank updates its share, chunk by chunk, in memory that the ranks share, and so are float32 copies of 16-bit
// parameters. If a rank dies in its update, the lowest one that lives finishes the share with the same bits; update()
// returns as if nothing had happened, and the ranks change in the next communication. The shares of those that are left
// are then divided anew. A loop is the same, except that
// - clip_grad_norm() of OSS, clip_grad_norm_() of FullyShardedDataParallel and whatever else changes gradients belongs to
//   `compute`, or to `prepare` where that is called for one share after the other, and OSS's step(scaler) is refused;
// - which parameters are trainable stays as it was, and the optimizer's state is not loaded within the loop.
// What DistributedOptimizer and FullyShardedOptimizer do by their options (loss scaler, clip_grad) comes between `compute`
// and `update`. DistributedOptimizer has no wrapper:
//
//   shoal::DistributedOptimizer<torch::optim::AdamW> optimizer(model, 1e-3, world.group(), {.clip_grad = 1.0});
//   shoal::Elastic elastic(world, optimizer, sampler);
//
// Nor has LocalUpdates, whose step() is the second function:
//
//   shoal::LocalUpdates local(model, optimizer, world.group(), {.every = 500, .outer = shoal::OuterNesterov{}});
//   shoal::Elastic elastic(world, local, sampler);
//   ...
//         const auto compute = [&] { cross_entropy(model->forward(batch.data), batch.target).backward(); };
//         if (!elastic.step(batch.data.size(0), compute, [&] { local.step(); })) break;
//         local.zero_grad();
//
// Exchanges come after it, within Elastic::step(). One in which a rank dies is finished if it may be finished on some
// rank, and otherwise done again over those that are left; one that is on its way (`delay`) is sent again, with the present
// values. Each rank has theta and its momentum, so they survive. What a dead rank has trained since its last exchange was
// in its own parameters alone, and is lost; its samples of these steps count as taken. A newcomer begins with the mean of
// the parameters, and with the buffers and the optimizer state of one rank. Ranks wait for each other in the commit of each
// step.
//
// With ShardGossipOptimizer, whose groups are host_groups(world.group()), each host has parameters of its own, which its ranks
// share: they outlive a rank, but not the last one of a host. Exchanges come before the commit of a step; ranks of all hosts
// wait for each other there. Within the job no process can join, and pass() and global_avg() are refused, as is
// overlap = false. hold_mean() and hold_own() belong in together(): if a rank ends meanwhile, the hosts' own values come back.
//
// What a loop must keep to:
// - One call of step() is one step: `compute` runs all its micro-batches, `update` the optimizer (clipping that does not communicate, a loss
//   scale, a moving average of the weights; not with second owners: behind step()). `update` must not communicate: UsageError. A rank whose `update` throws has left the job, but
//   for a UsageError: the others finish the step.
// - Errors are caught within `compute`. If it throws before its backward on some ranks and their loops go on, the step is a
//   UsageError on all (not for LocalUpdates), unless abandon_step() has ended it for all, of DistributedOptimizer, or of a
//   wrapper after its forward. With a wrapper, an error in forward or backward ends it by itself.
// - Gradients do not accumulate over several calls of step(), because a step is undone as a whole: zero_grad() after each
//   step() or at the beginning of `compute`. UsageError on all ranks if `compute` adds to a gradient that is not zero.
// - Other communication of the ranks, such as an evaluation, runs in together(), or the loop catches CommError and calls
//   recover(). With second owners, so do writes of parameters between steps that may be made twice, such as a clamp. A decay
//   may not: leave it to the optimizer.
// - Handles on the former world's groups end (CommError): take world.group() again. That concerns MeanMetric,
//   ProgressBar and hooks of one's own, which keep a group.
//
// The mean of gradients is over the ranks that are left: the global batch is smaller. With keep_global_batch it is not:
//
//   shoal::Elastic elastic(world, parallel, optimizer, sampler, {.keep_global_batch = 4 * 64});  // 4 ranks
//   ...
//       auto loader = torch::data::make_data_loader(dataset, sampler, elastic.batch_size());
//       for (auto& batch : *loader) {
//         const auto compute = [&](int64_t begin, int64_t end) {  // once for each share of the batch
//           cross_entropy(parallel.forward(batch.data.slice(0, begin, end)), batch.target.slice(0, begin, end)).backward();
//         };
//
// Each share of 64 samples is computed as on a rank of its own, with the same memory for activations, the same random
// numbers of the CPU's generator (seeded by step and share from rank 0's seed at construction) and the buffers that share 0
// of the step before left, whoever computes it. A rank with several shares holds its whole gradients until the last one
// (no_sync()), whatever the strategy. Not for LocalUpdates and ShardGossipOptimizer, whose ranks have no gradients in common (UsageError). A
// `compute` without arguments is called once, for the whole batch of a rank, which is then the mean of several shares: it
// needs more memory, dropout draws other numbers, and a batch norm normalises over more samples.
//
// Ranks may come: `shoal launch --elastic MIN:MAX` starts lost ranks again and takes more. Such a process runs the same
// program; world.joining() is true in it. It constructs model, wrapper, optimizer, schedule and sampler alone, as a world of
// one rank, without the former ranks' checkpoint; so it holds whole parameters and optimizer state until it has joined, with
// a sharded strategy, too. The constructor of Elastic waits until the others are between two steps, and gives it their
// parameters, buffers, optimizer state, options, loss scale and place in the epoch; then the ranks change as after a
// death, and step() returns false on the others. In the loop:
// - for (size_t epoch = elastic.first_epoch(); ...), which is 0 in a job's first ranks; UsageError in a newcomer that begins
//   in_epoch() with another epoch. Passes within an epoch must follow from steps(), since a newcomer's own count begins anew.
// - A schedule keeps its own count: if (world.joining()) schedule.set_position(elastic.steps()), after the constructor. In a
//   job that was resumed, steps() counts from the resumption: add the steps before it. Options of the optimizer and
//   parameters that differ from rank to rank in a step make the newcomers leave, and so do different operations.
// - Nothing communicates between the constructor and in_epoch(), or the first step() without a sampler, because the other
//   ranks do not make these calls: a UsageError in a newcomer.
// - Batch size and learning rate do not follow from world.size(), which is 1 in a newcomer's constructors.
// - Whatever else the loop keeps (best loss, counters of its own) the program gives by ElasticOptions::tensors or
//   give and take, or begins anew. The CPU's random generator is the newcomer's own: see World::manual_seed().
// A newcomer that does not fit the job (model, optimizer and its options but for numbers, transport, wrapper's options, sampler) gets a
// UsageError that lists what differs, and so does one of a job that cannot be joined: shards of each host over sockets,
// optimizer state that is not registered, a hook with memory of its own, float16 without a loss scaler. The job does not notice
// it; one that dies while it joins costs it a recovery. Until its first complete step, a newcomer leaves with a UsageError
// whatever fails, or when the others have waited for it for 10 s and two steps, and they do that step again; one that is
// stopped in its first update() of a sharded optimizer is waited for as any rank. A newcomer that
// fails is not tried again.
//
// Buffers are rank 0's, as ever: where rank 0 has died, running statistics go on from those of the next rank, unless
// keep_global_batch has given all ranks the same. Random numbers of the CPU's generator are set back when a step is undone.
//
// A rank that is stopped by a signal, or late, is waited for, for WorldOptions::timeout_seconds; with straggler_seconds it is
// killed before, and `shoal launch --max-restarts` starts another one in its place.
//
// All ranks compute on the CPU, over shared memory or tcp or Gloo; over shared memory alone with OSS by host, hybrid
// shards, ShardGossipOptimizer, and DistributedOptimizer with shard_within_host. They run on one host; or on several,
// so that a host may be lost with all of its ranks. Each host has all of the state with an optimizer that is whole on
// each rank, with LocalUpdates, with FullyShardedDataParallel and hybrid_shard or hybrid_shard_grad_op, with OSS over
// world.group().by_host() and its wrapper over world.group(), or with DistributedOptimizer and shard_within_host. After
// a death, hosts with more ranks than the smallest have some that own no shards. With full_shard or shard_grad_op of
// FullyShardedDataParallel, which no host may be able to hold, with DistributedOptimizer without shard_within_host, and
// with OSS over world.group(), each shard has a second owner on another host, which makes the same updates; if both end
// before shards are divided anew, the job is lost. Reading parameters of FullyShardedDataParallel communicates there:
// do it in together(). Those of DistributedOptimizer and OSS come to all ranks behind the second function of step():
// using them in it behind the optimizer's step() is a UsageError on all ranks. Hosts agree through the job's store: if
// it is lost, the job is (JobLost). So let the launcher of node 0 hold it (`shoal launch --nnodes`): otherwise rank 0
// does, and must live. There ranks and hosts join, and straggler_seconds kills, under launchers that were started with
// --elastic MIN:MAX.
//
// Errors: UsageError at construction names what is not supported (other strategies, several model chunks, parameters that ranks do not share,
// OptimizerInBackward, SyncBatchNorm); JobLost where the job cannot go on. Not thread-safe: one thread trains.
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
  // Clipping by TrainingOptions::clip_grad comes between the two functions, where it communicates. replan() is not for a
  // training that has an Elastic.
  Elastic(const World& world, ElasticTraining& training, DistributedSampler& sampler,
          const ElasticOptions& options = {});
  Elastic(const World& world, ElasticTraining& training, const ElasticOptions& options = {});
  // This rank may end from now on without the others taking it for a failure. Not collective.
  ~Elastic();
  Elastic(const Elastic&) = delete;
  Elastic& operator=(const Elastic&) = delete;

  // True at the beginning of a pass through the samples (after sampler.set_epoch()), and again after each change of the
  // ranks while samples are left: the loop then makes a new loader, because a loader's threads have read ahead by the
  // former division, and its copy of the sampler has that one (UsageError when it begins again). False at the end of the
  // pass, which is wherever a loop asks again without a change. So one that leaves `while (in_epoch())` itself must name
  // the next epoch by set_epoch(); otherwise its next call ends the pass that was left. set_epoch() may also stand within
  // the while, before the first step. All ranks must make the same passes: UsageError in the commit of a step if they are
  // in different ones. A rank that learns in a recovery that others have left the pass leaves it, too. Communicates nothing.
  bool in_epoch();

  // One step with `samples` samples of this rank's sampler. True if the step is complete on all ranks; false if it is not,
  // because the ranks have changed: the loop leaves its loader, and in_epoch() says whether to make another. UsageError if a
  // loop with a sampler goes on after a change without ever having called in_epoch(). `compute` may
  // run partly, and again for the same samples on any rank; `update` runs once per complete step. Collective.
  bool step(int64_t samples, const std::function<void()>& compute, const std::function<void()>& update);
  // The same with `compute` for the samples [begin, end) of this rank's: one share of the global batch after the other,
  // all but the last one under no_sync(). The loss is the mean over these samples. Without keep_global_batch there is one
  // share.
  bool step(int64_t samples, const std::function<void(int64_t begin, int64_t end)>& compute,
            const std::function<void()>& update);
  // The same with `prepare`, once on every rank after all of its shares, before the ranks agree that the step is complete. It
  // may communicate: clipping belongs there, since within `compute` there are the gradients of some of the shares.
  bool step(int64_t samples, const std::function<void(int64_t begin, int64_t end)>& compute,
            const std::function<void()>& prepare, const std::function<void()>& update);
  // This rank's samples in a step with keep_global_batch; more once ranks are lost. For each loader, after in_epoch().
  int64_t batch_size() const;

  // Runs `work`, which communicates, and runs it again from its beginning on all ranks whenever the ranks change in it;
  // returns its result. Ends with a barrier, so that no rank goes on while another one runs it again. For evaluation and
  // other communication between steps. Collective.
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

  // A newcomer's loop begins: for one that communicates, in together(), before its first in_epoch() or step(), as the others
  // do when the ranks have changed. Elsewhere it does nothing.
  void begin_loop();
  // The epoch with which this rank's loop over epochs begins: 0, or the job's present one in a process that has come to it.
  // Where the job's loop never calls set_epoch(), it is the number of passes through the samples that have ended.
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
