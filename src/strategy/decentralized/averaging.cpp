#include "strategy/decentralized/averaging.h"

namespace shoal {
namespace {

at::Tensor values_of(const GossipBucket& bucket) {
  auto flat = at::zeros({bucket.numel()}, at::TensorOptions(bucket.dtype()));
  bucket.write_to(flat);
  return flat;
}

}  // namespace

void average(Mixing& mixing, std::vector<GossipBucket>& buckets, const Label& label) {
  const auto& group = mixing.remaining();
  std::vector<at::Tensor> means;
  auto newest = at::full({1}, mixing.version(), at::kLong);
  group.all_reduce(newest, ReduceOp::max, label).wait();
  for (size_t i = 0; i < buckets.size(); ++i) {
    buckets[i].adopt();
    auto& mean = means.emplace_back(values_of(buckets[i]));
    mixing.average(group, i, mean, label);
    buckets[i].read_from(mean);
  }
  // Values that were shown before must not be mixed in.
  mixing.restart(newest.item<int64_t>());
  for (size_t i = 0; i < buckets.size(); ++i) {
    mixing.all_hold(i, std::exchange(means[i], {}));
    mixing.show(i, [&](const at::Tensor& flat, double) { buckets[i].write_to(flat); });
  }
  mixing.end_step();
}

void average(const Group& group, std::vector<GossipBucket>& buckets, const Label& label) {
  for (auto& bucket : buckets) {
    const auto mean = values_of(bucket);
    group.all_reduce(mean, ReduceOp::avg, label).wait();
    bucket.read_from(mean);
  }
}

double squared_distance(const Group& group, std::vector<GossipBucket>& buckets, const Label& label) {
  auto squares = at::zeros({1}, at::kDouble);
  for (auto& bucket : buckets) {
    bucket.adopt();
    const auto own = values_of(bucket).to(at::kDouble);
    auto mean = own.clone();
    group.all_reduce(mean, ReduceOp::avg, label).wait();
    squares += (own - mean).pow_(2).sum();
  }
  group.all_reduce(squares, ReduceOp::avg, label).wait();
  return squares.item<double>();
}

}  // namespace shoal
