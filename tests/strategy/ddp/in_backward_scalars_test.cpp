// OptimizerInBackward: functions of all gradients (BEY07), lifetimes of memory (DDP18), and failures (BEY10).

#include <fmt/format.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <chrono>
#include <limits>
#include <thread>

#include "comm/group/group_state.h"
#include "comm/rendezvous/world_state.h"
#include "engine/gradients/gradient_norm.h"
#include "shoal/error.h"
#include "tests/strategy/ddp/in_backward_training.h"
#include "tests/support/memory_meter.h"

namespace shoal::test::in_backward_scalars_test {
namespace {

using Training = InBackwardTraining<MlpImpl>;
constexpr double clip = 0.05;  // below the norm of every step here

// One process with the mean over ranks; clips the named parameters together, by `norm` or by their own norm.
class Reference {
 public:
  void set_gradients(int64_t step) {
    optimizer_.zero_grad();
    for (int rank = 0; rank < group().size(); ++rank) {
      (mean_loss(model->forward(batch(rank, step))) / group().size()).backward();
    }
  }
  void clip_by(const std::vector<std::string>& names, std::optional<double> norm = std::nullopt) {
    std::vector<at::Tensor> gradients;
    for (const auto& name : names) gradients.push_back(model->named_parameters()[name].grad());
    double squares = 0;
    for (const auto& gradient : gradients) squares += gradient.pow(2).sum().item<double>();
    const double factor = clip / (norm.value_or(std::sqrt(squares)) + 1e-6);
    for (auto& gradient : gradients) gradient.mul_(std::min(1.0, factor));
  }
  double norm() const {
    double squares = 0;
    for (const auto& parameter : model->parameters()) squares += parameter.grad().pow(2).sum().item<double>();
    return std::sqrt(squares);
  }
  void step() { optimizer_.step(); }

  Mlp model = seeded(3);

 private:
  torch::optim::SGD optimizer_{model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)};
};

void clips_as(WholeGradient choice) {
  Training training(seeded(3).ptr(), momentum_sgd(),
                    OptimizerInBackwardOptions{.clip_grad = clip, .whole_gradient = choice});
  Reference reference;
  std::optional<double> last;
  for (int64_t step = 0; step < 6; ++step) {
    const auto loss = mean_loss(training.parallel.forward(batch(group().rank(), step)));
    const auto buckets = training.parallel.buckets();
    EXPECT_GT(buckets.size(), 1);
    loss.backward();
    reference.set_gradients(step);
    const double norm = reference.norm();
    EXPECT_GT(norm, clip);
    for (const auto& names : buckets) {
      const auto by = choice == WholeGradient::exact ? norm : last.value_or(norm);
      reference.clip_by(names, choice == WholeGradient::per_bucket ? std::nullopt : std::optional(by));
    }
    reference.step();
    last = norm;
    EXPECT_LT(difference(training.model->parameters(), reference.model->parameters()), 1e-12) << "step " << step;
    EXPECT_NEAR(training.inside->last_norm(), choice == WholeGradient::per_bucket ? 0 : norm, 1e-12) << step;
  }
}

TEST(OptimizerInBackward, BEY07_clips_by_the_exact_norm) {
  clips_as(WholeGradient::exact);
}

TEST(OptimizerInBackward, BEY07_clips_by_the_last_steps_norm) {
  clips_as(WholeGradient::stale);
}

TEST(OptimizerInBackward, BEY07_clips_each_bucket_by_its_own_norm) {
  clips_as(WholeGradient::per_bucket);
}

// On the last rank, the gradient of third.weight, which arrives first, is inf in step 1.
TEST(OptimizerInBackward, BEY07_inf_on_one_rank_skips_all_or_its_bucket_on_all_ranks) {
  for (const auto choice : {WholeGradient::exact, WholeGradient::stale, WholeGradient::per_bucket}) {
    for (const double norm : {0.0, clip}) {
      Training training(seeded(3).ptr(), momentum_sgd(),
                        OptimizerInBackwardOptions{
                            .clip_grad = norm,
                            .whole_gradient = choice,
                            .scaler = GradScalerOptions{.initial_scale = 1024, .growth_interval = 2, .hysteresis = 1}});
      int64_t step = 0;
      training.model->third->weight.register_hook([&](const at::Tensor& gradient) {
        const bool spoil = step == 1 && group().rank() == group().size() - 1;
        return spoil ? gradient * std::numeric_limits<double>::infinity() : gradient;
      });
      Reference reference;
      std::vector<double> scales;
      std::optional<double> last;
      for (; step < 4; ++step) {
        const auto before = copies(*training.model);
        const auto loss = mean_loss(training.parallel.forward(batch(group().rank(), step)));
        const auto buckets = training.parallel.buckets();
        training.inside->scale_loss(loss).backward();
        scales.push_back(training.inside->scaler()->value());
        reference.set_gradients(step);
        const double whole = reference.norm();
        for (const auto& names : buckets) {
          const bool bad = step == 1 && std::count(names.begin(), names.end(), "third.weight") > 0;
          if (step == 1 && (bad || choice == WholeGradient::exact)) {
            for (const auto& name : names) reference.model->named_parameters()[name].mutable_grad().reset();
          } else if (norm > 0) {
            const auto by = choice == WholeGradient::stale ? last.value_or(whole) : whole;
            reference.clip_by(names, choice == WholeGradient::per_bucket ? std::nullopt : std::optional(by));
          }
        }
        reference.step();
        if (step != 1) last = whole;
        EXPECT_LT(difference(training.model->parameters(), reference.model->parameters()), 1e-12) << step;
        if (step == 1 && choice == WholeGradient::exact) expect_equal(training.model->parameters(), before);
      }
      EXPECT_EQ(scales, (std::vector<double>{1024, 512, 512, 1024}));
    }
  }
}

TEST(OptimizerInBackward, DDP18_buckets_are_updated_inside_backward_and_their_gradients_go) {
  Training training(seeded(3).ptr(), momentum_sgd(), OptimizerInBackwardOptions());
  const auto& third = training.model->third->weight;
  at::Tensor before;
  bool updated = false;
  bool gone = false;
  training.model->first->weight.register_hook([&](const at::Tensor&) {
    updated = !at::equal(third, before);
    gone = !third.grad().defined();
  });
  for (int64_t step = 0; step < 3; ++step) {
    before = third.detach().clone();
    mean_loss(training.parallel.forward(batch(group().rank(), step))).backward();
    EXPECT_TRUE(updated) << "the last layer, when the first one's gradient comes";
    EXPECT_TRUE(gone);
  }
}

int64_t shared_bytes() {
  return static_cast<int64_t>(state_of(group())->world->memory->bytes_in_use());
}

// Peak bytes of gradients in a step: the allocator's and the ranks' shared memory, sampled whenever a gradient arrives.
struct Use {
  double peak = 0;
  double held = 0;
};
Use most_bytes(const std::optional<OptimizerInBackwardOptions>& in_backward, int64_t layers, int64_t width) {
  torch::manual_seed(1);
  torch::nn::Sequential model;
  for (int64_t i = 0; i < layers; ++i) {
    model->push_back(torch::nn::Linear(torch::nn::LinearOptions(width, width).bias(false)));
  }
  const MakeOptimizer plain = [](std::vector<at::Tensor> parameters) {
    return std::make_unique<torch::optim::SGD>(std::move(parameters), torch::optim::SGDOptions(1e-3));
  };
  auto& meter = MemoryMeter::instance();
  const auto message = at::zeros({1000});  // not freed, because Gloo's thread may still hold it
  group().broadcast(message, 0).wait();    // makes the staging buffer, which is never freed
  const auto before = meter.live() + shared_bytes();
  const auto bucket_mb = 2.0 * static_cast<double>(width * width * 4) / (1 << 20);  // two layers
  InBackwardTraining<torch::nn::SequentialImpl> training(model.ptr(), plain, in_backward,
                                                         {.bucket_cap_mb = bucket_mb, .first_bucket_mb = bucket_mb});
  int64_t most_shared = 0;
  for (auto& parameter : training.model->parameters()) {
    parameter.register_hook([&](const at::Tensor&) { most_shared = std::max(most_shared, shared_bytes()); });
  }
  const auto x = at::ones({1, width});
  Use use;
  for (int step = 0; step < 3; ++step) {
    meter.reset_peak();
    most_shared = 0;
    training.parallel.forward(x).sum().backward();
    most_shared = std::max(most_shared, shared_bytes());
    use.peak = static_cast<double>(meter.peak() + most_shared - before);
    // Gloo's thread releases the last bucket a moment after it is reduced.
    for (int tries = 0; tries < 1000; ++tries) {
      use.held = static_cast<double>(meter.live() + shared_bytes() - before);
      if (!in_backward || use.held < static_cast<double>(width * width)) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    training.end_step();
  }
  return use;
}

TEST(OptimizerInBackward, DDP18_gradients_never_take_more_than_two_buckets) {
  constexpr int64_t layers = 12;
  constexpr int64_t width = 512;  // 12 MiB of gradients: above what is kept for speed
  constexpr double layer = width * width * 4;
  constexpr double bucket = 2 * layer;
  constexpr double small = 0.1 * layer;  // activations, facts
  const auto inside = most_bytes(OptimizerInBackwardOptions(), layers, width);
  // Two buckets, backward's present gradient, and one layer's work. Gloo's thread may hold a reduced bucket a moment
  // longer.
  const double late = group().transport() == "gloo" ? bucket : 0;
  EXPECT_LE(inside.peak, 2 * bucket + 2 * layer + late + small);
  EXPECT_GE(inside.peak, bucket) << "or nothing was measured";
  EXPECT_LE(inside.held, small);
  const auto after = most_bytes(std::nullopt, layers, width);
  EXPECT_GE(after.peak, layers * layer);
  EXPECT_GE(after.held, layers * layer);
  if (group().rank() == 0) {
    fmt::print("peak {:.2f} of {:.2f} buckets; after backward {:.2f}\n", inside.peak / bucket, after.peak / bucket,
               inside.held / bucket);
  }
}

// The first layer's gradient, which arrives last, fails on one rank.
TEST(OptimizerInBackward, BEY10_a_backward_that_fails_leaves_all_ranks_equal) {
  for (const auto choice : {WholeGradient::exact, WholeGradient::per_bucket}) {
    for (const int faulty : {0, group().size() - 1}) {
      Training training(seeded(3).ptr(), momentum_sgd(),
                        OptimizerInBackwardOptions{.clip_grad = clip, .whole_gradient = choice});
      bool fail = false;
      training.model->first->weight.register_hook([&](const at::Tensor&) {
        if (fail) throw std::runtime_error("injected");
      });
      const auto train = [&](int64_t step) {
        mean_loss(training.parallel.forward(batch(group().rank(), step))).backward();
      };
      train(0);
      train(1);
      const auto before = copies(*training.model);
      const bool here = group().rank() == faulty;
      fail = here;
      if (here) {
        EXPECT_THROW(train(2), std::exception);
        training.parallel.abandon_step();
      } else {
        EXPECT_THROW(train(2), StepAbandoned);
      }
      fail = false;
      const auto third = training.model->third->weight;
      EXPECT_TRUE(at::equal(training.model->first->weight, before[0])) << "its bucket was void";
      if (choice == WholeGradient::exact) {
        expect_equal(training.model->parameters(), before);
      } else {
        EXPECT_FALSE(at::equal(third, before[4])) << "its bucket had left";
      }
      for (const int64_t step : {10, 11, 12}) {
        for (const auto& parameter : training.model->parameters()) {
          auto first = parameter.detach().clone();
          group().broadcast(first, 0).wait();
          EXPECT_TRUE(at::equal(first, parameter.detach())) << "as on rank 0";
        }
        train(step);
      }
    }
  }
}

}  // namespace
}  // namespace shoal::test::in_backward_scalars_test
