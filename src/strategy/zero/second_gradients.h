#pragma once
// Under ShardedDataParallel: gradients of parameters of which this rank is the second owner.

#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "engine/reducer/reducer.h"

namespace shoal {

class SecondCopies;

// Owners send their sum of a bucket in backward, as soon as it is reduced, which is the second owner's gradient as long
// as nobody changes it. grad() is a tensor without memory there.
class SecondGradients {
 public:
  // reducer: that of the wrapper, whose gradients are dense. Sums are sent until this object ends.
  explicit SecondGradients(std::shared_ptr<Reducer> reducer);
  SecondGradients(const SecondGradients&) = delete;
  SecondGradients& operator=(const SecondGradients&) = delete;

  // Whether the wrapper reduces its gradient.
  bool has(const at::Tensor& parameter) const { return reduced_.contains(parameter.unsafeGetTensorImpl()); }
  // After the last reduction; undefined: there is none. parameter: one of which this rank is the second owner, and
  // has().
  at::Tensor of(const at::Tensor& parameter);
  // They are as the owners have them in grad() at present. owners: by parameter, its first owner; second: by rank, the
  // second owner of what it owns. Collective.
  void send_again(const std::vector<at::Tensor>& parameters, const std::vector<int>& owners,
                  const std::vector<int>& second);
  // What there is of each gradient of the wrapper, in grad() or behind the tensor without memory.
  std::vector<EarlierSums::Remains> remains() const;

 private:
  void take_copies();

  std::shared_ptr<Reducer> reducer_;
  std::shared_ptr<SecondCopies> copies_;
  std::unordered_set<const c10::TensorImpl*> reduced_;
  int64_t taken_at_ = -1;  // reductions then
  std::unordered_map<const c10::TensorImpl*, at::Tensor> gradients_;
};

}  // namespace shoal
