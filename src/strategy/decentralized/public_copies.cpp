#include "strategy/decentralized/public_copies.h"

#include <torch/utils.h>

#include <algorithm>
#include <cmath>

#include "engine/hooks/int8_format.h"
#include "engine/hooks/selection.h"

namespace shoal {
namespace {

constexpr int64_t refreshes = 64;  // messages of a round until all of a copy has travelled
constexpr int64_t block = 256;     // elements that share a scale
// In a rank's place: what all ranks held when they began, from which copies of others start.
constexpr std::pair<int64_t, int> beginning{-1, -1};

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

PublicCopies::PublicCopies(const GossipBuffer& buffer, const CompressedExchange& how, int64_t rounds)
    : numel_(buffer.numel),
      kept_(static_cast<int64_t>(std::ceil(how.top_k.value_or(1) * static_cast<double>(buffer.numel)))),
      how_(how),
      refreshed_numel_(std::min(numel_, round_up((numel_ + refreshes - 1) / refreshes, 32))),
      // What follows begins where any dtype may.
      refreshed_bytes_(round_up(refreshed_numel_ * static_cast<int64_t>(c10::elementSize(buffer.dtype)), 128)),
      difference_bytes_(compressed(at::zeros({numel_}, at::TensorOptions(buffer.dtype))).numel()) {
  own_.push_back({at::zeros({numel_}, at::TensorOptions(buffer.dtype))});
  set_rounds(rounds);
}

at::Tensor PublicCopies::compressed(const at::Tensor& difference) const {
  if (!how_.top_k) {
    const Int8Format format(numel_, block);
    return format.encode(at::constant_pad_nd(difference, {0, format.columns() - numel_}).unsqueeze(0))[0];
  }
  const auto positions = std::get<1>(at::topk(difference.abs(), kept_, 0, true, /*sorted=*/false));
  return Selection{difference.index_select(0, positions).to(at::kFloat), positions.to(at::kInt)}.packed();
}

void PublicCopies::add_compressed(at::Tensor& copy, const at::Tensor& message) const {
  const auto packed = message.narrow(0, refreshed_bytes_, difference_bytes_);
  if (!how_.top_k) {
    copy.add_(Int8Format(numel_, block).decode(packed.unsqueeze(0))[0].narrow(0, 0, numel_));
    return;
  }
  const auto selection = Selection::unpack(packed, kept_, at::kFloat);
  copy.index_add_(0, selection.positions.to(at::kLong), selection.values.to(copy.scalar_type()));
}

at::Tensor PublicCopies::refreshed(const at::Tensor& copy, int64_t version) const {
  const auto turn = version / static_cast<int64_t>(own_.size()) % refreshes;
  return copy.narrow(0, std::min(turn * refreshed_numel_, numel_ - refreshed_numel_), refreshed_numel_);
}

void PublicCopies::write(int64_t version, const at::Tensor& values, const at::Tensor& message) {
  auto& own = own_[round_of(version)];
  message.narrow(0, refreshed_bytes_, difference_bytes_).copy_(compressed(values - own.values));
  add_compressed(own.values, message);
  const auto bytes = refreshed(own.values, version).view(at::kByte);
  message.narrow(0, 0, bytes.numel()).copy_(bytes);
  own.version = version;
}

void PublicCopies::take(int rank, int64_t version, const at::Tensor& message) {
  const auto round = round_of(version);
  auto found = theirs_.find({round, rank});
  if (found == theirs_.end()) {
    const auto start = theirs_.find(beginning);
    const Copy& from = start == theirs_.end() ? own_[round] : start->second;
    found =
        theirs_.emplace(std::pair(round, rank), Copy{from.values.clone(), start == theirs_.end() ? 0 : from.version})
            .first;
  }
  auto& copy = found->second;
  if (version <= copy.version) return;
  copy.version = version;
  add_compressed(copy.values, message);
  const auto part = refreshed(copy.values, version);
  part.copy_(message.narrow(0, 0, static_cast<int64_t>(part.nbytes())).view(part.scalar_type()));
}

void PublicCopies::add_difference(int rank, int64_t version, double weight, at::Tensor& sum) const {
  const auto round = round_of(version);
  const double rate = weight * how_.rate.value_or(how_.top_k ? CompressedExchange::rate_of_top_k : 1);
  sum.add_(theirs_.at({round, rank}).values, rate).sub_(own_[round].values, rate);
}

void PublicCopies::all_hold(const at::Tensor& values, int64_t version) {
  for (auto& own : own_) own = {values.clone(), version};
  theirs_[beginning] = {};
  for (auto& [key, copy] : theirs_) copy = {values.clone(), version};
}

void PublicCopies::forget(int rank) {
  std::erase_if(theirs_, [&](const auto& entry) { return entry.first.second == rank || entry.first == beginning; });
}

void PublicCopies::set_rounds(int64_t rounds) {
  if (rounds == static_cast<int64_t>(own_.size())) return;
  // Versions belong to other rounds now: neighbours' copies begin anew.
  own_.resize(rounds, own_.front());
  for (auto& own : own_) own.values = own.values.clone();
  theirs_.clear();
}

}  // namespace shoal
