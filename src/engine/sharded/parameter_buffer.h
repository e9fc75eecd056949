#pragma once
// Parameters that live in one flat memory, of which every rank owns a part.

#include <atomic>
#include <mutex>
#include <vector>

#include "engine/paging/operator_watch.h"
#include "engine/wrapper/parameter_watch.h"
#include "layout/flat_layout.h"
#include "shoal/group.h"

namespace shoal {

// Parameters of one dtype and device. Each rank owns a range of the memory and alone writes it; every rank has all of
// it, once per host where ranks share memory. The tensors keep their identity: only their memory is replaced.
//
// A rank writes its range only when no rank reads the previous values any more: after a collective that a rank enters
// when its backward is done with them.
//
// Others may give a parameter other memory (torch::load, set_data), or write it with any operator, also through
// data(), detach() and views. Where ranks share the memory a write would be seen, and done again, by every rank; so
// the first one gives the parameter a copy of this rank's own, and what a rank does is seen by itself alone, as in
// one process. adopt() makes such values everybody's. Operators of the engine itself run under UnwatchedOperators.
class ParameterBuffer : private MemoryUser {
 public:
  // Moves the parameters into the buffer; what the owner of a range holds counts. Collective.
  ParameterBuffer(const Group& group, std::vector<at::Tensor> parameters, FlatLayout layout, std::vector<Range> owners,
                  const HostSharedBufferOptions& options, const Label& label);
  // Gives the parameters memory of their own again, with their present values.
  ~ParameterBuffer() override;
  ParameterBuffer(const ParameterBuffer&) = delete;
  ParameterBuffer& operator=(const ParameterBuffer&) = delete;

  const FlatLayout& layout() const { return layout_; }
  const std::vector<at::Tensor>& parameters() const { return watch_.parameters(); }
  const std::vector<Range>& owners() const { return memory_.owners(); }
  at::Tensor part(const Range& range) const { return memory_.tensor().narrow(0, range.begin, range.size()); }
  bool shared() const { return memory_.shared(); }
  // What parameters are bound to, and what operators on them take.
  const std::vector<at::Tensor>& homes() const { return homes_; }

  // This rank has written its range. Collective, does not wait.
  void publish(const Label& label);
  // Until the last published values of all ranks are in place.
  void wait(const Label& label);

  // Parameters that others have replaced or written since. Not collective.
  std::vector<size_t> changed() const;
  const ParameterWatch& watch() const { return watch_; }
  // The present values of changed() count, each owner's for its range, and parameters lie in the buffer again. They
  // have their shapes; another dtype is converted. Collective; the same parameters on all ranks, none of which
  // reads them meanwhile.
  void adopt(const Label& label);
  // While off, writes go to the buffer's memory, unnoticed.
  void notice_writes(bool on) { notices_ = on; }

 private:
  void before_write(std::string_view op, c10::StorageImpl* storage) override;
  // The parameter's place in this rank's view of the memory.
  void bind(size_t piece);

  FlatLayout layout_;
  HostSharedBuffer memory_;
  Range own_;
  int64_t version_ = 0;
  std::vector<at::Tensor> homes_;  // one storage each, so that it can point elsewhere for a while
  ParameterWatch watch_;
  std::atomic<bool> notices_ = true;
  std::atomic<bool> any_written_ = false;
  mutable std::mutex mutex_;  // written_
  std::vector<bool> written_;
};

}  // namespace shoal
