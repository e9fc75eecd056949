#include "strategy/decentralized/mixing.h"

#include <ATen/record_function.h>
#include <torch/utils.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "base/limits.h"
#include "shoal/telemetry.h"

namespace shoal {
namespace {

// Push-sum's weight follows the values, on a cache line of its own.
constexpr int64_t mass_numel = 32;

// Buffer whose values this rank's knowledge of the others follows.
constexpr size_t bearer = 0;

}  // namespace

Mixing::Mixing(Group group, Topology topology, double timeout_seconds)
    : group_(std::move(group)),
      whole_(std::move(topology)),
      now_{.members = std::vector<int>(group_.size()), .topology = whole_, .number = group_.rank()},
      timeout_seconds_(timeout_seconds),
      admission_(group_),
      known_(group_.size(), group_.rank()) {
  std::iota(now_.members.begin(), now_.members.end(), 0);
  if (shoal::joins_again(group_)) {
    newcomer_ = std::make_unique<Newcomer>(group_);
  } else {
    agree(group_, whole_);
  }
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
    copies_.emplace_back(buffer, *compressed, whole_.period());
    buffer = {copies_.back().message_bytes(), at::kByte};
  }
  if (!shown.empty())
    shown[bearer].numel += known_.message_bytes() / static_cast<int64_t>(c10::elementSize(shown[bearer].dtype));
  shown_ = std::move(shown);
  channel_ =
      newcomer_ ? join_gossip_channel(group_, shown_, newcomer_->addresses()) : open_gossip_channel(group_, shown_);
}

void Mixing::all_hold(size_t buffer, const at::Tensor& values) {
  if (!copies_.empty()) copies_[buffer].all_hold(values, version_);
}

GossipChannel::Limit Mixing::limit() const {
  return wait_of(timeout_seconds_);
}

void Mixing::count(int64_t version, ExchangeStatistics& statistics) const {
  auto& kind = version == version_ ? statistics.exchanged : version > version_ ? statistics.newer : statistics.older;
  ++kind;
}

Reading Mixing::read(size_t buffer, int rank, const GossipChannel::Use& use) {
  std::vector<std::byte> news(buffer == bearer ? known_.message_bytes() : 0);
  const auto reading = channel_->read(buffer, version_, rank, limit(), [&](const at::Tensor& values) {
    use(values);
    const auto* end = static_cast<const std::byte*>(values.data_ptr()) + values.nbytes();
    std::copy(end - news.size(), end, news.begin());
  });
  if (reading.arrival == Arrival::here && !news.empty()) known_.take(news.data());
  return reading;
}

double Mixing::mean_weight(double own) const {
  const auto ranks = static_cast<double>(now_.members.size());
  if (ranks == 1) return own;
  // The mean is at least this rank's share of it, whatever is known of the other ranks.
  return std::max(known_.mean_weight(now_.members).value_or(own), own / ranks);
}

Mixing::Gathered Mixing::gather_differences(size_t buffer) {
  auto& copies = copies_[buffer];
  Gathered result;
  for (const auto& [number, weight] : round().sources(number())) {
    at::Tensor message;
    const auto [arrival, version] =
        read(buffer, now_.members[number], [&](const at::Tensor& values) { message = values.clone(); });
    // A version ahead or behind may be of another round, which has other readers.
    if (arrival != Arrival::here || (version - version_) % topology().period() != 0) {
      ++statistics_.skipped;
      continue;
    }
    copies.take(now_.members[number], version, message);
    if (!copies.knows(now_.members[number], version_)) {
      ++statistics_.skipped;
      continue;
    }
    count(version, statistics_);
    if (!result.others.defined()) result.others = others_[buffer].zero_();
    copies.add_difference(now_.members[number], version_, weight, result.others);
  }
  return result;
}

Mixing::Gathered Mixing::gather(size_t buffer) {
  if (version_ == 0) return {};
  RECORD_USER_SCOPE("shoal::mix");
  const TimedScope scope(timeline_of(group_), "mix", version_);
  if (!copies_.empty()) return gather_differences(buffer);
  std::set<int> torn;
  while (true) {
    auto counted = statistics_;
    Gathered result{.own = round().self(number())};
    double mass = result.own * mass_[buffer];
    bool again = false;
    for (const auto& [number, weight] : round().sources(number())) {
      const int rank = now_.members[number];
      const auto add = [&, weight = weight](const at::Tensor& shown) {
        const auto values = shown.narrow(0, 0, others_[buffer].numel());
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
      const auto [arrival, version] = torn.count(rank) > 0 ? Reading{} : read(buffer, rank, add);
      if (arrival == Arrival::torn) torn.insert(rank);
      // Over sockets, news of a rank that left may be late; all ranks leave it out from the same step.
      if (arrival == Arrival::gone) remove_lost({rank});
      if (arrival == Arrival::torn || arrival == Arrival::gone) {
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
    // Values are stored divided by their weight: x / w, of which this rank keeps W_ii w.
    if (result.others.defined()) {
      mass += result.others[buffers_[buffer].numel].item<double>();
      result.others = result.others.narrow(0, 0, buffers_[buffer].numel).div_(mass);
    }
    result.own *= mass_[buffer] / mass;
    mass_[buffer] = mass;
    return result;
  }
}

// A neighbour that overwrites its values after a timeout leaves some newer values in the mean.
bool Mixing::mix_into(size_t buffer, const at::Tensor& values) {
  if (version_ == 0 || pushes() || !copies_.empty() || shown_[buffer].dtype != values.scalar_type()) return false;
  const auto& sources = round().sources(number());
  if (sources.size() != 1) return false;
  RECORD_USER_SCOPE("shoal::mix");
  const TimedScope scope(timeline_of(group_), "mix", version_);
  const auto [neighbour, weight] = sources.front();
  const int rank = now_.members[neighbour];
  const auto [arrival, version] = read(buffer, rank, [&, weight = weight](const at::Tensor& theirs) {
    at::Tensor(values).lerp_(theirs.narrow(0, 0, values.numel()).to(values.device()), weight);
  });
  if (arrival == Arrival::gone) {
    remove_lost({rank});
    return mix_into(buffer, values);
  }
  if (arrival == Arrival::here || arrival == Arrival::torn) {
    count(version, statistics_);
  } else {
    ++statistics_.skipped;
  }
  return true;
}

void Mixing::show(size_t buffer, const std::function<void(const at::Tensor&, double)>& write) {
  RECORD_USER_SCOPE("shoal::show");
  const TimedScope scope(timeline_of(group_), "show", version_);
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
  if (buffer == bearer)
    known_.write(static_cast<std::byte*>(draft.data_ptr()) + draft.nbytes() - known_.message_bytes());
  const auto& party = next_ ? *next_ : now_;
  std::vector<int> readers;
  for (const int number : party.topology.round(version_ + 1).targets(party.number)) {
    readers.push_back(party.members[number]);
  }
  channel_->publish(buffer, version_ + 1, readers);
}

void Mixing::average(const Group& group, size_t buffer, at::Tensor& values, const Label& label) {
  if (!pushes()) return group.all_reduce(values, ReduceOp::avg, label).wait();
  auto mass = at::full({1}, mass_[buffer], at::kDouble);
  group.all_reduce(mass, ReduceOp::sum, label).wait();
  group.all_reduce(values.mul_(mass_[buffer] / mass.item<double>()), ReduceOp::sum, label).wait();
  mass_[buffer] = 1;
}

}  // namespace shoal
