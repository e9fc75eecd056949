#pragma once
// Gradients that earlier backwards accumulated: this rank's own, not reduced yet, and sums of earlier steps.

#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/gradients/backward_weight.h"
#include "engine/gradients/earlier_sums.h"
#include "engine/gradients/shown_gradients.h"
#include "memory/tensor_version.h"
#include "memory/views.h"

namespace shoal {

// This rank's own gradients lie in grad(), and with Options::in_buckets grad() is a view of the bucket. The next step
// reduces them unless they are dropped before; after a step they are forgotten.
class AccumulatedGradients {
 public:
  struct Options {
    bool in_buckets = true;    // grad() is a view of the bucket
    std::string about_sums{};  // see EarlierSums
    bool everywhere = true;    // every rank gets the whole mean
  };

  // The references must outlive this object.
  AccumulatedGradients(const std::vector<Gradient>& gradients, BucketSet& buckets, const Options& options);
  ~AccumulatedGradients() { unmark(); }
  AccumulatedGradients(const AccumulatedGradients&) = delete;
  AccumulatedGradients& operator=(const AccumulatedGradients&) = delete;

  EarlierSums& sums() { return sums_; }
  const EarlierSums& sums() const { return sums_; }

  // Call after buckets were rebuilt. `before`: see BucketSet::build().
  void move_to(std::vector<Bucket> before);
  // Reads what the caller did to grad() since: a gradient that was dropped does not take part in the next step, and
  // what the program keeps of its memory is not overwritten.
  void adopt_changes();

  // By gradient. used: a backward added something. came: a backward reached it, perhaps with an undefined gradient.
  const std::vector<bool>& used() const { return own_.used; }
  const std::vector<bool>& came() const { return own_.came; }
  // Sum of the weights of these backwards; none if they were called without weights, or what they added was dropped or
  // zeroed.
  const std::optional<double>& weight() const { return own_.weight; }
  void set_weight(const std::optional<double>& weight) { own_.weight = weight; }
  void add_weight(double weight) { own_.weight = own_.weight.value_or(0.0) + weight; }
  // Adds the weight of the backward that is under way, if it was given to another wrapper; false if none was.
  bool add_others_weight() {
    if (!others_weight_.take([this](double weight) { add_weight(weight); })) return false;
    if (!own_.weight) own_.weight = others_weight_.spent();
    return true;
  }

  // Call before autograd adds to grad(). UsageError if grad() lies in memory that the program shares with other
  // tensors, which do not get the sums: where these do not reach every rank.
  void note_arriving(size_t gradient);
  // The mean that earlier steps left in grad(), and every rank has. keep_mean(): call before autograd adds to it, where
  // the step's sum may be scaled after the reduction. mean(): what the sum has of it, after the reduction; undefined:
  // nothing. What the program writes to the mean, or puts in its place, is this rank's own, and it is a mean no more.
  void keep_mean(size_t gradient);
  at::Tensor mean(size_t gradient) const;
  void note_mean(size_t gradient);
  bool has_mean(size_t gradient) const { return means_[gradient]; }
  // A backward reached the gradient. note_local(): it did so without synchronising.
  void note_arrival(size_t gradient);
  void note_local(size_t gradient);
  // Treats gradients that the caller set in grad() as accumulated by this rank's backwards.
  void note_set();
  // After a local backward with a weight, before hide(): a backward may give zeros, which the caller has not written.
  void note_values();
  // After a local backward: replaces this rank's own gradients in grad() by stand-ins (EarlierSums::hide).
  void hide();
  // Writes this rank's contribution to the mean, its gradient times `scale` (zeros if it has none), to the gradient's
  // place in the bucket. Returns a copy of what lay there if that was neither this rank's own gradient nor a sum.
  at::Tensor hand_over(size_t gradient, double scale);
  // The gradient's place in the bucket, for writing. Zeros if there is no gradient yet; it counts as used either way.
  at::Tensor local(size_t gradient);
  // Makes grad() the mean, which lies in the bucket, if it is to lie there.
  void leave_mean(size_t gradient, const at::Tensor& view);
  // See ShownGradients. After a local backward (`local`) a grad() of its own keeps its graph, which is right.
  void end_graphs(bool local) {
    if (everywhere_ && (in_buckets_ || !local)) shown_.end_graphs(gradients_);
  }
  // After a step that failed or was abandoned, of which no gradient is valid: grad() is defined where it was before the
  // step, and zero. So it is the same on all ranks, whether a rank's backward reached it or not. in_flight: the
  // bucket's memory is still being summed.
  void give_up(size_t gradient, bool in_flight);
  // The same where sums do not reach every rank: drops what is not an earlier step's sum.
  void drop_own(size_t gradient);
  // Forgets this rank's own gradients, after a step reduced them or they were given up.
  void forget() {
    others_weight_.spend(own_.weight);
    own_ = Own(gradients_.size());
  }
  // Removes the marks of local gradients (local_gradients.h).
  void unmark();

  // Checks that sums are complete and usable, and adopts gradients that the caller set; see Reducer::prepare_sums.
  void prepare_sums(const std::string& who, const std::function<void()>& before_writing);
  // UsageError if a gradient is this rank's own.
  void require_none_local(const std::string& who) const;

  // State for a reducer that replaces this one's, by parameter.
  struct Left {
    struct Sum {
      EarlierSums::Left sum{};
      bool used = false;
      bool has_mean = false;
      at::Tensor mean{};
    };
    std::unordered_map<const c10::TensorImpl*, Sum> gradients{};
    std::optional<double> weight{};
    bool nonzero = false;
  };
  Left left() const;
  // keeps_whole: whether this rank keeps the whole sum of a bucket.
  void resume(const Left& left, const std::function<bool(const Bucket&)>& keeps_whole);

 private:
  struct Own {
    explicit Own(size_t gradients) : used(gradients), came(gradients), had(gradients), means(gradients) {}
    std::vector<bool> used;
    std::vector<bool> came;
    std::vector<bool> had;          // grad() was defined before the first of them
    std::vector<at::Tensor> means;  // see keep_mean()
    std::optional<double> weight{};
    bool nonzero = false;  // after the last local backward with a weight
  };

  at::Tensor& mutable_grad(size_t gradient) { return at::Tensor(gradients_[gradient].parameter).mutable_grad(); }
  bool any_left(const std::function<bool(size_t gradient)>& is_left) const;
  bool has_zeros(size_t gradient) const {
    return !sums_.stands_in(gradient) && is_zero(gradients_[gradient].parameter.grad());
  }
  // Between backwards. Sums are in the parameter's dtype, which optimizers need, though the bucket is in another.
  bool belongs_in_bucket(size_t gradient) const {
    return gradients_[gradient].reduce_dtype ? own_.used[gradient] : in_buckets_;
  }
  // Whether the caller has zeroed what local backwards with a weight gave. Autograd does not count what is written to
  // data().
  bool was_zeroed(size_t gradient) const { return (own_.nonzero || changed(gradient)) && has_zeros(gradient); }
  void lay_in_bucket(size_t gradient);
  void return_moved();
  void leave_what_is_kept(size_t bucket);
  // Whether the program has written to grad(), or replaced it, since note_version().
  bool changed(size_t gradient) const { return !versions_[gradient].is_of(gradients_[gradient].parameter.grad()); }
  void note_version(size_t gradient) { versions_[gradient] = TensorVersion(gradients_[gradient].parameter.grad()); }
  // See ShownGradients.
  void show(size_t gradient, const at::Tensor& view);
  void mark(size_t gradient);

  const std::vector<Gradient>& gradients_;
  BucketSet& buckets_;
  bool in_buckets_;
  bool everywhere_;
  Own own_;
  OuterBackwardWeight others_weight_;
  std::vector<bool> means_;              // by gradient: an earlier step has left a mean in grad()
  std::vector<TensorVersion> versions_;  // by gradient
  EarlierSums sums_;
  ShownGradients shown_;
  bool marked_ = false;
};

}  // namespace shoal
