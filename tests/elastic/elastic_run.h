#pragma once
// A small elastic training whose ranks write down what they do, in memory that outlives them, and its repetition in one
// process from what they wrote.

#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/mman.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/types.h>
#include <torch/utils.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <map>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "shoal/detail/optimizer_state.h"
#include "shoal/elastic.h"
#include "tests/support/forked_ranks.h"

namespace shoal::test {

constexpr int most_ranks = 6;
constexpr int most_entries = 1000;
constexpr size_t samples_of_epoch = 203;  // no multiple of anything
constexpr size_t batch_size = 4;

// What a rank did: began to compute a step, or saw it complete.
struct Entry {
  int64_t step = 0;
  uint64_t generation = 0;  // in which the step was computed
  int ranks = 0;
  int rank = 0;
  int epoch = 0;
  int count = 0;
  int samples[batch_size] = {};
  uint64_t hash = 0;  // of parameters and optimizer state after a complete step
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

// Shared by all ranks and their parent; by rank of the first generation.
struct Record {
  std::atomic<int> started;
  EntryList begun[most_ranks];
  EntryList complete[most_ranks];
  std::atomic<int> evaluations[most_ranks];
};

class SharedRecord {
 public:
  SharedRecord()
      : record_(static_cast<Record*>(
            mmap(nullptr, sizeof(Record), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {
    if (record_ == MAP_FAILED) throw std::bad_alloc();
  }
  ~SharedRecord() { munmap(record_, sizeof(Record)); }
  SharedRecord(const SharedRecord&) = delete;
  SharedRecord& operator=(const SharedRecord&) = delete;
  Record* operator->() const { return record_; }
  Record& operator*() const { return *record_; }

 private:
  Record* record_;
};

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Uses random numbers in forward, and counts its forwards in a buffer.
struct Net : torch::nn::Module {
  Net() {
    torch::manual_seed(7);
    first = register_module("first", torch::nn::Linear(4, 24));
    second = register_module("second", torch::nn::Linear(24, 24));
    third = register_module("third", torch::nn::Linear(24, 1));
    forwards = register_buffer("forwards", at::zeros({1}, at::kLong));
  }
  at::Tensor forward(const at::Tensor& x) {
    forwards.add_(1);
    const auto noisy = x + 0.01 * at::randn_like(x);
    return third(at::tanh(second(at::tanh(first(noisy)))));
  }
  torch::nn::Linear first{nullptr}, second{nullptr}, third{nullptr};
  at::Tensor forwards;
};

inline at::Tensor inputs_of(const std::vector<size_t>& samples) {
  auto x = at::empty({static_cast<int64_t>(samples.size()), 4});
  for (size_t i = 0; i < samples.size(); ++i) {
    for (int j = 0; j < 4; ++j) {
      x[static_cast<int64_t>(i)][j] = static_cast<double>((samples[i] * 37 + j * 11) % 101) / 50 - 1;
    }
  }
  return x;
}

inline at::Tensor loss_of(const at::Tensor& y, const at::Tensor& x) {
  return (y.squeeze(1) - x.sum(1)).square().mean();
}

class Hash {
 public:
  void add(const at::Tensor& tensor) {
    const auto flat = tensor.detach().contiguous();
    const auto* bytes = static_cast<const unsigned char*>(flat.const_data_ptr());
    for (size_t i = 0; i < flat.nbytes(); ++i) value = (value ^ bytes[i]) * 1099511628211U;
  }
  uint64_t value = 14695981039346656037U;
};

inline uint64_t hash_of(const torch::optim::Optimizer& optimizer, const torch::nn::Module& module) {
  Hash hash;
  for (const auto& parameter : module.parameters()) hash.add(parameter);
  for (const auto& [name, state] : optimizer_state(optimizer, module)) {
    for (const auto& [field, tensor] : state.tensors) hash.add(tensor);
    for (const auto& [field, number] : state.numbers) hash.add(at::scalar_tensor(number, at::kDouble));
  }
  return hash.value;
}

constexpr uint64_t seed_of_ranks = 100;
constexpr double learning_rate = 0.01;

// Where in a step a rank is told to end.
enum class Moment {
  before_forward,
  after_forward,
  in_backward,
  before_commit,
  before_update,
  after_update,
  between_steps,
  evaluation,
  on_notice,  // once it has noticed another rank's death
  after_recovery,
};

struct Death {
  int rank = -1;  // of the first generation
  Moment moment = Moment::before_forward;
  int64_t step = 0;
};

// Repeats the training from the record in this process. Returns what is wrong with it; empty: nothing. in_rank_order:
// whether the transport adds in the order of ranks, so that the bits can be compared.
inline std::string judge(const Record& record, int epochs, bool in_rank_order = true) {
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
  Net net;
  torch::optim::Adam optimizer(net.parameters(), torch::optim::AdamOptions(learning_rate));
  auto generator = at::detail::getDefaultCPUGenerator();
  std::vector<at::Tensor> generators;
  for (int member = 0; member < most_ranks; ++member) {
    torch::manual_seed(seed_of_ranks + static_cast<uint64_t>(member));
    generators.push_back(generator.get_state());
  }
  std::map<int, std::map<int, int>> seen;  // by epoch and sample
  int64_t expected = 1;
  for (const auto& [step, complete] : steps) {
    if (step != expected++) return fmt::format("nobody saw step {} complete", expected - 1);
    const auto& entry = *complete.entry;
    std::vector<at::Tensor> sums;
    for (int rank = 0; rank < entry.ranks; ++rank) {
      const Entry* begun = nullptr;
      int member = 0;
      for (int other = 0; other < most_ranks; ++other) {
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
      const auto x = inputs_of(samples);
      net.zero_grad();
      loss_of(net.forward(x), x).backward();
      generators[member] = generator.get_state();
      size_t i = 0;
      for (const auto& parameter : net.parameters()) {
        const auto part = entry.ranks > 1 ? parameter.grad() * (1.0 / entry.ranks) : parameter.grad().clone();
        if (rank == 0) sums.push_back(part);
        if (rank > 0) sums[i].add_(part);
        ++i;
      }
    }
    size_t i = 0;
    for (auto& parameter : net.parameters()) parameter.mutable_grad() = sums[i++];
    optimizer.step();
    if (in_rank_order && hash_of(optimizer, net) != complete.hash) {
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
                         const ElasticOptions& chosen = {}) {
  alarm(30);  // a rank that hangs is ended by a signal, which the test sees
  const int self = world.rank();
  auto net = std::make_shared<Net>();
  DistributedDataParallelOptions small;
  small.first_bucket_mb = 1e-3;  // several buckets
  small.bucket_cap_mb = 1e-3;
  DistributedDataParallel parallel(net, world.group(), small);
  torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(learning_rate));
  DistributedSampler sampler(samples_of_epoch, world.group(), {.seed = 3});
  int64_t step = 1;  // the one that is computed
  const auto reached = [&](Moment moment) {
    for (const auto& death : deaths) {
      if (death.rank == self && death.moment == moment && death.step <= step) std::raise(SIGKILL);
    }
  };
  net->first->weight.register_hook([&](const at::Tensor&) { reached(Moment::in_backward); });
  auto options = chosen;
  if (!options.on_change) options.on_change = [&](const ElasticChange&) { reached(Moment::after_recovery); };
  Elastic elastic(world, parallel, optimizer, sampler, options);
  world.manual_seed(seed_of_ranks);
  ++record.started;
  for (int epoch = 0; epoch < epochs; ++epoch) {
    sampler.set_epoch(static_cast<size_t>(epoch));
    while (elastic.in_epoch()) {
      auto division = sampler;  // as a data loader has one
      division.reset();
      while (const auto batch = division.next(batch_size)) {
        Entry entry{.generation = elastic.generation(), .epoch = epoch, .count = static_cast<int>(batch->size())};
        std::copy(batch->begin(), batch->end(), entry.samples);
        const auto compute = [&] {
          entry.step = step;
          entry.ranks = world.size();
          entry.rank = world.rank();
          record.begun[self].add(entry);
          reached(Moment::before_forward);
          try {
            const auto x = inputs_of(*batch);
            const auto y = parallel.forward(x);
            reached(Moment::after_forward);
            loss_of(y, x).backward();
          } catch (const CommError&) {
            reached(Moment::on_notice);
            throw;
          }
          reached(Moment::before_commit);
        };
        const auto update = [&] {
          reached(Moment::before_update);
          optimizer.step();
          reached(Moment::after_update);
        };
        if (!elastic.step(static_cast<int64_t>(batch->size()), compute, update)) break;
        entry.hash = hash_of(optimizer, *net);
        entry.at = now();
        record.complete[self].add(entry);
        optimizer.zero_grad();
        if (net->forwards.item<int64_t>() != step)
          return fmt::format("{} forwards in {} steps", net->forwards.item<int64_t>(), step);
        if (elastic.steps() != step) return fmt::format("{} steps, not {}", elastic.steps(), step);
        ++step;
        reached(Moment::between_steps);
      }
    }
    const auto sum = elastic.together([&] {
      reached(Moment::evaluation);
      return world.all_reduce(1.0);
    });
    if (sum != world.size()) return fmt::format("{} ranks of {} in an evaluation", sum, world.size());
    ++record.evaluations[self];
  }
  return "";
}

}  // namespace shoal::test
