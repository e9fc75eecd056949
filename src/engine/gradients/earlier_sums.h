#pragma once
// Sums of gradients that earlier steps have left, and what has become of them since.

#include <string>
#include <vector>

#include "engine/gradients/stand_ins.h"
#include "engine/reducer/bucket_set.h"

namespace shoal {

// After a reduction that does not give every rank everything, the sum of a gradient is
//   whole   in grad(), on a rank that keeps all of it there
//   part    in its bucket (Bucket::kept), as far as this rank keeps it; in grad() is a stand-in
// The next step adds to it what comes, but ranks must not add it up again: it is set aside before a gradient comes in
// its place, and added when the new sum is there. Until then it is its owner's to drop or to zero, by what is done to
// grad(): undefined, or another tensor, means that the sum is gone; zeroed means that it is zero.
class EarlierSums {
 public:
  // References stay. about: of a stand-in, after the parameter's name.
  EarlierSums(const std::vector<Gradient>& gradients, const BucketSet& buckets, std::string about);

  // Buckets are others. Only between steps, and where no part of a sum lies in a bucket.
  void start();

  // What has been done to grad() counts. Before anything else of a backward or an update.
  void adopt_changes();
  // Before a gradient comes, or its place in the bucket is written.
  void set_aside(size_t gradient);
  // A gradient has been added on this rank alone.
  void added(size_t gradient);
  // Until the next adopt_changes() grad() does not show what has been added, which lies in its place in the bucket, but
  // a stand-in: this rank's own gradient would be taken for the sum. It is its owner's to drop or to zero like a sum.
  void hide(size_t gradient);
  // Sums that were set aside are where they were; nothing has come in their place that counts.
  void put_back();
  void drop(size_t gradient);
  void drop_all();

  // The step's sum of bucket `index` is there: adds what was set aside, and leaves stand-ins for sums that are of
  // something; used: by gradient.
  void leave_parts(size_t index, const std::vector<bool>& used);
  // The same where this rank keeps the whole, for one gradient, whose new sum is `sum`. False: there is no sum.
  bool leave_whole(size_t gradient, at::Tensor sum, bool used);
  // That sum lies in grad() but not in the bucket: it is sparse, or a copy in another dtype.
  void leave_apart(size_t gradient);
  // The same for a sparse gradient; sum: undefined if no rank has used it.
  void leave_sparse(size_t gradient, const at::Tensor& sum);

  // A sum, for another object that takes this one's place; it may be `aside` while other gradients come.
  struct Left {
    bool exists = false;
    at::Tensor aside{};  // on the rank that keeps the whole
  };
  Left left(size_t gradient) const { return {where_[gradient] != Where::none, whole_[gradient]}; }
  // There is that sum; `here`: this rank keeps all of it, aside or in grad().
  void resume(size_t gradient, const Left& left, bool here);
  // Sums that are not complete yet: kept until the next that are.
  void hold(size_t index, const std::vector<bool>& used);
  at::Tensor take_held(size_t index) { return std::exchange(held_[index], {}); }
  bool holds_any() const;
  void forget_held() { held_.assign(buckets_.size(), {}); }

  // Whether what lies in grad() is the sum, or stands for it.
  bool is_sum(size_t gradient) const { return where_[gradient] != Where::none && !aside_[gradient]; }
  // Whether grad() is a stand-in.
  bool stands_in(size_t gradient) const { return stand_ins_.present(gradient); }
  // Whether there is a part of a sum, and whether it counts as zero whatever lies in the bucket.
  bool has_part(size_t gradient) const { return where_[gradient] == Where::part; }
  // Whether put_back() or write_zeroes() has something to write.
  bool unsettled() const;
  // Writes the zeroes of sums that count as zero.
  void write_zeroes();
  // A gradient that the caller has set is the sum from now on, as far as this rank keeps it.
  void adopt(size_t gradient);
  // This rank's elements of a gradient in its bucket's kept sum `kept` (or a copy of that), one-dimensional.
  at::Tensor own(size_t gradient, const at::Tensor& kept) const;

  // The sums in buckets are of no use any more (or, with `add_only`, as soon as anything is added to them), until they
  // are dropped or zeroed. why: the end of a sentence about the gradient.
  void spoil(std::string why, bool add_only);
  // UsageError where one is of no use.
  void require_usable() const;
  // UsageError where one could not be added to.
  void require_addable() const;

 private:
  enum class Where { none, whole, part };
  enum class Spoilt { no, for_adding, for_use };

  const at::Tensor& grad(size_t gradient) const { return gradients_[gradient].parameter.grad(); }
  at::Tensor& mutable_grad(size_t gradient) { return at::Tensor(gradients_[gradient].parameter).mutable_grad(); }
  const Bucket& bucket_of(size_t gradient) const { return buckets_.of(gradient); }
  const Place& place(size_t gradient) const { return buckets_.places()[gradient]; }
  bool is_left(size_t gradient) const;
  void set_bucket_aside(size_t index);
  void zero(size_t gradient);
  void show_hidden();
  [[noreturn]] void refuse(size_t gradient) const;

  const std::vector<Gradient>& gradients_;
  const BucketSet& buckets_;
  StandIns stand_ins_;

  // By gradient.
  std::vector<Where> where_;
  std::vector<bool> aside_;
  std::vector<bool> zero_;         // a part, not set aside
  std::vector<bool> nonzero_;      // what has come while the sum is aside
  std::vector<at::Tensor> whole_;  // set aside
  // Sums in grad() that do not lie in buckets: sparse ones, and copies in another dtype. Their memory is not held, but no
  // other tensor gets their address.
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> apart_;
  std::vector<bool> hidden_;
  // By bucket: what is set aside of Bucket::kept (undefined: zero), and what is held.
  std::vector<bool> bucket_aside_;
  std::vector<at::Tensor> parts_;
  std::vector<at::Tensor> held_;

  std::vector<Spoilt> spoilt_;  // by gradient
  std::string why_spoilt_;
};

}  // namespace shoal
