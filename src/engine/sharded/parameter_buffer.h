#pragma once
// Buffer of parameters: one flat tensor of which every rank owns a range.

#include <mutex>
#include <vector>

#include "engine/changes/noticed_writes.h"
#include "engine/changes/operator_watch.h"
#include "engine/changes/parameter_watch.h"
#include "layout/flat_layout.h"
#include "shoal/group.h"

namespace shoal {

// Parameters of one dtype and device in one flat buffer. Each rank owns a range and is the only one that writes it;
// every rank can read all of it. The buffer exists once per host if ranks share memory. The tensors keep their
// identity: only their memory is replaced.
//
// A rank writes its range only after no rank reads the previous values any more: after a collective that every rank
// enters when its backward has finished.
//
// Users may give a parameter other memory (torch::load, set_data), or write it with any operator, also through data(),
// detach() and views. In shared memory, every rank would see such a write and repeat it. The first write therefore
// gives the parameter a private copy on this rank, so that each rank sees its own writes only, as in one process.
// adopt() publishes these values. Operators of the engine itself run under UnwatchedOperators.
//
// PyTorch moves a storage's memory in place where other processes of the program get it (share_memory(), a queue of
// torch.multiprocessing). A parameter stays in such memory, so that they see what they would see of PyTorch: wait()
// copies the values of all ranks there.
class ParameterBuffer : private MemoryUser {
 public:
  // Moves the parameters into the buffer; the owner's values of each range are used. Collective.
  ParameterBuffer(const Group& group, std::vector<at::Tensor> parameters, FlatLayout layout, std::vector<Range> owners,
                  const HostSharedBufferOptions& options, const Label& label);
  // Gives the parameters memory of their own, with their current values.
  ~ParameterBuffer() override;
  ParameterBuffer(const ParameterBuffer&) = delete;
  ParameterBuffer& operator=(const ParameterBuffer&) = delete;

  const FlatLayout& layout() const { return layout_; }
  const std::vector<at::Tensor>& parameters() const { return watch_.parameters(); }
  const std::vector<Range>& owners() const { return memory_.owners(); }
  at::Tensor part(const Range& range) const { return memory_.tensor().narrow(0, range.begin, range.size()); }
  bool shared() const { return memory_.shared(); }
  // Tensors in the buffer that the parameters are bound to.
  const std::vector<at::Tensor>& homes() const { return homes_; }

  // Publishes this rank's range. Collective, does not wait.
  void publish(const Label& label);
  // Waits for the last published values of all ranks.
  void wait(const Label& label);
  // Before publish(), if an optimizer has updated the parameters themselves: takes over this rank's values from memory
  // that was moved.
  void take_moved();
  // Parameters whose memory was moved are in the buffer again, without changed() ones.
  void leave_moved();

  // Leaves the former memory of replaced parameters to a program that still holds it (own = p.data(), to be put back),
  // with a copy of the values, which every rank may overwrite from now on. Not collective.
  void leave_to_holders();
  // Indices of parameters that the user has replaced or written. Not collective.
  std::vector<size_t> changed() const;
  // Forgets writes after which a parameter has the values from before them, to the bit: those of a rank that has shown
  // other weights and put its own back. Call while no rank writes the buffer. Not collective.
  void forget_undone();
  const ParameterWatch& watch() const { return watch_; }
  // A range of the parameter's current values, in the buffer's order and the parameter's present dtype.
  at::Tensor current(size_t piece, const Range& elements) const;
  // Adopts the current values of changed(), each owner's for its range; the parameters are views of the buffer again.
  // Shapes must be unchanged; another dtype is converted. Collective; with the same parameters on all ranks, none of
  // which reads them meanwhile.
  void adopt(const Label& label);
  // The same of memory that is this rank's alone, without the other ranks: what the program holds is not looked after.
  void adopt_alone();
  // While off, writes are not detected. In shared memory they go to private copies all the same.
  void notice_writes(bool on) { writes_.notice(on); }
  // Gives every parameter its private copy now, so that writes past the operators (data_ptr) stay on this rank, too.
  void make_private();
  // Ends the private copies: the parameters are in the buffer again. keep: this rank's range takes its values from them
  // first, while no rank reads the buffer; else they are dropped.
  void end_private(bool keep);

 private:
  void before_write(std::string_view op, c10::StorageImpl* storage) override;
  void make_private(size_t piece);
  // Whether the parameter's place was moved to other memory in place.
  bool moved(size_t piece) const { return homes_[piece].storage().data() != places_[piece]; }
  // This rank's part of the buffer takes the values of the parameter's place.
  void take_own(size_t piece);
  void refresh(size_t piece);
  void set_place(size_t piece, const at::Tensor& memory);
  // The parameters are views of the buffer again.
  void bind_all(const std::vector<size_t>& pieces);
  // Binds the parameter to its place in this rank's view of the buffer.
  void bind(size_t piece);
  void point_to_buffer(size_t piece);

  FlatLayout layout_;
  HostSharedBuffer memory_;
  Range own_;
  int64_t version_ = 0;
  std::vector<at::Tensor> homes_;    // one storage each, so that it can point elsewhere for a while
  std::vector<const void*> places_;  // where they were made to point
  ParameterWatch watch_;
  mutable std::mutex mutex_;  // writes_ and private_
  NoticedWrites writes_;
  std::vector<bool> private_;  // the parameter's place is a private copy for now
};

}  // namespace shoal
