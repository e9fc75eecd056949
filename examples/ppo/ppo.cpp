// PPO on cart-pole. Every rank plays its own episodes, which differ in length, so ranks have different numbers of
// mini-batches: shoal::Join lets the ranks that have run out take part in the communication of the others, and
// backward(loss_sum, samples) gives every sample of every rank the same weight.
// Method: Schulman et al., "Proximal Policy Optimization Algorithms" (2017).
//
//   cmake -S . -B build -DCMAKE_PREFIX_PATH="SHOAL_PREFIX;LIBTORCH" && cmake --build build
//   shoal launch -n 2 -- build/ppo 60
//
// Argument: largest number of iterations (60).

#include <shoal/shoal.h>
#include <torch/torch.h>

#include <cmath>
#include <random>

namespace nn = torch::nn;

// The pole on a cart of Barto, Sutton and Anderson (1983).
class CartPole {
 public:
  static constexpr int64_t longest = 500;

  explicit CartPole(uint64_t seed) : random_(seed) {}

  void reset() {
    std::uniform_real_distribution<float> uniform(-0.05f, 0.05f);
    for (auto& value : state_) value = uniform(random_);
  }

  // Pushes the cart to the left (0) or right (1). Returns false if the pole has fallen or the cart has left the track.
  bool step(int64_t action) {
    auto& [x, speed, angle, turn] = state_;
    const float force = action == 1 ? 10 : -10;
    const float sine = std::sin(angle), cosine = std::cos(angle);
    const float push = (force + 0.05f * turn * turn * sine) / 1.1f;
    const float turning = (9.8f * sine - cosine * push) / (0.5f * (4.0f / 3 - 0.1f * cosine * cosine / 1.1f));
    const float pull = push - 0.05f * turning * cosine / 1.1f;
    x += 0.02f * speed, speed += 0.02f * pull, angle += 0.02f * turn, turn += 0.02f * turning;
    return std::abs(x) < 2.4f && std::abs(angle) < 0.2095f;
  }

  torch::Tensor observe() { return torch::from_blob(state_.data(), {4}).clone(); }

 private:
  std::array<float, 4> state_{};
  std::mt19937_64 random_;
};

struct ActorCriticImpl : nn::Module {
  ActorCriticImpl() {
    actor = register_module("actor", nn::Sequential(nn::Linear(4, 64), nn::Tanh(), nn::Linear(64, 2)));
    critic = register_module("critic", nn::Sequential(nn::Linear(4, 64), nn::Tanh(), nn::Linear(64, 1)));
  }

  std::pair<torch::Tensor, torch::Tensor> forward(const torch::Tensor& observations) {
    return {torch::log_softmax(actor->forward(observations), -1), critic->forward(observations).squeeze(-1)};
  }

  nn::Sequential actor{nullptr}, critic{nullptr};
};
TORCH_MODULE(ActorCritic);

struct Experience {
  std::vector<torch::Tensor> observations;
  std::vector<int64_t> actions;
  std::vector<float> log_probs, advantages, returns;
};

// Plays an episode and appends it, with generalised advantage estimates.
void play(ActorCritic model, CartPole& game, Experience& experience) {
  const torch::NoGradGuard no_grad;
  std::vector<float> values;
  game.reset();
  bool stands = true;
  for (int64_t step = 0; stands && step < CartPole::longest; ++step) {
    experience.observations.push_back(game.observe());
    const auto [log_probs, value] = model->forward(experience.observations.back());
    const auto action = log_probs.exp().multinomial(1).item<int64_t>();
    experience.actions.push_back(action);
    experience.log_probs.push_back(log_probs[action].item<float>());
    values.push_back(value.item<float>());
    stands = game.step(action);
  }
  values.push_back(stands ? model->forward(game.observe()).second.item<float>() : 0);
  std::vector<float> advantages(values.size());
  for (size_t i = values.size() - 1; i-- > 0;) {
    advantages[i] = 1 + 0.99f * values[i + 1] - values[i] + 0.99f * 0.95f * advantages[i + 1];
  }
  for (size_t i = 0; i + 1 < values.size(); ++i) {
    experience.advantages.push_back(advantages[i]);
    experience.returns.push_back(advantages[i] + values[i]);
  }
}

int main(int argc, char** argv) {
  const int64_t iterations = argc > 1 ? std::stoll(argv[1]) : 60;
  const int64_t episodes = 8, epochs = 4, batch_size = 128;
  const shoal::World world = shoal::init();
  torch::manual_seed(1 + world.rank());
  CartPole game(1 + world.rank());

  ActorCritic model;
  shoal::DistributedDataParallel parallel(model, world.group());
  torch::optim::Adam optimizer(model->parameters(), 3e-3);

  for (int64_t iteration = 1; iteration <= iterations; ++iteration) {
    Experience experience;
    for (int64_t episode = 0; episode < episodes; ++episode) play(model, game, experience);
    const auto observations = torch::stack(experience.observations);
    const auto actions = torch::tensor(experience.actions), old_log_probs = torch::tensor(experience.log_probs);
    const auto returns = torch::tensor(experience.returns);
    auto advantages = torch::tensor(experience.advantages);
    const int64_t samples = advantages.size(0);

    // Mean and deviation of the advantages, and the mean length of an episode, over all ranks.
    auto sums = torch::stack({advantages.sum(), advantages.square().sum()}).to(torch::kDouble);
    sums = torch::cat({sums, torch::tensor({double(samples)}, torch::kDouble)});
    world.group().all_reduce(sums).wait();
    const double total = sums[2].item<double>(), mean = sums[0].item<double>() / total;
    const double length = total / (episodes * world.size());
    advantages = (advantages - mean) / std::sqrt(sums[1].item<double>() / total - mean * mean + 1e-8);

    for (int64_t epoch = 0; epoch < epochs; ++epoch) {
      const auto batches = torch::randperm(samples).split(batch_size);
      auto batch = batches.begin();
      shoal::Join join({parallel});
      while (join.next(batch != batches.end())) {
        if (join.active()) {
          const auto& index = *batch++;
          const auto [log_probs, values] = parallel.forward(observations.index({index}));
          const auto chosen = log_probs.gather(1, actions.index({index}).unsqueeze(1)).squeeze(1);
          const auto ratio = (chosen - old_log_probs.index({index})).exp();
          const auto advantage = advantages.index({index});
          const auto gain = torch::min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum();
          const auto error = (values - returns.index({index})).square().sum();
          const auto entropy = -(log_probs.exp() * log_probs).sum();
          parallel.backward(0.5 * error - gain - 0.01 * entropy, index.size(0));
        } else {
          parallel.shadow();
        }
        nn::utils::clip_grad_norm_(model->parameters(), 0.5);
        optimizer.step();
        optimizer.zero_grad();
      }
    }
    if (world.rank() == 0) {
      std::printf("iteration %ld: mean length %.1f, %ld samples here, %.0f in all\n", iteration, length, samples,
                  total);
    }
    if (length > 450) break;  // the same number on all ranks
  }
  std::printf("norm of the parameters on rank %d: %.9g\n", world.rank(),
              nn::utils::parameters_to_vector(model->parameters()).norm().item<double>());
}
