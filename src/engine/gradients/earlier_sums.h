#pragma once
// Sums of gradients that earlier steps left, and what the caller did to them since.

#include <string>
#include <vector>

#include "engine/buckets/bucket_set.h"
#include "engine/gradients/stand_ins.h"

namespace shoal {

// a + b, of which one may be sparse and the other dense: the sum is dense then, as autograd's.
inline at::Tensor sum_of(const at::Tensor& a, const at::Tensor& b) {
  return a.is_sparse() && !b.is_sparse() ? b.add(a) : a.add(b);
}

// Where a reduction does not give every rank everything, the sum of a gradient is
//   whole   in grad(), on a rank that keeps all of it there
//   part    in its bucket (Bucket::kept), as far as this rank keeps it; grad() holds a stand-in
// The next step adds its own sum to it. The old sum must not be reduced again, so it is set aside before a new gradient
// takes its place, and added once the new sum is there. Until then the caller drops or zeroes it through grad(): an
// undefined or a different tensor drops the sum, zeroing the tensor zeroes the sum.
class EarlierSums {
 public:
  // The references must outlive this object. about: follows the parameter's name in a stand-in's error.
  EarlierSums(const std::vector<Gradient>& gradients, const BucketSet& buckets, std::string about);

  // Call after buckets were rebuilt: between steps, while no part of a sum lies in a bucket.
  void start();

  // Reads what the caller did to grad(). Call it first in a backward or an update.
  void adopt_changes();
  // Call before a gradient arrives or its place in the bucket is written.
  void set_aside(size_t gradient);
  // Records that a gradient was added on this rank alone.
  void added(size_t gradient);
  // Puts a stand-in into grad() until the next adopt_changes(); the gradient stays in the bucket. Otherwise a caller
  // would take this rank's own gradient for the sum. The stand-in can be dropped and zeroed like a sum.
  void hide(size_t gradient);
  // After a backward that failed, while ranks still sum its buckets: shows what is set aside in grad(), through which
  // the caller drops or zeroes it. Followed by adopt_changes() and put_back().
  void show_aside();
  // Restores the sums that were set aside, after a step that brought none.
  void put_back();
  void drop(size_t gradient);
  void drop_all();

  // The step's sum of bucket `index` has arrived: adds what was set aside, and leaves stand-ins for the sums that
  // exist. used: by gradient.
  void leave_parts(size_t index, const std::vector<bool>& used);
  // The same for one gradient whose whole sum, `sum`, this rank keeps. False: there is no sum.
  bool leave_whole(size_t gradient, at::Tensor sum, bool used);
  // Records that the sum lies in grad() but not in the bucket: it is sparse, or a copy in another dtype.
  void leave_outside_bucket(size_t gradient);
  // The same for a sparse gradient. sum: undefined if no rank used it.
  void leave_sparse(size_t gradient, const at::Tensor& sum);

  // State of a sum, for an object that replaces this one.
  struct Left {
    bool exists = false;
    at::Tensor aside{};  // the whole sum, while other gradients arrive
  };
  Left left(size_t gradient) const { return {where_[gradient] != Where::none, whole_[gradient]}; }
  // Takes a sum over. here: this rank keeps all of it, set aside or in grad().
  void resume(size_t gradient, const Left& left, bool here);
  // Incomplete sums (micro-batches summed within a host): kept, and added to the next complete sum.
  void hold(size_t index, const std::vector<bool>& used);
  at::Tensor take_held(size_t index) { return std::exchange(held_[index], {}); }
  bool holds_any() const;
  void forget_held() { held_.assign(buckets_.size(), {}); }

  // Whether grad() holds the sum or its stand-in.
  bool is_sum(size_t gradient) const { return where_[gradient] != Where::none && !aside_[gradient]; }
  // Whether grad() holds a stand-in.
  bool stands_in(size_t gradient) const { return stand_ins_.present(gradient); }
  // What there is of a gradient between steps, in grad() or behind its stand-in.
  enum class Remains { nothing, zeros, values };
  Remains remains(size_t gradient) const;
  // Leaves that as a sum, for an object that replaces the one that had it and does not have its values: such a sum can
  // only be dropped or zeroed. why: see spoil().
  void leave(size_t gradient, Remains remains, const std::string& why);
  // Whether this rank's bucket holds a part of a sum. After Reducer::prepare_sums() false means that no rank used the
  // gradient, or that it was dropped.
  bool has_part(size_t gradient) const { return where_[gradient] == Where::part; }
  // Whether put_back() or write_zeroes() has anything to write.
  bool unsettled() const;
  // Writes zeros for sums that were zeroed through their stand-in.
  void write_zeroes();
  // Makes a gradient that the caller set the sum, as far as this rank keeps it.
  void adopt(size_t gradient);
  // This rank's elements of a gradient within its bucket's kept sum `kept` (or a copy of that), one-dimensional.
  at::Tensor own(size_t gradient, const at::Tensor& kept) const;

  // Makes the sums in buckets unusable until they are dropped or zeroed; with `add_only`, only for adding. why: ends
  // the error "the gradient of parameter p ...".
  void spoil(std::string why, bool add_only = false);
  // UsageError if a sum is unusable.
  void require_usable() const;
  // UsageError if a sum cannot be added to.
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
  std::vector<bool> zero_;         // a part that counts as zero and is not set aside
  std::vector<bool> nonzero_;      // something was added while the sum is set aside
  std::vector<at::Tensor> whole_;  // sums that are set aside
  // Sums in grad() that do not lie in buckets: sparse ones, and copies in another dtype. Weak: the memory may go, but
  // no other tensor gets the address.
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> outside_buckets_;
  std::vector<bool> hidden_;
  // By bucket: what is set aside of Bucket::kept (undefined: zero), and incomplete sums.
  std::vector<bool> bucket_aside_;
  std::vector<at::Tensor> parts_;
  std::vector<at::Tensor> held_;

  std::vector<Spoilt> spoilt_;  // by gradient
  std::string why_spoilt_;
};

}  // namespace shoal
