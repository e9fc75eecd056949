#pragma once
// Distribution of updated parameters to all ranks: in a parameter buffer, in the gradient buffer, or page by page.

#include <memory>
#include <string>
#include <vector>

#include "engine/paging/pager.h"
#include "engine/reducer/gradient_reduction.h"
#include "layout/slice.h"

namespace shoal {

// Parameters of one bucket, in the layout of its gradients; every rank owns the range that it keeps of the gradients.
class ParameterGather {
 public:
  virtual ~ParameterGather() = default;
  // This rank's elements of a parameter, one-dimensional, in memory order.
  virtual at::Tensor elements(const Slice& slice) const = 0;
  // Source from which updated values are published, in the parameters' dtype; may be the same memory.
  virtual at::Tensor outgoing(const Slice& slice) const = 0;
  // Starts to publish this rank's values. Collective, does not wait.
  virtual void publish(const Label& label) = 0;
  // Waits until the parameters have the values published by all ranks.
  virtual void wait(const Label& label) = 0;
  // Tensors that operators may use only after wait().
  virtual std::vector<at::Tensor> awaited() const = 0;

  // Indices within the bucket of parameters that the user has replaced or written; empty: nothing to adopt, which is
  // cheap to find. Not collective.
  virtual std::vector<size_t> changed() const = 0;
  // See ParameterBuffer. Writes to pages stay: a rank alone cannot read them.
  virtual void forget_undone() {}
  // Whether the parameter has other memory than it was given here.
  virtual bool replaced(size_t piece) const = 0;
  // Digest of this rank's values of a parameter in changed().
  virtual uint64_t digest(size_t piece) const = 0;
  // This rank's elements of a parameter in changed(), one-dimensional, as the program has them: in the parameter's
  // present dtype, perhaps a copy.
  virtual at::Tensor current(const Slice& slice) const = 0;
  // Before any rank adopts: see ParameterBuffer.
  virtual void leave_to_holders() {}
  // Adopts the current values of changed(), each owner's for its range; see ParameterBuffer::adopt. What the
  // program still holds of a replaced parameter's former memory keeps its values; elements() may lie elsewhere
  // afterwards. Collective.
  virtual void adopt(const Label& label) = 0;
  // The same without the other ranks, of pages, and of parameters that are whole in each rank's own memory: what the
  // program holds is not looked after.
  virtual void adopt_alone() {}
  // While off, writes are not detected.
  virtual void notice_writes(bool on) = 0;
  // See ParameterBuffer. Parameters in other memory have no private copies.
  virtual void make_private() {}
  virtual void end_private(bool /*keep*/) {}
  virtual void leave_moved() {}

  // For elastic jobs, of pages: elements() has those of these ranges, too, zeros at first, which other ranks own. What
  // is written to the page reaches them.
  virtual void hold(std::vector<Range> /*ranges*/) {}

  // True if other ranks see this rank's elements change as they are written, before publish().
  virtual bool shared() const { return false; }
  // The pager, if the parameters are pages.
  virtual Pager* pager() const { return nullptr; }
};

// Moves the parameters to a buffer, which exists once per host if ranks share memory; the parameters become views of
// it. owners: ranges of the layout by rank. Collective.
std::unique_ptr<ParameterGather> gather_in_parameters(const Group& group, std::vector<at::Tensor> parameters,
                                                      const FlatLayout& layout, std::vector<Range> owners,
                                                      const Label& label);

// Parameters keep their own memory. Updated values are gathered in the bucket's memory (in its first part, if gradients
// are wider) and copied from there. The bucket has equal parts; its gradients are invalid from publish() on, and must
// not be written before wait().
std::unique_ptr<ParameterGather> gather_in_gradients(const Group& group, std::vector<at::Tensor> parameters,
                                                     const Bucket& bucket);

// Turns the parameters into views of a page, of which this rank keeps only its own range. owners: ranges of the layout
// by rank, equal parts or everything for one rank. Each rank's current values count for its own range; unless `filled`,
// they are not read, and elements are zero.
std::unique_ptr<ParameterGather> gather_in_pages(std::shared_ptr<Pager> pager, std::vector<at::Tensor> parameters,
                                                 const FlatLayout& layout, const std::vector<Range>& owners, int rank,
                                                 const std::string& name, bool filled = true);

}  // namespace shoal
