// Models, data and loss together: training in one process repeats the oracle runs of the golden files.

#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include "data/reference.h"
#include "models/digest.h"
#include "models/loss.h"
#include "models/registry.h"
#include "tests/golden/compare.h"

namespace shoal {
namespace {

using nlohmann::json;

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& name, std::vector<at::Tensor> parameters) {
  if (name == "adamw") {
    const auto options = torch::optim::AdamWOptions(1e-3).weight_decay(0.1);
    return std::make_unique<torch::optim::AdamW>(std::move(parameters), options);
  }
  const auto options = torch::optim::SGDOptions(0.01).momentum(0.9);
  return std::make_unique<torch::optim::SGD>(std::move(parameters), options);
}

std::vector<at::Tensor> copies(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  for (const auto& tensor : tensors) result.push_back(tensor.clone());
  return result;
}

json summary(const torch::OrderedDict<std::string, at::Tensor>& tensors) {
  auto result = json::object();
  uint64_t index = 0;
  for (const auto& item : tensors) {
    const auto digest = models::digest(index++, item.value());
    result[item.key()] = {{"shape", item.value().sizes().vec()},
                          {"sum", digest.sum},
                          {"abs_sum", digest.abs_sum},
                          {"l2", digest.l2},
                          {"probe", digest.probe}};
  }
  return result;
}

// Training that takes every rank's batches in turn and averages the gradients; buffers follow rank 0.
class Oracle {
 public:
  explicit Oracle(const json& config)
      : config_(config),
        name_(config.at("model")),
        size_(config.at("size")),
        model_(models::make_model(name_, size_, models::Init::reference, config.at("seed"))),
        optimizer_(make_optimizer(config.at("optimizer"), model_->parameters())) {}

  json train() {
    json losses = json::array();
    for (int64_t step = 0; step < config_.at("steps"); ++step) losses.push_back(train_step(step));
    return {{"loss", losses},
            {"params", summary(model_->named_parameters())},
            {"buffers", summary(model_->named_buffers())}};
  }

 private:
  double train_step(uint64_t step) {
    const uint64_t world = config_.at("world"), accumulate = config_.at("accumulate");
    const double scale = 1.0 / static_cast<double>(world * accumulate);
    double total = 0;
    for (uint64_t rank = 0; rank < world; ++rank) {
      const auto before = copies(model_->buffers());
      for (uint64_t micro = 0; micro < accumulate; ++micro) {
        const auto batch = data::reference_batch(
            name_, size_, {.seed = config_.at("seed"), .step = step, .rank = rank, .micro = micro},
            config_.at("batch"));
        const auto loss = models::loss_of(model_->forward(batch.data), batch.target);
        (loss * scale).backward();
        total += loss.item<double>();
      }
      if (rank > 0) restore_buffers(before);
    }
    optimizer_->step();
    optimizer_->zero_grad();
    return total * scale;
  }

  void restore_buffers(const std::vector<at::Tensor>& values) {
    auto buffers = model_->buffers();
    for (size_t i = 0; i < values.size(); ++i) buffers[i].copy_(values[i]);
  }

  const json config_;
  const std::string name_, size_;
  const std::shared_ptr<models::Model> model_;
  const std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

std::vector<std::string> golden_names() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(SHOAL_GOLDEN_FOLDER)) {
    if (entry.path().extension() == ".json") names.push_back(entry.path().stem().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

class Training : public testing::TestWithParam<std::string> {};

TEST_P(Training, repeats_the_oracle) {
  const auto reference = golden::load(SHOAL_GOLDEN_FOLDER "/" + GetParam() + ".json");
  at::set_num_threads(reference.at("config").at("threads"));
  EXPECT_THAT(golden::compare(Oracle(reference.at("config")).train(), reference, "single"), testing::IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(Golden, Training, testing::ValuesIn(golden_names()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace shoal
