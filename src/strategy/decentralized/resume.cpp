// Mixing that resumes from a checkpoint.

#include <torch/utils.h>

#include <algorithm>
#include <functional>

#include "shoal/error.h"
#include "strategy/decentralized/mixing.h"

namespace shoal {

void Mixing::require_all_ranks() const {
  if (now_.members.size() == static_cast<size_t>(group_.size()) && last_newcomer_ == 0) return;
  throw UsageError(
      "DecentralizedDataParallel: ranks have left or rejoined this training; load the checkpoint into a new one");
}

void Mixing::resume_from(int64_t version, std::vector<double> mass) {
  require_all_ranks();
  if (version_ > 0) channel_ = open_gossip_channel(group_, shown_);  // versions never decrease
  version_ = version;
  mass_ = std::move(mass);
  mass_.resize(buffers_.size(), 1);
  if (!pushes()) mass_.assign(buffers_.size(), 1);
}

std::optional<std::vector<double>> Mixing::weights_from(const std::vector<double>& stored, bool same) const {
  require_all_ranks();
  if (!pushes()) return std::vector<double>(buffers_.size(), 1);
  const bool equal = std::adjacent_find(stored.begin(), stored.end(), std::not_equal_to<>()) == stored.end();
  const bool known = equal || (same && stored.size() == buffers_.size());
  const bool everywhere =
      group_.all_reduce(known ? 1 : 0, ReduceOp::min, {-1, -1, "whether push-sum's weights are known"}) == 1;
  if (!everywhere) return std::nullopt;
  return equal ? std::vector<double>(buffers_.size(), stored.empty() ? 1 : stored.front()) : stored;
}

std::vector<at::Tensor> Mixing::copies(size_t buffer) const {
  return copies_.empty() ? std::vector<at::Tensor>() : copies_[buffer].own();
}

// A reader's copy equals the writer's, so it is not read from the checkpoint.
void Mixing::resume_copies(size_t buffer, const std::vector<at::Tensor>& own) {
  const Label label{-1, static_cast<int64_t>(buffer), "copies for the compressed exchange"};
  auto versions = at::empty({group_.size()}, at::kLong);
  group_.all_gather(versions, at::full({1}, version_, at::kLong), label).wait();
  auto& copies = copies_[buffer];
  copies.resume(own, version_);
  for (int64_t round = 0; round < topology().period(); ++round) {
    const auto& neighbours = topology().round(round);
    const auto& sources = neighbours.sources(number());
    std::vector<at::Tensor> received;
    std::vector<Work> works;
    for (const auto& source : sources) {
      received.push_back(at::empty_like(own[round]));
      works.push_back(group_.recv(received.back(), source.rank, /*tag=*/0, label));
    }
    for (const int target : neighbours.targets(number())) {
      works.push_back(group_.send(own[round], target, /*tag=*/0, label));
    }
    for (auto& work : works) work.wait();
    for (size_t i = 0; i < sources.size(); ++i) {
      copies.set_copy(sources[i].rank, round, received[i], versions[sources[i].rank].item<int64_t>());
    }
  }
}

}  // namespace shoal
