#pragma once
// Distribution of updated parameters to all ranks: in a parameter buffer, in the gradient buffer, or page by page.

#include <memory>
#include <string>
#include <vector>

#include "engine/paging/pager.h"
#include "engine/reducer/exchange.h"
#include "layout/slice.h"

namespace shoal {

// The parameters of one bucket, laid out like its gradients; every rank owns what it keeps of those.
class ParameterGather {
 public:
  virtual ~ParameterGather() = default;
  // This rank's elements of a parameter, one-dimensional, in the order in which they lie in memory.
  virtual at::Tensor elements(const Slice& slice) const = 0;
  // Where their updated values leave from, in the parameters' dtype; may be the same memory.
  virtual at::Tensor outgoing(const Slice& slice) const = 0;
  // This rank's values are in place. Collective, does not wait.
  virtual void publish(const Label& label) = 0;
  // Until the parameters have what all ranks have published.
  virtual void wait(const Label& label) = 0;
  // What operators may only take after wait().
  virtual std::vector<at::Tensor> awaited() const = 0;

  // Parameters, by their numbers in the bucket, that others have replaced or written since; none: nothing to adopt.
  // Cheap in that case. Not collective.
  virtual std::vector<size_t> changed() const = 0;
  // What changed() says of this rank's values of a parameter.
  virtual uint64_t digest(size_t piece) const = 0;
  // The present values of changed() count from now on, each owner's for its range; see ParameterBuffer::adopt.
  // Collective.
  virtual void adopt(const Label& label) = 0;
  // While off, nothing is noticed of writes.
  virtual void notice_writes(bool on) = 0;

  // Whether the other ranks see this rank's elements change as they are written, before publish().
  virtual bool shared() const { return false; }
  // Where the parameters lie in pages: what brings them.
  virtual Pager* pager() const { return nullptr; }
};

// Parameters move to a buffer, once per host where ranks share memory, and are views of it. owners: ranges of the
// layout by rank. Collective.
std::unique_ptr<ParameterGather> gather_in_parameters(const Group& group, std::vector<at::Tensor> parameters,
                                                      const FlatLayout& layout, std::vector<Range> owners,
                                                      const Label& label);

// Parameters keep memory of their own. Updated values are gathered in the bucket's, of which they take the first part
// where gradients are wider, and copied from there. The bucket has equal parts; its gradients are void from publish()
// on, and must not be written before wait().
std::unique_ptr<ParameterGather> gather_in_gradients(const Group& group, std::vector<at::Tensor> parameters,
                                                     const Bucket& bucket);

// Parameters become views of a page; this rank keeps its range of it alone. owners: ranges of the layout by rank, equal
// parts or all of it for one rank. Each rank's present values count for its own range.
std::unique_ptr<ParameterGather> gather_in_pages(std::shared_ptr<Pager> pager, std::vector<at::Tensor> parameters,
                                                 const FlatLayout& layout, const std::vector<Range>& owners, int rank,
                                                 const std::string& name);

}  // namespace shoal
