#include "strategy/decentralized/public_copies.h"

#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "engine/hooks/int8_format.h"
#include "engine/hooks/selection.h"

namespace shoal {
namespace {

constexpr int64_t refreshes = 64;  // number of a round's messages that together carry a whole copy
constexpr int64_t block = 256;     // number of elements that share a scale

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

PublicCopies::PublicCopies(const GossipBuffer& buffer, const CompressedExchange& how, int64_t rounds)
    : numel_(buffer.numel),
      kept_(static_cast<int64_t>(std::ceil(how.top_k.value_or(1) * static_cast<double>(buffer.numel)))),
      how_(how),
      refreshed_numel_(std::min(numel_, round_up((numel_ + refreshes - 1) / refreshes, 32))),
      // Aligned, because the difference follows, in any dtype.
      refreshed_bytes_(round_up(refreshed_numel_ * static_cast<int64_t>(c10::elementSize(buffer.dtype)), 128)),
      difference_bytes_(compressed(at::zeros({numel_}, at::TensorOptions(buffer.dtype))).numel()),
      options_(buffer.dtype) {
  start_afresh(rounds);
}

PublicCopies::Copy PublicCopies::zero() const {
  return {at::zeros({numel_}, options_)};
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
  const auto packed = message.narrow(0, header_bytes + refreshed_bytes_, difference_bytes_);
  if (!how_.top_k) {
    copy.add_(Int8Format(numel_, block).decode(packed.unsqueeze(0))[0].narrow(0, 0, numel_));
    return;
  }
  const auto selection = Selection::unpack(packed, kept_, at::kFloat);
  copy.index_add_(0, selection.positions.to(at::kLong), selection.values.to(copy.scalar_type()));
}

at::Tensor PublicCopies::refreshed(const at::Tensor& copy, int64_t version, int64_t rounds) const {
  const auto turn = version / rounds % refreshes;
  return copy.narrow(0, std::min(turn * refreshed_numel_, numel_ - refreshed_numel_), refreshed_numel_);
}

void PublicCopies::write(int64_t version, const at::Tensor& values, const at::Tensor& message) {
  auto& own = own_[round_of(version)];
  auto* header = message.data_ptr<uint8_t>();
  const int64_t facts[] = {rounds(), own.version};
  std::memcpy(header, facts, sizeof facts);
  message.narrow(0, header_bytes + refreshed_bytes_, difference_bytes_).copy_(compressed(values - own.values));
  add_compressed(own.values, message);
  const auto bytes = refreshed(own.values, version, rounds()).view(at::kByte);
  message.narrow(0, header_bytes, bytes.numel()).copy_(bytes);
  own.version = version;
}

void PublicCopies::take(int rank, int64_t version, const at::Tensor& message) {
  auto& newest = newest_[rank];
  if (version <= newest) return;
  newest = version;
  int64_t facts[2];
  std::memcpy(facts, message.data_ptr<uint8_t>(), sizeof facts);
  const auto [rounds, before] = facts;
  if (rounds < 1) return;
  const std::tuple key(rounds, version % rounds, rank);
  auto found = theirs_.find(key);
  if (found == theirs_.end()) {
    auto start = zero();
    if (beginning_) start = {beginning_->values.clone(), beginning_->version};
    found = theirs_.emplace(key, std::move(start)).first;
  }
  auto& copy = found->second;
  if (before == nothing) copy = zero();
  if (copy.version != before) copy.unknown = refreshes;
  copy.version = version;
  copy.unknown = std::max<int64_t>(0, copy.unknown - 1);
  add_compressed(copy.values, message);
  const auto part = refreshed(copy.values, version, rounds);
  part.copy_(message.narrow(0, header_bytes, static_cast<int64_t>(part.nbytes())).view(part.scalar_type()));
}

bool PublicCopies::knows(int rank, int64_t version) const {
  const auto found = theirs_.find({rounds(), round_of(version), rank});
  return found != theirs_.end() && found->second.unknown == 0 && found->second.version == newest_.at(rank);
}

void PublicCopies::add_difference(int rank, int64_t version, double weight, at::Tensor& sum) const {
  const auto round = round_of(version);
  const double rate = weight * how_.rate.value_or(how_.top_k ? CompressedExchange::rate_of_top_k : 1);
  sum.add_(theirs_.at({rounds(), round, rank}).values, rate).sub_(own_[round].values, rate);
}

void PublicCopies::all_hold(const at::Tensor& values, int64_t version) {
  for (auto& own : own_) own = {values.clone(), version};
  for (auto& [key, copy] : theirs_) copy = {values.clone(), version};
  beginning_ = Copy{values.clone(), version};
  newest_.clear();
}

std::vector<at::Tensor> PublicCopies::own() const {
  std::vector<at::Tensor> list;
  for (const auto& copy : own_) list.push_back(copy.values);
  return list;
}

void PublicCopies::resume(const std::vector<at::Tensor>& own, int64_t version) {
  own_.clear();
  for (const auto& values : own) own_.push_back({values.clone(), version});
  theirs_.clear();
  newest_.clear();
  beginning_.reset();
}

void PublicCopies::set_copy(int rank, int64_t round, const at::Tensor& values, int64_t version) {
  theirs_[{rounds(), round, rank}] = {values.clone(), version};
  newest_[rank] = version;
}

void PublicCopies::forget(int rank) {
  std::erase_if(theirs_, [&](const auto& entry) { return std::get<2>(entry.first) == rank; });
  newest_.erase(rank);
}

// Ranks that noticed the change earlier send messages of the new rounds already; those are kept.
void PublicCopies::start_afresh(int64_t rounds) {
  own_.clear();
  for (int64_t round = 0; round < rounds; ++round) own_.push_back(zero());
  std::erase_if(theirs_, [&](const auto& entry) { return std::get<0>(entry.first) != rounds; });
  beginning_.reset();
}

}  // namespace shoal
