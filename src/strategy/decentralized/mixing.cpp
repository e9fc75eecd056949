#include "strategy/decentralized/mixing.h"

#include <torch/utils.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "shoal/base/error.h"

namespace shoal {
namespace {

// Push-sum's weight rides behind the values, on a cache line of its own.
constexpr int64_t mass_numel = 32;

}  // namespace

Mixing::Mixing(Group group, Topology topology, double timeout_seconds)
    : group_(std::move(group)),
      topology_(std::move(topology)),
      timeout_seconds_(timeout_seconds),
      members_(group_.size()),
      number_(group_.rank()) {
  agree(group_, topology_);
  std::iota(members_.begin(), members_.end(), 0);
}

void Mixing::open(const std::vector<GossipBuffer>& buffers, std::optional<at::ScalarType> as,
                  const std::optional<CompressedExchange>& compressed) {
  buffers_ = buffers;
  mass_.assign(buffers.size(), 1);
  auto shown = buffers;
  std::map<at::ScalarType, int64_t> largest;
  for (auto& buffer : shown) {
    buffer.numel += pushes() ? mass_numel : 0;
    largest[buffer.dtype] = std::max(largest[buffer.dtype], buffer.numel);
  }
  std::map<at::ScalarType, at::Tensor> memory;
  for (const auto& [dtype, numel] : largest) memory[dtype] = at::empty({numel}, at::TensorOptions(dtype));
  for (auto& buffer : shown) {
    others_.push_back(memory[buffer.dtype].narrow(0, 0, buffer.numel));
    buffer.dtype = as.value_or(buffer.dtype);
    if (!compressed) continue;
    copies_.emplace_back(buffer, *compressed, topology_.period());
    buffer = {copies_.back().message_bytes(), at::kByte};
  }
  shown_ = std::move(shown);
  channel_ = open_gossip_channel(group_, shown_);
}

void Mixing::go_on_from(int64_t version, std::vector<double> mass) {
  if (members_.size() != static_cast<size_t>(group_.size())) {
    throw UsageError(
        "DecentralizedDataParallel: ranks have gone; load the checkpoint into a training that starts anew");
  }
  if (version_ > 0) channel_ = open_gossip_channel(group_, shown_);  // versions only grow
  version_ = version;
  mass_ = std::move(mass);
}

void Mixing::all_hold(size_t buffer, const at::Tensor& values) {
  if (!copies_.empty()) copies_[buffer].all_hold(values, version_);
}

GossipChannel::Limit Mixing::limit() const {
  return std::chrono::duration_cast<GossipChannel::Limit>(std::chrono::duration<double>(timeout_seconds_));
}

void Mixing::begin_step() {
  if (!channel_) return;
  std::vector<int> lost;
  for (int number = 0; number < static_cast<int>(members_.size()); ++number) {
    if (number != number_ && channel_->gone(members_[number], version_)) lost.push_back(number);
  }
  if (lost.empty()) return;
  topology_ = topology_.without(lost);
  for (auto number = lost.rbegin(); number != lost.rend(); ++number) {
    statistics_.removed.push_back(members_[*number]);
    members_.erase(members_.begin() + *number);
  }
  number_ = static_cast<int>(std::find(members_.begin(), members_.end(), group_.rank()) - members_.begin());
  remaining_.reset();
  for (auto& copies : copies_) copies.set_rounds(topology_.period());
  channel_->forget();  // other ranks read this one's values now
}

void Mixing::restart(int64_t version) {
  version_ = version;
  channel_->forget();
}

void Mixing::count(int64_t version, ExchangeStatistics& statistics) const {
  auto& kind = version == version_ ? statistics.exchanged : version > version_ ? statistics.newer : statistics.older;
  ++kind;
}

Mixing::Gathered Mixing::gather_differences(size_t buffer) {
  auto& copies = copies_[buffer];
  Gathered result;
  for (const auto& [number, weight] : round().sources(number_)) {
    at::Tensor message;
    const auto [arrival, version] = channel_->read(buffer, version_, members_[number], limit(),
                                                   [&](const at::Tensor& values) { message = values.clone(); });
    // What is further on or behind may be of another round, whose readers are others.
    if (arrival != Arrival::here || (version - version_) % topology_.period() != 0) {
      ++statistics_.skipped;
      continue;
    }
    count(version, statistics_);
    copies.take(members_[number], version, message);
    if (!result.others.defined()) result.others = others_[buffer].zero_();
    copies.add_difference(members_[number], version_, weight, result.others);
  }
  return result;
}

Mixing::Gathered Mixing::gather(size_t buffer) {
  if (version_ == 0) return {};
  if (!copies_.empty()) return gather_differences(buffer);
  std::set<int> torn;
  while (true) {
    auto counted = statistics_;
    Gathered result{.own = round().self(number_)};
    double mass = result.own * mass_[buffer];
    bool again = false;
    for (const auto& [number, weight] : round().sources(number_)) {
      const int rank = members_[number];
      const auto add = [&, weight = weight](const at::Tensor& values) {
        if (!result.others.defined()) {
          result.others = others_[buffer];
          if (values.scalar_type() == result.others.scalar_type()) {
            at::mul_out(result.others, values, at::scalar_tensor(weight, at::kDouble));
          } else {
            result.others.copy_(values).mul_(weight);
          }
        } else {
          result.others.add_(values, weight);
        }
      };
      const auto [arrival, version] =
          torn.count(rank) > 0 ? Reading{} : channel_->read(buffer, version_, rank, limit(), add);
      if (arrival == Arrival::torn) {
        torn.insert(rank);
        again = true;
        break;
      }
      if (arrival == Arrival::here) {
        count(version, counted);
        continue;
      }
      ++counted.skipped;
      if (!pushes()) result.own += weight;
    }
    if (again) continue;
    statistics_ = counted;
    if (!pushes()) return result;
    // Values are held divided by their weight: x / w, of which this rank keeps W_ii w.
    if (result.others.defined()) {
      mass += result.others[buffers_[buffer].numel].item<double>();
      result.others = result.others.narrow(0, 0, buffers_[buffer].numel).div_(mass);
    }
    result.own *= mass_[buffer] / mass;
    mass_[buffer] = mass;
    return result;
  }
}

void Mixing::show(size_t buffer, const std::function<void(const at::Tensor&, double)>& write) {
  const auto numel = buffers_[buffer].numel;
  auto draft = channel_->draft(buffer, limit());
  if (copies_.empty()) {
    write(draft.narrow(0, 0, numel), mass_[buffer]);
    if (pushes()) draft[numel] = mass_[buffer];
  } else {
    const auto values = at::zeros({numel}, at::TensorOptions(buffers_[buffer].dtype));
    write(values, 1);
    copies_[buffer].write(version_ + 1, values, draft);
  }
  std::vector<int> readers;
  for (const int number : topology_.round(version_ + 1 + skipped_rounds_).targets(number_))
    readers.push_back(members_[number]);
  channel_->publish(buffer, version_ + 1, readers);
}

void Mixing::average(const Group& group, size_t buffer, at::Tensor& values, const Label& label) {
  if (!pushes()) return group.all_reduce(values, ReduceOp::avg, label).wait();
  auto mass = at::full({1}, mass_[buffer], at::kDouble);
  group.all_reduce(values.mul_(mass_[buffer]), ReduceOp::sum, label).wait();
  group.all_reduce(mass, ReduceOp::sum, label).wait();
  values.div_(mass.item<double>());
  mass_[buffer] = 1;
}

const Group& Mixing::remaining() {
  if (members_.size() == static_cast<size_t>(group_.size())) return group_;
  if (!remaining_) remaining_ = group_.subgroup(members_);
  return *remaining_;
}

void Mixing::leave() {
  if (channel_) channel_->leave();
}

}  // namespace shoal
