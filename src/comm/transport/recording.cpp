#include "comm/transport/recording.h"

namespace shoal {
namespace {

class RecordedWork : public TransportWork {
 public:
  RecordedWork(std::unique_ptr<TransportWork> inner, std::shared_ptr<CallLog> log, size_t index)
      : inner_(std::move(inner)), log_(std::move(log)), index_(index) {}

  bool done() override { return inner_->done(); }
  bool wait_for(Milliseconds slice, Milliseconds remaining) override {
    const bool finished = inner_->wait_for(slice, remaining);
    if (finished) log_->finish(index_);
    return finished;
  }
  std::string waits_for() override { return inner_->waits_for(); }
  bool needs(int world_rank) override { return inner_->needs(world_rank); }
  int source() const override { return inner_->source(); }

 private:
  std::unique_ptr<TransportWork> inner_;
  std::shared_ptr<CallLog> log_;
  size_t index_;
};

class RecordingTransport : public Transport {
 public:
  RecordingTransport(std::shared_ptr<Transport> inner, std::shared_ptr<CallLog> log, std::string group)
      : inner_(std::move(inner)), log_(std::move(log)), group_(std::move(group)) {}

  std::string name() const override { return inner_->name(); }
  at::Tensor allocate(int64_t numel, const at::TensorOptions& options) override {
    return inner_->allocate(numel, options);
  }

  std::unique_ptr<TransportWork> issue(const Call& call) override {
    const auto& tensors = call.inputs.empty() ? call.outputs : call.inputs;
    const auto dtype = tensors.empty() ? c10::ScalarType::Undefined : tensors.front().scalar_type();
    const auto now = Clock::now();
    const auto index = log_->add({call.op, call.reduce, dtype, call.bytes(), group_, call.label, now, now});
    return std::make_unique<RecordedWork>(inner_->issue(call), log_, index);
  }

 private:
  std::shared_ptr<Transport> inner_;
  std::shared_ptr<CallLog> log_;
  std::string group_;
};

}  // namespace

std::shared_ptr<Transport> make_recording_transport(std::shared_ptr<Transport> inner, std::shared_ptr<CallLog> log,
                                                    std::string group) {
  return std::make_shared<RecordingTransport>(std::move(inner), std::move(log), std::move(group));
}

}  // namespace shoal
