// A communication hook and a strategy of one's own, both of them signSGD: gradients travel as signs, one byte per
// element. Source: Bernstein et al., "signSGD with Majority Vote is Communication Efficient and Fault Tolerant"
// (ICLR 2019); the hook adds the error feedback of Karimireddy et al. (ICML 2019).
//
//   cmake -S . -B build -DCMAKE_PREFIX_PATH="SHOAL_PREFIX;LIBTORCH" && cmake --build build
//   shoal launch -n 2 -- build/own_strategy
//
// No arguments. Trains the same model three times: ddp, ddp with the hook, and the strategy.

#include <shoal/shoal.h>
#include <torch/torch.h>

// Sends the signs of a bucket, and each gradient's mean size; what is lost is added to the next step's gradients.
class SignHook : public shoal::CommunicationHook {
 public:
  std::string name() const override { return "signs with error feedback"; }
  bool serves(shoal::SumResult result) const override { return result == shoal::SumResult::all_ranks; }
  void reset() override { errors_.clear(); }

  shoal::PendingExchange begin(const shoal::GradientBucket& bucket) override {
    const int64_t ranks = bucket.group.size(), n = bucket.gradients.numel(), pieces = bucket.pieces.size();
    std::vector<torch::Tensor> sizes;
    for (const auto& [name, gradient, in_bucket, in_parameter] : bucket.pieces) {
      if (errors_.contains(name)) gradient.add_(errors_.at(name));
      sizes.push_back(gradient.abs().mean());
      errors_[name] = gradient - sizes.back() * gradient.sign();
    }
    const auto all_signs = torch::empty({ranks * n}, torch::kChar), all_sizes = torch::empty({ranks * pieces});
    bucket.group.all_gather(all_sizes, torch::stack(sizes), bucket.label).wait();
    auto work = bucket.group.all_gather(all_signs, bucket.gradients.sign().to(torch::kChar), bucket.label);
    return {.work = std::move(work), .finish = [=] {
              bucket.sum.zero_();
              for (int64_t rank = 0; rank < ranks; ++rank) {
                for (int64_t i = 0; i < pieces; ++i) {
                  const auto [begin, end] = bucket.pieces[i].in_bucket;
                  const auto signs = all_signs.slice(0, rank * n + begin, rank * n + end);
                  bucket.sum.slice(0, begin, end).add_(signs * all_sizes[rank * pieces + i]);
                }
              }
            }};
  }

 private:
  std::map<std::string, torch::Tensor> errors_;
};

// The majority of the ranks' signs decides; every rank makes the same update.
class MajorityVote : public shoal::TrainingCore {
 public:
  explicit MajorityVote(const shoal::TrainingParts& parts) : TrainingCore(parts) {
    shoal::broadcast_coalesced(group_, module_->parameters(), 0, {.what = "parameters"});
    optimizer_ = parts.recipe.make({torch::optim::OptimizerParamGroup(module_->parameters())});
  }

  bool step() override {
    for (const auto& gradient : gradients()) {
      const auto votes = gradient.sign().to(torch::kChar);  // up to 127 ranks
      group_.all_reduce(votes, shoal::ReduceOp::sum, {.what = "votes"}).wait();
      gradient.copy_(votes.sign());
    }
    optimizer_->step();
    return true;
  }

  torch::optim::Optimizer& optimizer() override { return *optimizer_; }
  std::vector<const torch::optim::Optimizer*> local_optimizers() const override { return {optimizer_.get()}; }
  shoal::OptimizerState optimizer_state() override { return shoal::optimizer_state(*optimizer_, *module_); }
  std::optional<shoal::TrainingState> state() override { return shoal::TrainingState(module_, *optimizer_, group_); }

 private:
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

// Fits y = sum of squares; the loss after 300 steps.
double train(const shoal::World& world, const std::string& strategy, double rate,
             const shoal::TrainingOptions& options = {}) {
  torch::manual_seed(1 + world.rank());
  torch::nn::Sequential model(torch::nn::Linear(8, 64), torch::nn::Tanh(), torch::nn::Linear(64, 1));
  auto training = shoal::make_training(
      strategy, model, shoal::optimizer_recipe<torch::optim::SGD>(torch::optim::SGDOptions(rate).momentum(0.9)),
      world.group(), options);
  auto loss = torch::zeros({});
  for (int step = 0; step < 300; ++step) {
    const auto x = torch::randn({64, 8});
    loss = torch::mse_loss(training.forward(x), x.square().sum(1, /*keepdim=*/true));
    training->backward(loss);
    training->step();
    training->zero_grad();
  }
  std::printf("%s on rank %d: norm of the parameters %.9g\n", strategy.c_str(), world.rank(),
              torch::nn::utils::parameters_to_vector(model->parameters()).norm().item<double>());
  world.group().all_reduce(loss.detach_(), shoal::ReduceOp::avg).wait();
  return loss.item<double>();
}

int main() {
  shoal::register_strategy({.name = "majority_vote",
                            .help = "signs of gradients, summed after backward",
                            .make = [](const auto& parts) { return std::make_unique<MajorityVote>(parts); }});

  const shoal::World world = shoal::init();
  const double ddp = train(world, "ddp", 0.01);
  const double hook = train(world, "ddp", 0.005, {.communication_hook = std::make_shared<SignHook>()});
  const double vote = train(world, "majority_vote", 0.003);
  if (world.rank() == 0) std::printf("loss: ddp %.3f, with the hook %.3f, majority_vote %.3f\n", ddp, hook, vote);
}
