#pragma once
// Trainings in which a forward, a hook of backward or a collective throws on request.

#include <gtest/gtest.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "shoal/error.h"
#include "tests/support/models.h"
#include "tests/support/training.h"
#include "tests/support/with_transport.h"
#include "tests/support/world.h"

namespace shoal::faults {

// before_gradients: of a backward that has reached the output. below: behind the module's last gradient.
enum class Point { forward, before_gradients, first_gradient, last_gradient, below, collective };

struct Injected : std::runtime_error {
  Injected() : std::runtime_error("injected") {}
};

struct FaultyImpl : test::MlpImpl {
  at::Tensor forward(at::Tensor x) {
    if (fail == Point::forward) throw Injected();
    if (fail == Point::below) {
      x = x.clone().requires_grad_() * 1;
      fail_in_hook(x, Point::below);
    }
    auto y = test::MlpImpl::forward(std::move(x)).pow(2);
    if (fail == Point::before_gradients) fail_in_hook(y, Point::before_gradients);
    fail_in_hook(third->weight, Point::first_gradient);
    fail_in_hook(first->weight, Point::last_gradient);
    return y.mean();
  }
  std::optional<Point> fail;

 private:
  void fail_in_hook(at::Tensor& tensor, Point point) {
    if (hooked || fail != point) return;
    hooked = true;
    tensor.register_hook([this, point](const at::Tensor&) {
      if (fail == point) throw Injected();
    });
  }
  bool hooked = false;
};

// Transport that fails to issue a bucket's reduction on request; the transport below stays intact.
class FaultyTransport : public Transport {
 public:
  explicit FaultyTransport(std::shared_ptr<Transport> inner) : inner_(std::move(inner)) {}
  std::string name() const override { return inner_->name(); }
  at::Tensor allocate(int64_t numel, const at::TensorOptions& options) override {
    return inner_->allocate(numel, options);
  }
  std::unique_ptr<TransportWork> issue(const Call& call) override {
    if (call.label.bucket == bucket && std::exchange(fail, false)) throw Error("injected");
    return inner_->issue(call);
  }
  bool fail = false;
  int64_t bucket = 1;

 private:
  std::shared_ptr<Transport> inner_;
};

struct Trainer {
  explicit Trainer(const std::string& strategy)
      : training(test::Training<FaultyImpl>::make<torch::optim::SGD>(
            strategy, (torch::manual_seed(1), std::make_shared<FaultyImpl>()),
            test::with_transport(test::group(),
                                 [this](std::shared_ptr<Transport> inner) {
                                   return transport = std::make_shared<FaultyTransport>(std::move(inner));
                                 }),
            torch::optim::SGDOptions(0.1).momentum(0.9), {.bucket_mb = 1e-4})),
        model(training.model) {
    if (strategy == "megatron_no_overlap") transport->bucket = 0;  // the only one
  }

  void step(int64_t number) {
    training.zero_grad();
    training.forward(test::batch(test::group().rank(), number)).backward();
    training.step();
  }

  std::shared_ptr<FaultyTransport> transport;
  test::Training<FaultyImpl> training;
  std::shared_ptr<FaultyImpl> model;
};

// The same steps in one process.
inline std::vector<at::Tensor> reference(const std::vector<int64_t>& steps) {
  torch::manual_seed(1);
  FaultyImpl model;
  torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (const auto step : steps) {
    optimizer.zero_grad();
    for (int rank = 0; rank < test::group().size(); ++rank)
      (model.forward(test::batch(rank, step)) / test::group().size()).backward();
    optimizer.step();
  }
  return model.parameters();
}

// Whether forwards gather parameters, so that all ranks must call as many.
inline bool gathers(const std::string& strategy) {
  return strategy.starts_with("fsdp") && strategy != "fsdp_no_shard" && test::group().transport() != "host";
}

class Faults : public testing::TestWithParam<std::string> {};

}  // namespace shoal::faults
