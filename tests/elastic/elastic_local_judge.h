#pragma once
// Repetition of an elastic training under LocalUpdates in one process: a replica of each rank, and the outer optimizers
// of the papers.

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/elastic/elastic_local.h"

namespace shoal::test {

// Values of ranks are those of their replicas to 1e-12.
class LocalJudge {
 public:
  LocalJudge(const LocalRecord& record, const LocalMethod& method)
      : record_(record), how_(method.options), writes_(method.writes), flying_(how_.fragments), rates_(how_.fragments) {
    for (int i = 0; i < local_values; ++i) fragment_of_.push_back(record.fragment_of[i]);
  }

  // What is wrong; empty: nothing.
  std::string verdict() {
    std::map<int64_t, std::map<int, const LocalEntry*>> steps;
    for (int member = 0; member < most_members; ++member) {
      for (const auto& entry : record_.complete[member]) steps[entry.step][member] = &entry;
    }
    int64_t expected = 1;
    for (const auto& [step, complete] : steps) {
      if (step != expected++) return fmt::format("nobody saw step {} complete", expected - 1);
      const auto fault = repeat(step, complete);
      if (!fault.empty()) return fault;
    }
    if (seen_.size() != local_samples) return fmt::format("{} of {} samples were seen", seen_.size(), local_samples);
    int repeated = 0;
    for (const auto& [sample, times] : seen_) repeated += times - 1;
    return repeated < most_ranks ? "" : fmt::format("{} samples were repeated", repeated);
  }

  // Exchanges over the ranks of the step, and over fewer of them, because one died before its end.
  int whole = 0;
  int smaller = 0;

 private:
  struct Replica {
    explicit Replica(int member) : net(member) {}
    LocalNet net;
    std::unique_ptr<torch::optim::Adam> optimizer{};
  };
  struct Common {
    at::Tensor theta, momentum;
  };

  Replica& make(int member) {
    auto& replica = replicas_.try_emplace(member, member).first->second;
    replica.optimizer =
        std::make_unique<torch::optim::Adam>(replica.net.parameters(), torch::optim::AdamOptions(learning_rate));
    return replica;
  }

  std::string repeat(int64_t step, const std::map<int, const LocalEntry*>& complete) {
    const auto& first = *complete.begin()->second;
    for (const auto& [member, entry] : complete) {
      if (entry->generation != first.generation || entry->ranks != first.ranks) {
        return fmt::format("step {} was computed in different generations", step);
      }
      if (entry->common != first.common) return fmt::format("ranks differ in common values after step {}", step);
    }
    std::vector<int> members;
    std::vector<const LocalEntry*> begun;
    for (int rank = 0; rank < first.ranks; ++rank) {
      for (int member = 0; member < most_members; ++member) {
        for (const auto& one : record_.begun[member]) {
          if (one.step != step || one.generation != first.generation || one.rank != rank) continue;
          members.push_back(member);
          begun.push_back(&one);
        }
      }
      if (static_cast<int>(members.size()) != rank + 1)
        return fmt::format("rank {} did not compute step {}", rank, step);
    }
    follow(step, members, first.generation);
    for (size_t rank = 0; rank < members.size(); ++rank) {
      const auto* entry = begun[rank];
      std::vector<size_t> samples(entry->samples, entry->samples + entry->count);
      for (const auto sample : samples) ++seen_[static_cast<int>(sample)];
      local_loss(replicas_.at(members[rank]).net, samples).backward();
    }
    if (writes_ && step > 1) adopt(members);
    if (step <= how_.warmup_steps) average_gradients(members);
    for (const int member : members) {
      set_rate(*replicas_.at(member).optimizer, step - 1);
      replicas_.at(member).optimizer->step();
      replicas_.at(member).optimizer->zero_grad();
    }
    if (step == how_.warmup_steps) common_.theta = flat(replicas_.at(members[0]).net);
    const auto fault = exchange(step, members, complete);
    for (const int member : members) {
      if (writes_) write(replicas_.at(member).net);
    }
    return fault;
  }

  // Parameters were written: theta is their mean, and what is in flight is not applied.
  void adopt(const std::vector<int>& members) {
    common_.theta = mean_of(members);
    for (auto& sent : flying_) sent = at::Tensor();
  }

  // The ranks of a step: newcomers begin with the mean and the optimizer of the lowest rank, and what is in flight is
  // sent again.
  void follow(int64_t step, const std::vector<int>& members, uint64_t generation) {
    if (generation == generation_) return;
    const bool begins = generation_ == 0;
    generation_ = generation;
    if (step == 1) common_.theta = flat(LocalNet());
    if (step == 1) common_.momentum = at::zeros_like(common_.theta);
    std::vector<int> old;
    for (const int member : members) {
      if (replicas_.contains(member)) old.push_back(member);
    }
    const auto mean = old.empty() ? at::Tensor() : mean_of(old);
    for (const int member : members) {
      if (replicas_.contains(member)) continue;
      auto& replica = make(member);
      if (begins) continue;
      assign(replica.net, mean);
      replica.net.steps.copy_(replicas_.at(old.front()).net.steps);
      const auto giver = replicas_.at(old.front()).net.parameters();
      const auto own = replica.net.parameters();
      auto& states = replicas_.at(old.front()).optimizer->state();
      for (size_t i = 0; i < own.size(); ++i) {
        const auto found = states.find(giver[i].unsafeGetTensorImpl());
        if (found == states.end()) continue;
        const auto& from = static_cast<torch::optim::AdamParamState&>(*found->second);
        auto copy = std::make_unique<torch::optim::AdamParamState>();
        copy->step(from.step());
        copy->exp_avg(from.exp_avg().clone());
        copy->exp_avg_sq(from.exp_avg_sq().clone());
        replica.optimizer->state()[own[i].unsafeGetTensorImpl()] = std::move(copy);
      }
    }
    for (auto& sent : flying_) {
      if (sent.defined()) sent = mean_of(members);
    }
  }

  at::Tensor mean_of(const std::vector<int>& members) {
    auto sum = at::zeros({local_values}, at::kDouble);
    for (const int member : members) sum += flat(replicas_.at(member).net);
    return sum / static_cast<double>(members.size());
  }

  void average_gradients(const std::vector<int>& members) {
    for (size_t i = 0; i < replicas_.at(members[0]).net.parameters().size(); ++i) {
      at::Tensor sum;
      for (const int member : members) {
        const auto& gradient = replicas_.at(member).net.parameters()[i].grad();
        sum = sum.defined() ? sum + gradient : gradient.clone();
      }
      for (const int member : members) {
        replicas_.at(member).net.parameters()[i].mutable_grad() = sum / static_cast<double>(members.size());
      }
    }
  }

  // `applied`: the part of the model that the mean is of. rate: of each element, when it was sent.
  Common outer(const at::Tensor& mean, const at::Tensor& applied, const at::Tensor& rate) const {
    auto next = Common{common_.theta.clone(), common_.momentum.clone()};
    const auto difference = common_.theta - mean;
    if (std::holds_alternative<Averaging>(how_.outer)) {
      next.theta = mean;
    } else if (const auto* slow = std::get_if<SlowMo>(&how_.outer)) {
      next.momentum = slow->slow_momentum * common_.momentum + difference / rate;
      next.theta = common_.theta - slow->slow_lr * rate * next.momentum;
    } else {
      const auto& nesterov = std::get<OuterNesterov>(how_.outer);
      next.momentum = nesterov.momentum * common_.momentum + difference;
      next.theta = common_.theta - nesterov.lr * (difference + nesterov.momentum * next.momentum);
    }
    return {at::where(applied, next.theta, common_.theta), at::where(applied, next.momentum, common_.momentum)};
  }

  at::Tensor blended(const Common& next, const at::Tensor& own, const at::Tensor& applied) const {
    const double alpha = how_.alpha.value_or(how_.delay > 0 ? 0.5 : 0.0);
    return at::where(applied, alpha * own + (1 - alpha) * next.theta, own);
  }

  bool is_due(int64_t since_warmup, int number) const {
    const int64_t first = (number + 1) * how_.every / how_.fragments;
    return since_warmup >= first && (since_warmup - first) % how_.every == 0;
  }

  // Subsets of the members that have all of those who saw the step complete: over which of them an exchange may have
  // been.
  static std::vector<std::vector<int>> possible(const std::vector<int>& members,
                                                const std::map<int, const LocalEntry*>& complete) {
    std::vector<std::vector<int>> list;
    for (unsigned mask = (1U << members.size()) - 1; mask > 0; --mask) {
      std::vector<int> some;
      for (size_t i = 0; i < members.size(); ++i) {
        if ((mask >> i & 1U) != 0) some.push_back(members[i]);
      }
      const bool has_all = std::all_of(complete.begin(), complete.end(), [&](const auto& one) {
        return std::count(some.begin(), some.end(), one.first) > 0;
      });
      if (has_all) list.push_back(std::move(some));
    }
    return list;
  }

  at::Tensor buffer_of(const std::vector<int>& members) const {
    auto sum = at::zeros({1}, at::kDouble);
    for (const int member : members) sum += replicas_.at(member).net.steps;
    return sum / static_cast<double>(members.size());
  }

  std::string exchange(int64_t step, const std::vector<int>& members,
                       const std::map<int, const LocalEntry*>& complete) {
    const auto since = step - how_.warmup_steps;
    const bool buffers = how_.average_buffers && step % how_.every == 0;
    for (int number = 0; number < how_.fragments; ++number) {
      if (!is_due(since, number)) continue;
      flying_[number] = mean_of(members);
      rates_[number] = local_rate(step - 1);
    }
    auto arrived = at::zeros({local_values}, at::kDouble);
    auto applied = at::zeros({local_values}, at::kBool);
    auto rate = at::ones({local_values}, at::kDouble);
    for (int number = 0; number < how_.fragments; ++number) {
      if (!is_due(since - how_.delay, number) || !flying_[number].defined()) continue;
      for (int i = 0; i < local_values; ++i) {
        if (fragment_of_[i] != number) continue;
        applied[i] = true;
        arrived[i] = flying_[number][i];
        rate[i] = rates_[number];
      }
      flying_[number] = at::Tensor();
    }
    const bool exchanges = buffers || applied.any().item<bool>();
    for (const auto& some : possible(members, complete)) {
      if (!exchanges && some.size() < members.size()) break;
      const auto next = outer(some.size() == members.size() ? arrived : mean_of(some), applied, rate);
      const auto buffer = buffer_of(some);
      const bool fits = std::all_of(complete.begin(), complete.end(), [&](const auto& one) {
        auto& net = replicas_.at(one.first).net;
        const auto seen = at::tensor(at::ArrayRef<double>(one.second->values, local_values), at::kDouble);
        const auto expected = (buffers ? buffer : net.steps).template item<double>();
        return std::abs(expected - one.second->buffer) < 1e-9 &&
               at::allclose(blended(next, flat(net), applied), seen, 1e-12, 1e-12);
      });
      if (!fits) continue;
      for (const int member : members) {
        auto& net = replicas_.at(member).net;
        assign(net, blended(next, flat(net), applied));
        if (buffers) net.steps.copy_(buffer);
      }
      common_ = next;
      if (exchanges) ++(some.size() == members.size() ? whole : smaller);
      return "";
    }
    return fmt::format("after step {} of {} ranks in generation {}, the values are not those of the repetition", step,
                       members.size(), generation_);
  }

  const LocalRecord& record_;
  LocalUpdatesOptions how_;
  bool writes_;
  std::vector<int> fragment_of_{};
  std::vector<at::Tensor> flying_;  // mean of each fragment that is in flight
  std::vector<double> rates_;       // the learning rate when it was sent first
  std::map<int, Replica> replicas_{};
  std::map<int, int> seen_{};
  Common common_{};
  uint64_t generation_ = 0;
};

}  // namespace shoal::test
