// Two models that are trained in turns, as in GANs: under every strategy the same as in one process on the whole batch.

#include <functional>

#include "tests/strategy/all/gradients_loop.h"

namespace shoal::test::gradients_of_two_models_test {
namespace {

using namespace gradients_loop;

// A loop over two models, like a GAN's: updates of one model go through the other, whose gradients are dropped later.
class Pair {
 public:
  Pair() : Pair(std::make_unique<Loop>(), std::make_unique<Loop>()) {}
  explicit Pair(const std::string& strategy)
      : Pair(std::make_unique<Loop>(strategy), std::make_unique<Loop>(strategy)) {}

  // DCGAN's order: model->zero_grad() before each model's turn.
  void step(int64_t number, bool set_to_none) {
    critic_->model()->zero_grad(set_to_none);
    backward([&](int rank) { return judge(real(rank, number)).pow(2).mean(); });
    backward([&](int rank) { return judge(made(rank, number).detach()).pow(2).mean(); });
    critic_->run('s');
    maker_->model()->zero_grad(set_to_none);
    backward([&](int rank) { return judge(made(rank, number)).sum(); });
    maker_->run('s');
  }
  // WGAN's order: several turns of the critic, without the generator's graph.
  void wgan_step(int64_t number) {
    for (int64_t turn = 0; turn < 2; ++turn) {
      backward([&](int rank) {
        return judge(real(rank, 10 * number + turn)).mean() - judge(made(rank, 10 * number + turn).detach()).mean();
      });
      critic_->run('s');
      critic_->optimizer().zero_grad();
    }
    backward([&](int rank) { return -judge(made(rank, number)).mean(); });
    maker_->run('s');
    maker_->optimizer().zero_grad();
    critic_->optimizer().zero_grad();
  }
  std::vector<at::Tensor> parameters() const {
    auto list = critic_->parameters();
    for (const auto& parameter : maker_->parameters()) list.push_back(parameter);
    return list;
  }

 private:
  Pair(std::unique_ptr<Loop> critic, std::unique_ptr<Loop> maker)
      : critic_(std::move(critic)), maker_(std::move(maker)) {}

  static at::Tensor real(int rank, int64_t number) { return batch(rank, number); }
  at::Tensor made(int rank, int64_t number) {
    const auto noise = batch(rank, 1000 + number);
    return at::cat({maker_->apply(noise), noise.narrow(1, 0, 5)}, 1);
  }
  at::Tensor judge(const at::Tensor& x) { return critic_->apply(x); }
  void backward(const std::function<at::Tensor(int rank)>& loss) {
    if (critic_->alone()) {
      auto sum = at::zeros({}, at::kDouble);
      for (int rank = 0; rank < group().size(); ++rank) sum = sum + loss(rank) / group().size();
      sum.backward();
    } else {
      loss(group().rank()).backward();
    }
  }

  std::unique_ptr<Loop> critic_, maker_;
};

TEST_P(EveryStrategy, two_models_in_the_orders_of_gans) {
  for (const bool set_to_none : {true, false}) {
    Pair whole, parts(GetParam());
    for (int64_t number = 0; number < 4; ++number) {
      whole.step(number, set_to_none);
      parts.step(number, set_to_none);
      ASSERT_LT(difference(parts.parameters(), whole.parameters()), 1e-10) << GetParam() << number << set_to_none;
    }
  }
  Pair whole, parts(GetParam());
  for (int64_t number = 0; number < 4; ++number) {
    whole.wgan_step(number);
    parts.wgan_step(number);
    ASSERT_LT(difference(parts.parameters(), whole.parameters()), 1e-10) << GetParam() << number;
  }
}

}  // namespace
}  // namespace shoal::test::gradients_of_two_models_test
