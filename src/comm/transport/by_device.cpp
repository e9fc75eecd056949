#include "comm/transport/by_device.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "comm/transport/staged.h"
#include "shoal/error.h"

namespace shoal {
namespace {

class ByDevice : public Transport {
 public:
  ByDevice(std::string name, std::shared_ptr<Transport> cpu_side, DeviceSide device_side)
      : name_(std::move(name)),
        cpu_side_(std::move(cpu_side)),
        staged_(make_staged_transport(cpu_side_)),
        device_side_(std::move(device_side)) {}

  std::string name() const override { return name_; }
  bool joins_threads() const override {
    return cpu_side_->joins_threads() || (devices_ != nullptr && devices_->joins_threads());
  }
  bool checks_agreement() const override { return !device_side_.make && cpu_side_->checks_agreement(); }
  void await_readers() override { cpu_side_->await_readers(); }
  void give_up(const std::string& why) override {
    cpu_side_->give_up(why);
    if (devices_) devices_->give_up(why);
  }
  void abandon(const Abandoned& why) override {
    cpu_side_->abandon(why);
    if (devices_) devices_->abandon(why);
  }
  void require_not_abandoned() override { cpu_side_->require_not_abandoned(); }
  void given_up_by_all() override {
    cpu_side_->given_up_by_all();
    if (devices_) devices_->given_up_by_all();
  }

  std::optional<std::string> introduction(const Call& call) override {
    if (!is_for_devices(call)) return std::nullopt;
    auto address = device_side_.address(call);
    if (!address_) return address;
    if (*address_ == address) return std::nullopt;
    throw UsageError(
        fmt::format("{}: the tensors are on GPU {}, and those of this rank's earlier collectives in this group "
                    "were on {}; keep one GPU per rank and group, or make a subgroup for the other",
                    call.describe(), address, *address_));
  }

  void introduced(const Call& call, const std::vector<std::string>& addresses) override {
    std::map<std::string, size_t> ranks;
    for (size_t rank = 0; rank < addresses.size(); ++rank) {
      const auto [other, is_first] = ranks.emplace(addresses[rank], rank);
      if (is_first) continue;
      throw UsageError(fmt::format(
          "{}: ranks {} and {} have their tensors on one GPU, {}; NCCL needs a GPU of its own for each rank: move each "
          "rank's module to the device (CUDA, world.local_rank()), or use transport host or tcp, by which ranks may "
          "share a GPU",
          call.describe(), other->second, rank, addresses[rank]));
    }
    address_ = device_side_.address(call);
  }

  std::unique_ptr<TransportWork> issue(const Call& call) override {
    if (!on_device(call)) return cpu_side_->issue(call);
    if (!is_for_devices(call)) return staged_->issue(call);
    if (!devices_) devices_ = device_side_.make();
    return devices_->issue(call);
  }

  at::Tensor allocate(int64_t numel, const at::TensorOptions& options) override {
    return (options.device().is_cpu() ? cpu_side_ : staged_)->allocate(numel, options);
  }

 private:
  bool on_device(const Call& call) const {
    return std::any_of(call.inputs.begin(), call.inputs.end(), device_side_.on_device) ||
           std::any_of(call.outputs.begin(), call.outputs.end(), device_side_.on_device);
  }

  bool is_for_devices(const Call& call) const {
    const bool message = call.op == Op::send || call.op == Op::recv;
    return device_side_.make && !message && on_device(call) && device_side_.takes(call);
  }

  std::string name_;
  std::shared_ptr<Transport> cpu_side_;
  std::shared_ptr<Transport> staged_;
  DeviceSide device_side_;
  std::shared_ptr<Transport> devices_;
  std::optional<std::string> address_;  // of this rank's device, which the others know
};

}  // namespace

std::shared_ptr<Transport> make_transport_by_device(std::string name, std::shared_ptr<Transport> cpu_side,
                                                    DeviceSide device_side) {
  return std::make_shared<ByDevice>(std::move(name), std::move(cpu_side), std::move(device_side));
}

}  // namespace shoal
