#include "cli/train/device.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <utility>

#include "shoal/error.h"

namespace shoal::cli {
namespace {

class FeedOnDevice : public Feed {
 public:
  FeedOnDevice(std::unique_ptr<Feed> feed, const at::Device& device) : feed_(std::move(feed)), device_(device) {}

  data::Batch next(int64_t step, int micro) override {
    auto batch = feed_->next(step, micro);
    return {batch.data.to(device_), batch.target.to(device_)};
  }
  std::optional<int64_t> steps_per_epoch() const override { return feed_->steps_per_epoch(); }
  void begin_epoch(int64_t epoch) override { feed_->begin_epoch(epoch); }
  void prepare(int64_t step) override { feed_->prepare(step); }
  void skip(int64_t steps) override { feed_->skip(steps); }
  std::optional<size_t> samples() const override { return feed_->samples(); }
  std::shared_ptr<data::Dataset> test_data() const override { return feed_->test_data(); }

 private:
  std::unique_ptr<Feed> feed_;
  at::Device device_;
};

}  // namespace

void check_device(const std::string& text) {
  if (text != "cpu" && text != "cuda") throw UsageError(fmt::format("--device {}: cpu or cuda", text));
}

at::Device use_device(const std::string& text, int local_rank) {
  at::Device device(text);
  if (device.is_cpu()) return device;
  const bool knows = c10::impl::hasDeviceGuardImpl(device.type());
  const int count = knows ? c10::impl::VirtualGuardImpl(device.type()).deviceCount() : 0;
  if (count == 0) {
    throw UsageError(
        fmt::format("--device {}: this process sees no GPU; it takes one, and a CUDA build of libtorch", text));
  }
  device.set_index(static_cast<at::DeviceIndex>(local_rank % count));
  c10::impl::VirtualGuardImpl(device.type()).setDevice(device);
  return device;
}

std::unique_ptr<Feed> on_device(std::unique_ptr<Feed> feed, const at::Device& device) {
  if (device.is_cpu()) return feed;
  return std::make_unique<FeedOnDevice>(std::move(feed), device);
}

}  // namespace shoal::cli
