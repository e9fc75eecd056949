#include <utility>

#include "engine/changes/changed_values.h"
#include "engine/sharded/parameter_buffer.h"
#include "engine/sharded/parameter_gather.h"
#include "memory/views.h"

namespace shoal {
namespace {

class InParameters : public ParameterGather {
 public:
  InParameters(const Group& group, std::vector<at::Tensor> parameters, const FlatLayout& layout,
               std::vector<Range> owners, const Label& label)
      : buffer_(group, std::move(parameters), layout, std::move(owners), HostSharedBufferOptions(), label) {}

  at::Tensor elements(const Slice& slice) const override { return buffer_.part(slice.in_flat); }
  at::Tensor outgoing(const Slice& slice) const override { return elements(slice); }
  void publish(const Label& label) override { buffer_.publish(label); }
  void wait(const Label& label) override { buffer_.wait(label); }
  std::vector<at::Tensor> awaited() const override { return buffer_.homes(); }
  std::vector<size_t> changed() const override { return buffer_.changed(); }
  void forget_undone() override { buffer_.forget_undone(); }
  bool replaced(size_t piece) const override { return !same_view(buffer_.parameters()[piece], buffer_.homes()[piece]); }
  uint64_t digest(size_t piece) const override { return digest_of(buffer_.parameters()[piece]); }
  at::Tensor current(const Slice& slice) const override { return buffer_.current(slice.piece, slice.in_piece); }
  void leave_to_holders() override { buffer_.leave_to_holders(); }
  void adopt(const Label& label) override { buffer_.adopt(label); }
  void adopt_alone() override { buffer_.adopt_alone(); }
  void notice_writes(bool on) override { buffer_.notice_writes(on); }
  void make_private() override { buffer_.make_private(); }
  void end_private(bool keep) override { buffer_.end_private(keep); }
  void leave_moved() override { buffer_.leave_moved(); }
  bool shared() const override { return buffer_.shared(); }

 private:
  ParameterBuffer buffer_;
};

}  // namespace

std::unique_ptr<ParameterGather> gather_in_parameters(const Group& group, std::vector<at::Tensor> parameters,
                                                      const FlatLayout& layout, std::vector<Range> owners,
                                                      const Label& label) {
  return std::make_unique<InParameters>(group, std::move(parameters), layout, std::move(owners), label);
}

}  // namespace shoal
