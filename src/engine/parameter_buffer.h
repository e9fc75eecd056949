#pragma once
// Parameters that live in one flat memory, of which every rank owns a part.

#include <vector>

#include "shoal/comm/group.h"
#include "shoal/layout/flat_layout.h"

namespace shoal {

// Parameters of one dtype and device. Each rank owns a range of the memory and alone writes it; every rank has all of
// it, once per host where ranks share memory. The tensors keep their identity: only their memory is replaced.
//
// A rank writes its range only when no rank reads the previous values any more: after a collective that a rank enters
// when its backward is done with them.
class ParameterBuffer {
 public:
  // Moves the parameters into the buffer; what the owner of a range holds counts. Collective.
  ParameterBuffer(const Group& group, std::vector<at::Tensor> parameters, FlatLayout layout, std::vector<Range> owners,
                  const OnceBufferOptions& options, const Label& label);
  // Gives the parameters memory of their own again, with their present values.
  ~ParameterBuffer();
  ParameterBuffer(const ParameterBuffer&) = delete;
  ParameterBuffer& operator=(const ParameterBuffer&) = delete;

  const FlatLayout& layout() const { return layout_; }
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  const std::vector<Range>& owners() const { return memory_.owners(); }
  at::Tensor part(const Range& range) const { return memory_.tensor().narrow(0, range.begin, range.size()); }
  bool shared() const { return memory_.shared(); }

  // This rank has written its range. Collective, does not wait.
  void publish(const Label& label);
  // Until the last published values of all ranks are in place.
  void wait(const Label& label);

 private:
  std::vector<at::Tensor> parameters_;
  FlatLayout layout_;
  OnceBuffer memory_;
  int64_t version_ = 0;
};

}  // namespace shoal
