#pragma once
// A small elastic training whose ranks write down what they do, in memory that outlives them, and its repetition in one
// process from what they wrote.

#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/mman.h>
#include <torch/types.h>
#include <torch/utils.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <map>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/environment.h"
#include "comm/group/hosts.h"
#include "engine/gradients/gradient_norm.h"
#include "engine/sharded/sharded_state.h"
#include "shoal/elastic.h"
#include "tests/elastic/elastic_training.h"
#include "tests/support/forked_ranks.h"

namespace shoal::test {

constexpr int most_ranks = 6;
constexpr int most_members = 16;  // processes in the life of a job
constexpr int most_entries = 1000;
constexpr size_t samples_of_epoch = 127;  // no multiple of anything
constexpr size_t batch_size = 4;

// What a rank did: began to compute a step, or saw it complete.
struct Entry {
  int64_t step = 0;
  uint64_t generation = 0;  // in which the step was computed
  int ranks = 0;
  int rank = 0;
  int host = 0;  // number of the host among those of the ranks
  int home = 0;  // number of the host among those at the start
  int epoch = 0;
  int count = 0;
  int samples[batch_size] = {};
  uint64_t hash = 0;  // of parameters and optimizer state after a complete step
  double sum = 0;     // of parameters, likewise
  double at = 0;      // seconds
};

class EntryList {
 public:
  void add(const Entry& entry) {
    const int next = count_.load();
    if (next == most_entries) throw std::runtime_error("the list of entries is full");
    entries_[next] = entry;
    count_.store(next + 1);
  }
  const Entry* begin() const { return entries_; }
  const Entry* end() const { return entries_ + count_.load(); }
  bool empty() const { return count_.load() == 0; }

 private:
  std::atomic<int> count_;
  Entry entries_[most_entries];
};

// Shared by all ranks and their parent; by rank of the first generation, and by the number of a newcomer.
struct Record {
  std::atomic<int> started;
  std::atomic<int64_t> last_step;  // that ranks may compute so far; 0: any
  EntryList begun[most_members];
  EntryList complete[most_members];
  std::atomic<int> evaluations[most_members];
  std::atomic<int> first_epoch[most_members];
};

// Zeros at first, in memory that the ranks and their parent share.
template <class Content>
class InSharedMemory {
 public:
  InSharedMemory()
      : content_(static_cast<Content*>(
            mmap(nullptr, sizeof(Content), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {
    if (content_ == MAP_FAILED) throw std::bad_alloc();
  }
  ~InSharedMemory() { munmap(content_, sizeof(Content)); }
  InSharedMemory(const InSharedMemory&) = delete;
  InSharedMemory& operator=(const InSharedMemory&) = delete;
  Content* operator->() const { return content_; }
  Content& operator*() const { return *content_; }

 private:
  Content* content_;
};

using SharedRecord = InSharedMemory<Record>;

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// How many ranks trials have killed.
struct Kills {
  int trials = 0;
  int all = 0;
  int of_rank_0 = 0;

  void count(const std::vector<RankEnded>& ended) {
    ++trials;
    for (const auto& one : ended) all += WIFSIGNALED(one.status) ? 1 : 0;
    of_rank_0 += WIFSIGNALED(ended[0].status) ? 1 : 0;
  }
  std::string text() const { return fmt::format("{} trials, {} kills, {} of them of rank 0", trials, all, of_rank_0); }
};

// Number in a variable of the environment.
inline int number_of(const char* variable, int otherwise) {
  const auto text = process_environment()(variable);
  return text ? std::stoi(*text) : otherwise;
}

// This process among those of the job.
inline int member_number(const World& world) {
  return world.joining() ? std::stoi(process_environment()("SHOAL_JOIN").value()) : world.rank();
}

// Where in a step a rank is told to end.
enum class Moment {
  before_forward,
  after_forward,
  in_backward,
  before_commit,
  before_update,
  in_update,      // sharded: in the second chunk that this rank updates, before the optimizer has changed it
  spoilt_update,  // and after, with bytes of which nobody knows where they come from
  in_last_chunk,  // sharded: as spoilt_update, in the last chunk of its share
  finishing,      // sharded: as spoilt_update, in the first chunk of another rank's share
  after_update,
  between_steps,
  evaluation,
  in_evaluation,  // between two forwards
  on_notice,      // once it has noticed another rank's death
  in_division,    // sharded: when its local optimizer is made anew in a recovery
  after_recovery,
};

struct Death {
  int rank = -1;  // of the first generation
  Moment moment = Moment::before_forward;
  int64_t step = 0;
  int signal = SIGKILL;  // SIGSTOP: it stands still, and must be killed by the others; 0: it is late, and lives
};

inline void add_to(std::vector<at::Tensor>& sums, const std::vector<at::Tensor>& parts) {
  if (sums.empty()) {
    sums = parts;
    return;
  }
  for (size_t i = 0; i < sums.size(); ++i) sums[i].add_(parts[i]);
}

// Repeats the training from the record in this process. Returns what is wrong with it; empty: nothing. in_rank_order:
// whether the transport adds in the order of ranks, so that the bits can be compared; otherwise the sum of the
// parameters is, to 1e-3.
inline std::string judge(const Record& record, int epochs, bool in_rank_order = true, const Trained& trained = {}) {
  struct Complete {
    const Entry* entry;
    uint64_t hash;
  };
  std::map<int64_t, Complete> steps;
  for (const auto& list : record.complete) {
    for (const auto& entry : list) {
      const auto [place, first] = steps.emplace(entry.step, Complete{&entry, entry.hash});
      const auto& other = *place->second.entry;
      if (first) continue;
      if (other.hash != entry.hash) return fmt::format("ranks differ after step {}", entry.step);
      if (other.generation != entry.generation || other.ranks != entry.ranks || other.epoch != entry.epoch) {
        return fmt::format("ranks computed step {} in different generations", entry.step);
      }
    }
  }
  Net net(trained.width);
  net.to_dtype(trained.dtype);
  Net copies(trained.width);  // in float32, if the net is not: what the optimizer updates
  copies.to_dtype(trained.module_dtype());
  copies.to_dtype(at::kFloat);
  auto& updated = trained.has_copies() ? copies : net;
  GradScaler scaler(trained.scaler());
  const bool scales = trained.dtype == at::kHalf;
  const auto made = with_optimizer(trained, [&]<class Local>(Local*, const auto& options) {
    return std::unique_ptr<torch::optim::Optimizer>(std::make_unique<Local>(updated.parameters(), options));
  });
  auto& optimizer = *made;
  const auto hash = [&] {
    auto state = optimizer_state(optimizer, updated);
    for (const auto& copy : copies.named_parameters()) {
      if (trained.has_copies()) state[copy.key()].tensors["main_param"] = copy.value().detach();
    }
    if (scales) state[grad_scaler_key] = scaler_state(scaler);
    return hash_of(state, net);
  };
  auto generator = at::detail::getDefaultCPUGenerator();
  std::vector<at::Tensor> generators;
  for (int member = 0; member < most_members; ++member) {
    torch::manual_seed(seed_of_ranks + static_cast<uint64_t>(member));
    generators.push_back(generator.get_state());
  }
  std::map<int, std::map<int, int>> seen;  // by epoch and sample
  int64_t expected = 1;
  for (const auto& [step, complete] : steps) {
    if (step != expected++) return fmt::format("nobody saw step {} complete", expected - 1);
    const auto& entry = *complete.entry;
    std::vector<std::pair<int, std::vector<at::Tensor>>> parts;  // by rank, with its host
    std::map<int, int> ranks_of_hosts;
    for (int rank = 0; rank < entry.ranks; ++rank) {
      const Entry* begun = nullptr;
      int member = 0;
      for (int other = 0; other < most_members; ++other) {
        for (const auto& one : record.begun[other]) {
          if (one.step != step || one.generation != entry.generation || one.rank != rank) continue;
          begun = &one;
          member = other;
        }
      }
      if (begun == nullptr) return fmt::format("rank {} did not compute step {}", rank, step);
      std::vector<size_t> samples(begun->samples, begun->samples + begun->count);
      for (const auto sample : samples) ++seen[entry.epoch][static_cast<int>(sample)];
      generator.set_state(generators[member]);
      net.zero_grad();
      const auto batches = inputs_of(samples).chunk(trained.micro_batches);
      for (const auto& x : batches) {
        const auto loss = loss_of(net.forward(x.to(trained.dtype)), x) / static_cast<double>(batches.size());
        (scales ? scaler.scale(loss) : loss).backward();
      }
      generators[member] = generator.get_state();
      std::vector<at::Tensor> own;
      for (const auto& parameter : net.parameters()) {
        const auto gradient = parameter.grad().to(trained.has_copies() ? at::kFloat : trained.dtype);
        own.push_back(entry.ranks > 1 ? gradient * (1.0 / entry.ranks) : gradient.clone());
      }
      ++ranks_of_hosts[begun->host];
      parts.emplace_back(begun->host, std::move(own));
    }
    const bool equal_hosts = std::all_of(ranks_of_hosts.begin(), ranks_of_hosts.end(), [&](const auto& host) {
      return host.second == ranks_of_hosts.begin()->second;
    });
    std::map<int, std::vector<at::Tensor>> by_host;
    for (const auto& [host, part] : parts) add_to(by_host[trained.sums_by_host(equal_hosts) ? host : 0], part);
    std::vector<at::Tensor> sums;
    for (const auto& [host, part] : by_host) add_to(sums, part);
    size_t i = 0;
    for (auto& parameter : updated.parameters()) parameter.mutable_grad() = sums[i++];
    const bool infinite = scales && scaler.unscale(sums);
    if (trained.clip > 0 && !infinite) clip_to_norm(sums, local_norm(sums, 2), trained.clip);
    if (!infinite) optimizer.step();
    if (scales) scaler.update(infinite);
    if (trained.has_copies()) net.round(copies);
    if (std::abs(sum_of(net) / entry.sum - 1) > 1e-3) {
      return fmt::format("after step {} the parameters' sum is {}, and was {}", step, sum_of(net), entry.sum);
    }
    if (in_rank_order && hash() != complete.hash) {
      return fmt::format(
          "after step {}, computed by {} ranks in generation {}, the state is not that of a run without "
          "deaths",
          step, entry.ranks, entry.generation);
    }
  }
  for (int epoch = 0; epoch < epochs; ++epoch) {
    int repeated = 0;
    for (const auto& [sample, times] : seen[epoch]) repeated += times - 1;
    if (seen[epoch].size() != samples_of_epoch) {
      return fmt::format("epoch {} has {} of {} samples", epoch, seen[epoch].size(), samples_of_epoch);
    }
    if (repeated >= most_ranks) return fmt::format("epoch {} repeats {} samples", epoch, repeated);
  }
  return "";
}

// Trains, and dies as told. Returns "" where all is well.
inline std::string train(const World& world, Record& record, int epochs, const std::vector<Death>& deaths = {},
                         const ElasticOptions& chosen = {}, const Trained& trained = {}) {
  alarm(30);  // a rank that hangs is ended by a signal, which the test sees
  const int self = member_number(world);
  auto net = std::make_shared<Net>(trained.width);
  net->to_dtype(trained.module_dtype());
  const auto wrapped = wrap_as(trained, net, world.group());
  auto& optimizer = *wrapped.optimizer;
  const int home = hosts_of(world.group())[static_cast<size_t>(world.rank())];
  DistributedSampler sampler(samples_of_epoch, world.group(), {.seed = 3});
  int64_t step = 1;  // the one that is computed
  const auto reached = [&](Moment moment) {
    for (const auto& death : deaths) {
      if (death.rank != self || death.moment != moment || death.step > step) continue;
      if (death.signal != 0) std::raise(death.signal);
      if (death.signal == 0 && death.step == step) usleep(400'000);
    }
  };
  int64_t chunk = 0;  // of this step's update
  int64_t own = 0;    // this rank's chunks
  at_chunk = [&](torch::optim::Optimizer& local, bool after) {
    const auto second = std::min<int64_t>(2, own);
    if (!after && ++chunk == second) reached(Moment::in_update);
    for (const auto& [moment, when] :
         {std::pair(Moment::spoilt_update, second), {Moment::in_last_chunk, own}, {Moment::finishing, own + 1}}) {
      const bool dies = std::any_of(deaths.begin(), deaths.end(), [&, moment = moment](const Death& death) {
        return death.rank == self && death.moment == moment && death.step <= step;
      });
      if (!after || !dies || chunk != when) continue;
      spoil(local);
      reached(moment);
    }
  };
  at_making = [&] { reached(Moment::in_division); };
  net->first->weight.register_hook([&](const at::Tensor&) { reached(Moment::in_backward); });
  auto options = chosen;
  if (!options.on_change) options.on_change = [&](const ElasticChange&) { reached(Moment::after_recovery); };
  const auto made = wrapped.elastic(world, sampler, options);
  auto& elastic = *made;
  step = elastic.steps() + 1;
  // A newcomer gets the buffer; a short batch has fewer parts.
  int64_t forwards = trained.micro_batches == 1 ? elastic.steps() : net->forwards.item<int64_t>();
  world.manual_seed(seed_of_ranks);
  ++record.started;
  record.first_epoch[self] = static_cast<int>(elastic.first_epoch());
  for (auto epoch = static_cast<int>(elastic.first_epoch()); epoch < epochs; ++epoch) {
    sampler.set_epoch(static_cast<size_t>(epoch));
    while (elastic.in_epoch()) {
      auto division = sampler;  // as a data loader has one
      division.reset();
      while (const auto batch = division.next(batch_size)) {
        Entry entry{
            .generation = elastic.generation(), .home = home, .epoch = epoch, .count = static_cast<int>(batch->size())};
        std::copy(batch->begin(), batch->end(), entry.samples);
        const auto parts = inputs_of(*batch).chunk(trained.micro_batches);
        const auto compute = [&] {
          entry.step = step;
          entry.ranks = world.size();
          entry.rank = world.rank();
          entry.host = hosts_of(world.group())[static_cast<size_t>(world.rank())];
          record.begun[self].add(entry);
          while (record.last_step != 0 && step > record.last_step) usleep(200);
          reached(Moment::before_forward);
          try {
            for (size_t i = 0; i < parts.size(); ++i) {
              const auto scope = wrapped.no_sync(i + 1 < parts.size());
              const auto y = wrapped.forward(parts[i]);
              reached(Moment::after_forward);
              wrapped.backward(loss_of(y, parts[i]) / static_cast<double>(parts.size()));
            }
          } catch (const CommError&) {
            reached(Moment::on_notice);
            throw;
          }
          reached(Moment::before_commit);
        };
        const auto update = [&] {
          reached(Moment::before_update);
          chunk = 0;
          own = wrapped.share() != nullptr ? chunks_of(*wrapped.share(), trained.optimizer != "lamb") : 0;
          if (wrapped.has_second_owners()) own = 1;
          wrapped.step();
          reached(Moment::after_update);
        };
        if (!elastic.step(static_cast<int64_t>(batch->size()), compute, update)) break;
        std::tie(entry.hash, entry.sum) = elastic.together([&] {
          const auto state = wrapped.state(*net);
          return std::pair(hash_of(state, *net), sum_of(*net));
        });
        entry.at = now();
        record.complete[self].add(entry);
        optimizer.zero_grad();
        forwards += static_cast<int64_t>(parts.size());
        if (net->forwards.item<int64_t>() != forwards)
          return fmt::format("{} forwards in {} steps", net->forwards.item<int64_t>(), step);
        if (elastic.steps() != step) return fmt::format("{} steps, not {}", elastic.steps(), step);
        ++step;
        reached(Moment::between_steps);
      }
    }
    // Whoever has ended it before a rank ended keeps its result.
    const auto [sum, losses, loss, ranks] = elastic.together([&] {
      reached(Moment::evaluation);
      const auto own = evaluate(wrapped, *net, [&] { reached(Moment::in_evaluation); });
      const int present = world.size();
      return std::tuple(world.all_reduce(1.0), world.all_reduce(own), own, present);
    });
    if (sum != ranks) return fmt::format("{} ranks of {} in an evaluation", sum, ranks);
    const bool alike = trained.sharding != Sharding::gossip;
    if (alike && std::abs(losses - ranks * loss) > 1e-9 * losses)
      return fmt::format("{} in place of {}", losses, ranks * loss);
    ++record.evaluations[self];
  }
  return "";
}

}  // namespace shoal::test
