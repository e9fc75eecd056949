#pragma once
// Repetition of an elastic training of hosts that average their parameters, in one process: a replica of each host.

#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "shoal/topology.h"
#include "tests/elastic/elastic_run.h"

namespace shoal::test {

// State of each host after each step is that of its replica, to the bit.
class GossipJudge {
 public:
  GossipJudge(const Record& record, const Trained& trained) : record_(record), trained_(trained) {
    for (int member = 0; member < most_members; ++member) {
      torch::manual_seed(seed_of_ranks + static_cast<uint64_t>(member));
      generators_.push_back(at::detail::getDefaultCPUGenerator().get_state());
      for (const auto& entry : record.begun[member]) {
        if (!hosts_.contains(entry.home)) hosts_[entry.home] = std::make_unique<Host>(trained);
      }
    }
  }

  // What is wrong; empty: nothing.
  std::string verdict(int epochs) {
    std::map<int64_t, std::vector<const Entry*>> steps;
    for (const auto& list : record_.complete) {
      for (const auto& entry : list) steps[entry.step].push_back(&entry);
    }
    int64_t expected = 1;
    for (const auto& [step, complete] : steps) {
      if (step != expected++) return fmt::format("nobody saw step {} complete", expected - 1);
      const auto fault = repeat(step, complete);
      if (!fault.empty()) return fault;
    }
    for (int epoch = 0; epoch < epochs; ++epoch) {
      int repeated = 0;
      for (const auto& [sample, times] : seen_[epoch]) repeated += times - 1;
      if (seen_[epoch].size() != samples_of_epoch || repeated >= most_ranks) {
        return fmt::format("epoch {} has {} of {} samples, {} of them again", epoch, seen_[epoch].size(),
                           samples_of_epoch, repeated);
      }
    }
    return shared_ > 4 && mixed_ == 0 ? "hosts have mixed nothing" : "";
  }

 private:
  struct Host {
    explicit Host(const Trained& trained) : net(trained.width), copies(trained.width), scaler(trained.scaler()) {
      net.to_dtype(trained.dtype);
      copies.to_dtype(at::kFloat);
      optimizer = with_optimizer(trained, [&]<class Local>(Local*, const auto& options) {
        return std::unique_ptr<torch::optim::Optimizer>(
            std::make_unique<Local>(updated(trained).parameters(), options));
      });
    }
    Net& updated(const Trained& trained) { return trained.has_copies() ? copies : net; }

    Net net;
    Net copies;  // in float32, if the net is not: what the optimizer updates
    GradScaler scaler;
    std::unique_ptr<torch::optim::Optimizer> optimizer{};
  };

  bool scales() const { return trained_.dtype == at::kHalf; }

  uint64_t hash(Host& host) const {
    auto& updated = host.updated(trained_);
    auto state = optimizer_state(*host.optimizer, updated);
    for (const auto& copy : host.copies.named_parameters()) {
      if (trained_.has_copies()) state[copy.key()].tensors["main_param"] = copy.value().detach();
    }
    if (scales()) state[grad_scaler_key] = scaler_state(host.scaler);
    return hash_of(state, host.net);
  }

  // The gradients of a rank, in its share of the host's mean.
  std::vector<at::Tensor> gradients(Host& host, int member, const Entry& begun, int ranks) {
    std::vector<size_t> samples(begun.samples, begun.samples + begun.count);
    for (const auto sample : samples) ++seen_[begun.epoch][static_cast<int>(sample)];
    auto generator = at::detail::getDefaultCPUGenerator();
    generator.set_state(generators_[static_cast<size_t>(member)]);
    host.net.zero_grad();
    const auto batches = inputs_of(samples).chunk(trained_.micro_batches);
    for (const auto& x : batches) {
      const auto loss = loss_of(host.net.forward(x.to(trained_.dtype)), x) / static_cast<double>(batches.size());
      (scales() ? host.scaler.scale(loss) : loss).backward();
    }
    generators_[static_cast<size_t>(member)] = generator.get_state();
    std::vector<at::Tensor> own;
    for (const auto& parameter : host.net.parameters()) {
      const auto gradient = parameter.grad().to(trained_.has_copies() ? at::kFloat : trained_.dtype);
      own.push_back(ranks > 1 ? gradient * (1.0 / ranks) : gradient.clone());
    }
    return own;
  }

  // Every host that trains takes its share of what the others had after the step before.
  void mix(const std::vector<int>& homes, int64_t version) {
    const torch::NoGradGuard no_grad;
    std::vector<int> absent;
    for (const auto& [home, host] : hosts_) {
      if (std::count(homes.begin(), homes.end(), home) == 0) absent.push_back(home);
    }
    const auto whole = make_topology("one-peer-exp", static_cast<int>(hosts_.size()));
    const auto topology = absent.empty() ? whole : whole.without(absent);
    std::vector<std::vector<at::Tensor>> shown;
    for (const int home : homes) {
      auto& values = shown.emplace_back();
      for (const auto& parameter : hosts_[home]->updated(trained_).parameters()) values.push_back(parameter.clone());
    }
    const auto& round = topology.round(version);
    for (size_t number = 0; number < homes.size(); ++number) {
      const auto& sources = round.sources(static_cast<int>(number));
      if (sources.empty()) continue;
      auto parameters = hosts_[homes[number]]->updated(trained_).parameters();
      for (size_t i = 0; i < parameters.size(); ++i) {
        at::Tensor others;
        for (const auto& [source, weight] : sources) {
          const auto& values = shown[static_cast<size_t>(source)][i];
          if (others.defined()) {
            others.add_(values, weight);
          } else {
            others = at::mul(values, at::scalar_tensor(weight, at::kDouble));
          }
        }
        parameters[i].add_(others.sub(parameters[i], 1 - round.self(static_cast<int>(number))));
      }
      ++mixed_;
    }
  }

  void update(Host& host, std::vector<at::Tensor> sums) {
    auto& updated = host.updated(trained_);
    size_t i = 0;
    for (auto& parameter : updated.parameters()) parameter.mutable_grad() = sums[i++];
    const bool infinite = scales() && host.scaler.unscale(sums);
    if (trained_.clip > 0 && !infinite) clip_to_norm(sums, local_norm(sums, 2), trained_.clip);
    if (!infinite) host.optimizer->step();
    if (scales()) host.scaler.update(infinite);
    if (trained_.has_copies()) host.net.round(host.copies);
  }

  std::string repeat(int64_t step, const std::vector<const Entry*>& complete) {
    const auto generation = complete.front()->generation;
    const int ranks = complete.front()->ranks;
    std::map<int, std::map<int, std::pair<int, const Entry*>>> begun;  // by host and rank: number at the start
    int count = 0;
    for (int member = 0; member < most_members; ++member) {
      for (const auto& entry : record_.begun[member]) {
        if (entry.step != step || entry.generation != generation) continue;
        count += begun[entry.home].emplace(entry.rank, std::pair(member, &entry)).second ? 1 : 0;
      }
    }
    if (count != ranks) return fmt::format("{} of {} ranks computed step {}", count, ranks, step);
    std::vector<int> homes;
    std::map<int, std::vector<at::Tensor>> sums;
    for (const auto& [home, of_host] : begun) {
      homes.push_back(home);
      for (const auto& [rank, one] : of_host) {
        add_to(sums[home], gradients(*hosts_[home], one.first, *one.second, static_cast<int>(of_host.size())));
      }
    }
    if (step > 1) mix(homes, step - 1);
    shared_ += step > 1 && homes.size() > 1 ? 1 : 0;
    for (const int home : homes) update(*hosts_[home], sums[home]);
    for (const auto* entry : complete) {
      if (entry->generation != generation || entry->ranks != ranks) {
        return fmt::format("ranks computed step {} in different generations", step);
      }
      auto& host = *hosts_[entry->home];
      const auto sum = sum_of(host.net);
      if (entry->hash == hash(host)) continue;
      return fmt::format(
          "after step {}, computed by {} ranks of {} hosts in generation {}, the state of host {} is another one: the "
          "parameters' sum is {}, and was {}",
          step, ranks, homes.size(), generation, entry->home, sum, entry->sum);
    }
    return "";
  }

  const Record& record_;
  Trained trained_;
  std::vector<at::Tensor> generators_{};
  std::map<int, std::unique_ptr<Host>> hosts_{};
  std::map<int, std::map<int, int>> seen_{};  // by epoch and sample
  int shared_ = 0;                            // steps of several hosts
  int mixed_ = 0;                             // how often a host has taken others' values
};

}  // namespace shoal::test
