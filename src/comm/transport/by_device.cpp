#include "comm/transport/by_device.h"

#include <algorithm>
#include <utility>

namespace shoal {
namespace {

class ByDevice : public Transport {
 public:
  ByDevice(std::string name, std::shared_ptr<Transport> device_side, std::shared_ptr<Transport> cpu_side)
      : name_(std::move(name)), device_side_(std::move(device_side)), cpu_side_(std::move(cpu_side)) {}

  std::string name() const override { return name_; }
  bool joins_threads() const override { return device_side_->joins_threads() || cpu_side_->joins_threads(); }
  bool checks_agreement() const override { return device_side_->checks_agreement() && cpu_side_->checks_agreement(); }

  std::unique_ptr<TransportWork> issue(const Call& call) override {
    const auto on_device = [](const at::Tensor& tensor) { return !tensor.is_cpu(); };
    const bool any = std::any_of(call.inputs.begin(), call.inputs.end(), on_device) ||
                     std::any_of(call.outputs.begin(), call.outputs.end(), on_device);
    return (any ? device_side_ : cpu_side_)->issue(call);
  }

  at::Tensor allocate(int64_t numel, const at::TensorOptions& options) override {
    return (options.device().is_cpu() ? cpu_side_ : device_side_)->allocate(numel, options);
  }

  void await_readers() override {
    device_side_->await_readers();
    cpu_side_->await_readers();
  }
  void give_up(const std::string& why) override {
    device_side_->give_up(why);
    cpu_side_->give_up(why);
  }
  void given_up_by_all() override {
    device_side_->given_up_by_all();
    cpu_side_->given_up_by_all();
  }

 private:
  std::string name_;
  std::shared_ptr<Transport> device_side_;
  std::shared_ptr<Transport> cpu_side_;
};

}  // namespace

std::shared_ptr<Transport> make_transport_by_device(std::string name, std::shared_ptr<Transport> device_side,
                                                    std::shared_ptr<Transport> cpu_side) {
  return std::make_shared<ByDevice>(std::move(name), std::move(device_side), std::move(cpu_side));
}

}  // namespace shoal
