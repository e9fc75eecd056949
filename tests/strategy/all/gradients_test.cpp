// Changes to grad() between steps: zero_grad in every form and order, gradients set or zeroed by hand, local backwards,
// steps without gradients. Under every strategy the same as in one process on the whole batch, or refused.

#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <random>
#include <string>

#include "tests/support/models.h"
#include "tests/support/refusal.h"
#include "tests/support/training.h"
#include "tests/support/world.h"

namespace shoal::gradients_test {
namespace {

using test::batch;
using test::difference;
using test::group;
using test::mean_loss;
using test::Training;

// Its third layer is optional.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    first = register_module("first", torch::nn::Linear(12, 8));
    second = register_module("second", torch::nn::Linear(8, 7));
    third = register_module("third", torch::nn::Linear(7, 7));
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto y = torch::tanh(second(torch::tanh(first(x))));
    return leave_out ? y : third(y);
  }

  torch::nn::Linear first{nullptr}, second{nullptr}, third{nullptr};
  bool leave_out = false;
};
TORCH_MODULE(Net);

Net net() {
  torch::manual_seed(7);
  return Net();
}

const torch::optim::SGDOptions sgd = torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.05);

const std::vector<std::string> strategies{"ddp",  "zero1",        "zero2",         "megatron",   "megatron_in_grads",
                                          "fsdp", "fsdp_grad_op", "fsdp_no_shard", "fsdp_hybrid"};
// Strategies that leave no whole gradient in grad(), on at least one rank.
const std::vector<std::string> sharded{"zero2", "megatron", "fsdp", "fsdp_grad_op", "fsdp_no_shard", "fsdp_hybrid"};

// Training loop given as a word, one letter per action:
//   b B  backward, of all layers or without the third     l L  the same under no_sync
//   f    forward alone                                     x X  forward, zero_grad(true or false), backward
//   z Z  optimizer.zero_grad(true or false)                m M  model->zero_grad(true or false)
//   h H  grad() of each parameter undefined, or zeroed     p P  first->zero_grad(true or false)
//   w    grad() of each parameter set to something else    s    step
// In one process on the whole batch, or under a strategy.
class Loop {
 public:
  Loop() : model_(net()), alone_(std::make_shared<torch::optim::SGD>(model_->parameters(), sgd)) {}
  explicit Loop(const std::string& strategy) : model_(net()) {
    training_ = std::make_shared<Training<NetImpl>>(Training<NetImpl>::make<torch::optim::SGD>(
        strategy, model_.ptr(), group(), sgd, {.find_unused_parameters = true, .bucket_mb = 0.0003}));
  }

  void run(char letter) {
    switch (letter) {
      case 'b':
      case 'B':
        return backward(letter == 'B', /*local=*/false, [] {});
      case 'l':
      case 'L':
        return backward(letter == 'L', /*local=*/true, [] {});
      case 'f':
        return static_cast<void>(forward(group().rank()));
      case 'x':
      case 'X':
        return backward(false, false, [&] { optimizer().zero_grad(letter == 'x'); });
      case 'z':
      case 'Z':
        return optimizer().zero_grad(letter == 'z');
      case 'm':
      case 'M':
        return model_->zero_grad(letter == 'm');
      case 'h':
      case 'H':
        return set_by_hand(letter == 'h' ? "undefined" : "zero");
      case 'p':
      case 'P':
        return model_->first->zero_grad(letter == 'p');
      case 'w':
        return set_by_hand("other");
      default:
        return training_ ? training_->step() : static_cast<void>(alone_->step());
    }
  }

  torch::optim::Optimizer& optimizer() { return training_ ? training_->optimizer() : *alone_; }
  std::vector<at::Tensor> parameters() const { return model_->parameters(); }
  Net& model() { return model_; }
  bool alone() const { return training_ == nullptr; }
  at::Tensor apply(const at::Tensor& x) { return training_ ? training_->forward(x) : model_->forward(x); }

 private:
  at::Tensor forward(int rank) { return mean_loss(apply(batch(rank, number_))); }

  template <class Between>
  void backward(bool leave_out, bool local, const Between& between) {
    ++number_;
    model_->leave_out = leave_out;
    if (training_) {
      const auto scope = training_->no_sync(local);
      const auto loss = forward(group().rank());
      between();
      loss.backward();
    } else {
      at::Tensor loss = at::zeros({}, at::kDouble);
      for (int rank = 0; rank < group().size(); ++rank) loss = loss + forward(rank) / group().size();
      between();
      loss.backward();
    }
    model_->leave_out = false;
  }

  void set_by_hand(const std::string& what) {
    for (auto& parameter : model_->parameters()) {
      auto& grad = parameter.mutable_grad();
      if (what == "other") {
        // Libtorch detaches no views.
        grad = at::linspace(-1, 1, parameter.numel(), at::kDouble).view(parameter.sizes()).clone();
      } else if (grad.defined() && what == "zero") {
        grad.zero_();
      } else {
        grad.reset();
      }
    }
  }

  Net model_;
  std::shared_ptr<torch::optim::SGD> alone_;
  std::shared_ptr<Training<NetImpl>> training_;
  int64_t number_ = 0;
};

// Parameters are gathered into the gradients' memory in a step, so that gradients must be dropped after it.
std::string for_strategy(const std::string& word, const std::string& strategy) {
  if (strategy != "megatron_in_grads") return word;
  std::string longer;
  for (size_t i = 0; i < word.size(); ++i) {
    longer += word[i];
    const bool dropped = i + 1 < word.size() && std::string("zZmMhHwx").find(word[i + 1]) != std::string::npos;
    if (word[i] == 's' && !dropped) longer += 'z';
  }
  return longer;
}

void expect_as_in_one_process(const std::string& word, const std::string& strategy) {
  Loop whole, parts(strategy);
  std::string past;
  for (const char letter : for_strategy(word, strategy)) {
    past += letter;
    whole.run(letter);
    ASSERT_NO_THROW(parts.run(letter)) << strategy << " " << past;
    if (letter == 's') {
      ASSERT_LT(difference(parts.parameters(), whole.parameters()), 1e-11) << strategy << " " << past;
    }
  }
}

class EveryStrategy : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(, EveryStrategy, ::testing::ValuesIn(strategies), [](const auto& info) { return info.param; });

// All forms on 4 ranks and over sockets, halves of them elsewhere.
TEST_P(EveryStrategy, zero_grad_in_every_form_and_order) {
  const bool all = group().size() == 4 || group().transport() != "host";
  for (const char zero : std::string(all ? "zZmMhH" : group().size() == 3 ? "ZmH" : "zMh")) {
    const std::string z(1, zero);
    for (const auto& word : {"bs" + z + "bs" + z + "bs", z + "bs" + z + "bs", "bsf" + z + "bs", "bbs" + z + "bbs",
                             "b" + z + "bs", "bl" + z + "bs", "lb" + z + "lbs"}) {
      expect_as_in_one_process(word, GetParam());
    }
  }
}

TEST_P(EveryStrategy, zero_grad_between_forward_and_backward) {
  for (const auto* word : {"xsxsxs", "XsXsXs", "bsxsbszbs"}) expect_as_in_one_process(word, GetParam());
}

TEST_P(EveryStrategy, a_forward_without_backward_changes_nothing) {
  for (const auto* word : {"bfsbfs", "bsfbs", "lfbs", "bfzfbs"}) expect_as_in_one_process(word, GetParam());
}

TEST_P(EveryStrategy, gradients_add_up_without_zero_grad) {
  for (const auto* word : {"bbs", "bsbs", "bllbs", "bBbs", "BsbsBs", "bsBsBs"}) {
    expect_as_in_one_process(word, GetParam());
  }
}

TEST_P(EveryStrategy, zero_grad_of_a_part_leaves_the_rest) {
  for (const auto* word : {"bpbs", "bPbs", "bspbs", "blpbs", "lpbs", "bBPbs"})
    expect_as_in_one_process(word, GetParam());
}

TEST_P(EveryStrategy, a_step_after_zero_grad_does_what_it_does_in_one_process) {
  for (const auto* word : {"bszs", "bsZs", "bsms", "bsMs", "bzs", "bZsZs", "bsps", "bsPs", "bsHszs"}) {
    expect_as_in_one_process(word, GetParam());
  }
}

TEST_P(EveryStrategy, gradients_set_by_hand_count) {
  for (const auto* word : {"bws", "bswsz", "ws", "wszbs", "bwbs", "bwzbs", "wBszbs", "bswbs", "lwbs"}) {
    expect_as_in_one_process(word, GetParam());
  }
}

// Others at each world size.
TEST_P(EveryStrategy, loops_of_any_order) {
  const auto first = 10U * static_cast<unsigned>(group().size() - 1);
  for (unsigned seed = first; seed < first + 10; ++seed) {
    std::mt19937 random(seed);
    std::string word;
    bool local = false;  // a step would use gradients that ranks have not reduced
    while (word.size() < 16) {
      const char letter = std::string("bbBlLfxXzZmMhHpPwss")[random() % 19];
      if (letter == 's' && local) continue;
      if (letter == 'l' || letter == 'L') local = true;
      if (std::string("bBxXzZmMhHw").find(letter) != std::string::npos) local = false;
      word += letter;
    }
    expect_as_in_one_process(word + "bs", GetParam());
    if (HasFatalFailure()) return;
  }
}

TEST_P(EveryStrategy, BEY04_micro_batches_that_zero_grad_drops_have_no_weight) {
  for (const bool set_to_none : {true, false}) {
    for (const bool of_module : {true, false}) {
      auto model = net();
      auto alone = net();
      auto training = Training<NetImpl>::make<torch::optim::SGD>(GetParam(), model.ptr(), group(), sgd);
      torch::optim::SGD optimizer(alone->parameters(), sgd);
      const auto backward = [&](int64_t number) {
        training.backward(training.forward(batch(group().rank(), number)).pow(2).sum(), 4);
      };
      for (int64_t step = 0; step < 3; ++step) {
        {
          const auto local = training.no_sync(true);
          backward(10 + step);
        }
        of_module ? model->zero_grad(set_to_none) : training.optimizer().zero_grad(set_to_none);
        backward(step);
        training.step();
        training.zero_grad();
        for (int rank = 0; rank < group().size(); ++rank) {
          (alone->forward(batch(rank, step)).pow(2).sum() / (4 * group().size())).backward();
        }
        optimizer.step();
        optimizer.zero_grad();
      }
      EXPECT_LT(difference(model->parameters(), alone->parameters()), 1e-11)
          << "set_to_none " << set_to_none << ", of the module " << of_module;
    }
  }
}

// The second backward leaves a layer out, and the third has a micro-batch under no_sync before it.
TEST_P(EveryStrategy, BEY04_weighted_means_add_up_without_zero_grad) {
  auto model = net();
  auto alone = net();
  auto training = Training<NetImpl>::make<torch::optim::SGD>(GetParam(), model.ptr(), group(), sgd,
                                                             {.find_unused_parameters = true, .bucket_mb = 0.0003});
  torch::optim::SGD optimizer(alone->parameters(), sgd);
  const auto backward = [&](int64_t number) {
    training.backward(training.forward(batch(group().rank(), number)).pow(2).sum(), group().rank() + 1);
  };
  const auto backward_alone = [&](int64_t number, int micros) {
    const double weight = micros * group().size() * (group().size() + 1) / 2.0;
    for (int rank = 0; rank < group().size(); ++rank) {
      (alone->forward(batch(rank, number)).pow(2).sum() / weight).backward();
    }
  };
  for (int64_t step = 0; step < 3; ++step) {
    if (step == 2) {
      const auto local = training.no_sync(true);
      backward(10);
      backward_alone(10, 2);
    }
    model->leave_out = alone->leave_out = step == 1;
    backward(step);
    backward_alone(step, step == 2 ? 2 : 1);
  }
  training.step();
  optimizer.step();
  EXPECT_LT(difference(model->parameters(), alone->parameters()), 1e-11);
}

TEST_P(EveryStrategy, step_after_local_backwards_alone_is_refused_where_ranks_share_the_result) {
  for (const auto* word : {"l", "bsl", "bszl", "L"}) {
    Loop loop(GetParam());
    for (const char letter : for_strategy(word, GetParam())) loop.run(letter);
    if (GetParam() == "ddp") {
      EXPECT_NO_THROW(loop.run('s')) << "each rank by itself is a way to train";
      continue;
    }
    std::vector<at::Tensor> before;
    for (const auto& parameter : loop.parameters()) before.push_back(parameter.detach().clone());
    group().barrier({-1, -1, "before"}).wait();
    const auto text = test::refusal([&] { loop.run('s'); });
    EXPECT_NE(text.find("outside no_sync"), std::string::npos) << GetParam() << " " << word << ": " << text;
    EXPECT_EQ(difference(loop.parameters(), before), 0) << "nothing has changed";
    group().barrier({-1, -1, "after"}).wait();
    for (const char letter : std::string("bsz")) EXPECT_NO_THROW(loop.run(letter)) << "and training goes on";
  }
}

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

class Sharded : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(, Sharded, ::testing::ValuesIn(sharded), [](const auto& info) { return info.param; });

// Parameters whose grad() does not hold the gradient on this rank.
std::vector<at::Tensor> elsewhere(Loop& loop, const std::string& strategy) {
  std::vector<at::Tensor> list;
  for (const auto& parameter : loop.parameters()) {
    EXPECT_TRUE(parameter.grad().defined()) << "some rank has used it";
    const bool here =
        strategy == "zero2" && dynamic_cast<OSSCore&>(loop.optimizer()).param_to_rank(parameter) == group().rank();
    if (!here) list.push_back(parameter);
  }
  return list;
}

TEST_P(Sharded, what_reads_a_gradient_that_is_not_here_is_told_what_to_call) {
  Loop loop(GetParam());
  loop.run('b');
  const auto others = elsewhere(loop, GetParam());
  for (const auto& parameter : others) {
    const auto& grad = parameter.grad();
    EXPECT_EQ(grad.sizes(), parameter.sizes());
    EXPECT_EQ(grad.dtype(), parameter.dtype());
    for (const auto& act : std::vector<std::function<void()>>{
             [&] { grad.norm(); }, [&] { at::Tensor(grad).mul_(2); }, [&] { grad.clone(); }, [&] { grad.sum().item(); },
             [&] { at::zeros_like(grad).copy_(grad); }, [&] { grad.detach().add(1); }, [&] { grad.data().abs(); },
             [&] { grad.view({-1}).narrow(0, 0, 1).zero_(); }, [&] { at::Tensor(grad).add_(parameter.detach()); }}) {
      const auto text = test::refusal(act);
      EXPECT_NE(text.find("the gradient of parameter "), std::string::npos) << text;
      EXPECT_NE(text.find("clip with "), std::string::npos) << text;
      EXPECT_NE(text.find("zero_grad()"), std::string::npos) << text;
    }
    EXPECT_THROW(static_cast<void>(grad.data_ptr()), c10::Error);
  }
  if (!others.empty()) {
    EXPECT_NE(test::refusal([&] { torch::nn::utils::clip_grad_norm_(loop.parameters(), 1.0); }), "");
    EXPECT_NE(test::refusal([&] { torch::nn::utils::clip_grad_value_(loop.parameters(), 1.0); }), "");
    torch::optim::Adam by_mistake(others, torch::optim::AdamOptions(0.1));
    EXPECT_NE(test::refusal([&] { by_mistake.step(); }).find("update with"), std::string::npos);
  }
  group().barrier({-1, -1, "refused"}).wait();
  for (const char letter : std::string("szbsz")) EXPECT_NO_THROW(loop.run(letter)) << "training goes on";
}

TEST_P(Sharded, a_zeroed_gradient_reads_as_zeroes) {
  Loop whole, loop(GetParam());
  for (auto* one : {&whole, &loop}) {
    for (const char letter : std::string("bZ")) one->run(letter);
    EXPECT_EQ(torch::nn::utils::clip_grad_norm_(one->parameters(), 1.0), 0);
    for (const auto& parameter : one->parameters()) EXPECT_EQ(parameter.grad().abs().sum().item<double>(), 0);
    for (const char letter : std::string("bsz")) one->run(letter);
  }
  EXPECT_LT(difference(loop.parameters(), whole.parameters()), 1e-11);
}

TEST(ClipGradNorm, libtorchs_own_is_right_where_every_rank_has_the_gradients) {
  for (const auto* strategy : {"ddp", "zero1"}) {
    Loop whole, loop(strategy);
    for (int number = 0; number < 3; ++number) {
      for (auto* one : {&whole, &loop}) one->run('b');
      const auto norm = torch::nn::utils::clip_grad_norm_(whole.parameters(), 0.01);
      EXPECT_NEAR(torch::nn::utils::clip_grad_norm_(loop.parameters(), 0.01), norm, 1e-6 * norm);
      for (auto* one : {&whole, &loop}) {
        one->run('s');
        one->run('z');
      }
    }
    EXPECT_LT(difference(loop.parameters(), whole.parameters()), 1e-6);
  }
}

TEST(Megatron, a_second_step_with_gradients_whose_memory_was_given_away_is_refused) {
  Loop loop("megatron_in_grads");
  for (const char letter : std::string("bs")) loop.run(letter);
  const auto refused = [&] {
    const auto text = test::refusal([&] { loop.run('s'); });
    EXPECT_NE(text.find("reuse_grad_buf_for_param_gather"), std::string::npos) << text;
    group().barrier({-1, -1, "refused"}).wait();
  };
  refused();
  loop.run('b');  // accumulates on top of a stand-in
  refused();
  for (const char letter : std::string("zbs")) EXPECT_NO_THROW(loop.run(letter));
}

// 16-bit module under FSDP with a loss scale, or a float32 module without.
struct Scaled {
  explicit Scaled(ShardingStrategy strategy, bool scaled, std::optional<at::ScalarType> reduce_dtype)
      : model(net()),
        parallel([&] {
          model->to(scaled ? at::kHalf : at::kFloat);
          return std::make_shared<FullyShardedDataParallel<NetImpl>>(
              model, group(),
              FullyShardedDataParallelOptions{.sharding_strategy = strategy, .reduce_dtype = reduce_dtype});
        }()),
        optimizer(*parallel, sgd,
                  {.scaler = scaled ? std::optional(GradScalerOptions{.initial_scale = 1024, .hysteresis = 1})
                                    : std::nullopt}) {}
  void backward(int64_t number, double factor = 1) {
    const auto x = batch(group().rank(), number).to(model->first->weight.scalar_type());
    optimizer.scale_loss(factor * parallel->forward(x).to(at::kFloat).pow(2).mean()).backward();
  }

  Net model;
  std::shared_ptr<FullyShardedDataParallel<NetImpl>> parallel;
  FullyShardedOptimizer<torch::optim::SGD> optimizer;
};

class FsdpScaler : public ::testing::TestWithParam<ShardingStrategy> {};
INSTANTIATE_TEST_SUITE_P(, FsdpScaler, ::testing::Values(ShardingStrategy::full_shard, ShardingStrategy::no_shard));

TEST_P(FsdpScaler, clip_grad_norm_sees_gradients_without_the_scale) {
  for (const auto reduce : {std::optional<at::ScalarType>(), std::optional(at::kFloat)}) {
    Scaled plain(GetParam(), false, {}), scaled(GetParam(), true, reduce);
    for (int64_t number = 0; number < 3; ++number) {
      double norm = 0;
      for (auto* one : {&plain, &scaled}) {
        one->backward(number);
        const auto seen = one->parallel->clip_grad_norm_(0.05);
        if (one == &plain) {
          norm = seen;
        } else {
          EXPECT_NEAR(seen, norm, 0.02 * norm) << number;
          EXPECT_NEAR(one->parallel->clip_grad_norm_(1e9), std::min(norm, 0.05), 0.001) << "clipped once";
        }
        EXPECT_TRUE(one->optimizer.step().updated);
        one->optimizer.zero_grad();
      }
    }
    std::vector<at::Tensor> a, b;
    for (const auto& [name, value] : scaled.parallel->full_state_dict()) a.push_back(value);
    for (const auto& [name, value] : plain.parallel->full_state_dict()) b.push_back(value);
    EXPECT_LT(difference(a, b), 0.01);
  }
}

TEST_P(FsdpScaler, clipping_then_other_calls) {
  Scaled one(GetParam(), true, at::kFloat);
  one.backward(0);
  one.parallel->clip_grad_norm_(0.05);
  one.backward(1);
  EXPECT_NE(test::refusal([&] { one.optimizer.step(); }).find("clipped"), std::string::npos)
      << "scaled gradients were added to some without a scale";
  group().barrier({-1, -1, "refused"}).wait();
  one.optimizer.zero_grad();
  one.backward(2);
  EXPECT_TRUE(one.optimizer.step().updated);
  EXPECT_NE(test::refusal([&] { one.optimizer.step(); }).find("loss scale"), std::string::npos);
  group().barrier({-1, -1, "refused"}).wait();
  one.optimizer.zero_grad();
  // clip_grad_norm_ finds an inf, and step() knows about it.
  const auto before = one.optimizer.scaler()->value();
  one.backward(3, 1e30);
  EXPECT_FALSE(std::isfinite(one.parallel->clip_grad_norm_(1)));
  EXPECT_FALSE(one.optimizer.step().updated);
  EXPECT_LT(one.optimizer.scaler()->value(), before);
  one.optimizer.zero_grad();
  one.backward(4);
  one.parallel->clip_grad_norm_(1);
  one.optimizer.zero_grad();
  EXPECT_TRUE(one.optimizer.step().updated) << "with nothing";
}

}  // namespace
}  // namespace shoal::gradients_test
