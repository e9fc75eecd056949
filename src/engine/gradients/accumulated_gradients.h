#pragma once
// Gradients that earlier backwards have left: this rank's own, which no step has reduced yet, and sums.

#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/gradients/earlier_sums.h"

namespace shoal {

// This rank's own lie in grad(), and in their place in the bucket where that is wanted. They count for the step that
// follows, unless they are dropped before; what a step has taken is forgotten.
class AccumulatedGradients {
 public:
  struct Options {
    bool in_buckets = true;    // grad() lies in the bucket
    std::string about_sums{};  // see EarlierSums
  };

  // References stay.
  AccumulatedGradients(const std::vector<Gradient>& gradients, BucketSet& buckets, const Options& options);
  ~AccumulatedGradients() { unmark(); }
  AccumulatedGradients(const AccumulatedGradients&) = delete;
  AccumulatedGradients& operator=(const AccumulatedGradients&) = delete;

  EarlierSums& sums() { return sums_; }
  const EarlierSums& sums() const { return sums_; }

  // Buckets have been built anew; `before`: see BucketSet::build().
  void move_to(const std::vector<Bucket>& before);
  // What has been done to grad() counts: gradients that were dropped are not of the next step.
  void adopt_changes();

  // By gradient: one was added; backward reached it, if only with an undefined gradient.
  const std::vector<bool>& used() const { return own_.used; }
  const std::vector<bool>& came() const { return own_.came; }
  // Of their backwards, where they were given any.
  const std::optional<double>& weight() const { return own_.weight; }
  void add_weight(double weight) { own_.weight = own_.weight.value_or(0.0) + weight; }

  // A backward has reached a gradient; one that is local.
  void note_arrival(size_t gradient);
  void note_local(size_t gradient);
  // What a caller has set counts as its backwards' own.
  void note_set();
  // After a local backward: grad() shows none of them (EarlierSums::hide).
  void hide();
  // Writes this rank's part of a mean to its place in the bucket, whether it has one or not. Returns what lay there if
  // that is neither this rank's own nor a sum.
  at::Tensor hand_over(size_t gradient, int ranks);
  // In its place in the bucket, where it may be changed. Zeros where there is none; either way it counts as used.
  at::Tensor local(size_t gradient);
  // A step has taken them, or they are given up.
  void forget() { own_ = Own(gradients_.size()); }
  // They are local no more (local_gradients.h).
  void unmark();

  // Sums are complete and of use, and what was set in grad() is one; see Reducer::prepare_sums.
  void prepare_sums(const std::string& who, const std::function<void()>& before_writing);

  // For another object that takes this one's place. By parameter.
  struct Left {
    struct Sum {
      EarlierSums::Left sum{};
      bool used = false;
    };
    std::unordered_map<const c10::TensorImpl*, Sum> gradients{};
    std::optional<double> weight{};
  };
  Left left() const;
  // keeps_whole: whether this rank keeps the whole sum of a bucket.
  void resume(const Left& left, const std::function<bool(const Bucket&)>& keeps_whole);

 private:
  struct Own {
    explicit Own(size_t gradients) : used(gradients), came(gradients) {}
    std::vector<bool> used;
    std::vector<bool> came;
    std::optional<double> weight{};
  };

  at::Tensor& mutable_grad(size_t gradient) { return at::Tensor(gradients_[gradient].parameter).mutable_grad(); }
  void lay_in_bucket(size_t gradient);
  void mark(size_t gradient);

  const std::vector<Gradient>& gradients_;
  BucketSet& buckets_;
  bool in_buckets_;
  Own own_;
  EarlierSums sums_;
  bool marked_ = false;
};

}  // namespace shoal
