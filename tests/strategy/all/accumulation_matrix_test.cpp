// BEY08: every strategy with 1 to 8 micro-batches, reduced together or one by one: the same training, and its cost in
// collectives and bytes by a formula.

#include <torch/optim/sgd.h>
#include <torch/types.h>

#include "engine/buckets/step_trailer.h"
#include "shoal/call_log.h"
#include "shoal/decentralized.h"
#include "shoal/local_updates.h"
#include "tests/strategy/all/even.h"
#include "tests/support/models.h"
#include "tests/support/training.h"
#include "tests/support/world.h"

namespace shoal::test::accumulation_matrix_test {
namespace {

constexpr int64_t steps = 3;
const auto sgd = torch::optim::SGDOptions(0.1).momentum(0.9);

at::Tensor input(int rank, int64_t step, int64_t micro) {
  return batch(rank, step, micro, 4, 16);
}

// Gradients of each step: means over ranks, sums over micro-batches.
std::vector<at::Tensor> one_process(int64_t micros) {
  auto model = std::make_shared<EvenImpl>();
  torch::optim::SGD optimizer(model->parameters(), sgd);
  for (int64_t step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    for (int rank = 0; rank < group().size(); ++rank) {
      for (int64_t micro = 0; micro < micros; ++micro) {
        (mean_loss(model->forward(input(rank, step, micro))) / group().size()).backward();
      }
    }
    optimizer.step();
  }
  return model->parameters();
}

struct Cost {
  int64_t calls = 0;
  int64_t bytes = 0;
  bool operator==(const Cost&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Cost& cost) {
  return out << cost.calls << " collectives, " << cost.bytes << " bytes";
}

// Cost of one synchronising backward: buckets, and what ranks must know of each other.
Cost of_backward(const std::string& strategy) {
  const auto flags_and_weights = even_gradients * StepTrailer::numel(1) * 8;  // in three buckets, in their dtype
  if (strategy == "ddp" || strategy == "zero1") return {even_gradients, even_payload + flags_and_weights};
  return {even_gradients + 1, even_payload + StepTrailer::numel(even_gradients) * 8};  // reduced apart, in float64
}

bool of_gradients(const CallRecord& record) {
  return record.op == Op::reduce || record.op == Op::reduce_scatter || record.op == Op::all_reduce;
}

struct Costs {
  Cost gradients;
  Cost rest;
};
Costs costs(const CallLog& log) {
  Costs sum;
  for (const auto& record : log.records()) {
    if (record.group != group().name()) continue;  // pages, which every forward needs
    auto& part = of_gradients(record) ? sum.gradients : sum.rest;
    part.calls += 1;
    part.bytes += record.bytes;
  }
  return sum;
}

class Accumulation : public testing::TestWithParam<std::string> {};

TEST_P(Accumulation, BEY08_costs_what_the_formula_says_and_trains_the_same) {
  std::optional<Cost> rest;
  for (const int64_t micros : {1, 2, 4, 8}) {
    const auto expected = one_process(micros);
    for (const bool each : {false, true}) {
      const auto log = std::make_shared<CallLog>();
      auto training = Training<EvenImpl>::make<torch::optim::SGD>(GetParam(), std::make_shared<EvenImpl>(),
                                                                  group().recorded(log), sgd, {.bucket_mb = 1e-3});
      for (int64_t step = 0; step < steps; ++step) {
        training.zero_grad();
        if (step == steps - 1) log->clear();  // the first steps also agree on the order of gradients
        for (int64_t micro = 0; micro < micros; ++micro) {
          const auto scope = training.no_sync(!each && micro + 1 < micros);
          mean_loss(training.forward(input(group().rank(), step, micro))).backward();
        }
        training.step();
      }
      const auto cost = costs(*log);
      const auto one = of_backward(GetParam());
      const int64_t times = each ? micros : 1;
      EXPECT_EQ(cost.gradients, (Cost{times * one.calls, times * one.bytes})) << micros << ", each: " << each;
      EXPECT_EQ(cost.rest, rest.value_or(cost.rest)) << "updates cost the same";
      rest = cost.rest;
      EXPECT_LT(difference(training.model->parameters(), expected), 1e-12) << micros << ", each: " << each;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Accumulation, testing::Values("ddp", "zero1", "zero2", "megatron", "fsdp"),
                         [](const auto& info) { return info.param; });

// 4 + 249 x 0.001 in bfloat16 is 4, because each term is less than half of the last bit.
constexpr int many = 250;
struct WeightImpl : torch::nn::Module {
  WeightImpl() { weight = register_parameter("weight", at::zeros({8}, at::kBFloat16)); }
  at::Tensor forward(double factor) { return (weight * factor).sum(); }
  at::Tensor weight;
};

TEST_P(Accumulation, BEY08_16_bit_gradients_accumulate_in_float32_where_asked) {
  auto training = Training<WeightImpl>::make<torch::optim::SGD>(GetParam(), std::make_shared<WeightImpl>(), group(),
                                                                torch::optim::SGDOptions(1), {.fp32_gradients = true});
  const float small = at::full({}, 0.001, at::kBFloat16).item<float>();
  float grad = 4;
  for (int micro = 1; micro < many; ++micro) grad += small;
  auto expected = at::zeros({8}, at::kBFloat16);
  for (int64_t step = 0; step < 3; ++step) {
    training.zero_grad();
    for (int micro = 0; micro < many; ++micro) {
      const auto local = training.no_sync(micro + 1 < many);
      training.forward(micro == 0 ? 4.0 : 0.001).backward();
    }
    training.step();
    expected -= at::full({8}, grad);
    ASSERT_LT(difference({training.model->weight}, {expected}), 0.004) << "step " << step;
  }
}

TEST(Accumulation, BEY08_ddp_leaves_the_sum_in_the_parameters_dtype) {
  for (const bool view : {true, false}) {
    auto model = std::make_shared<WeightImpl>();
    DistributedDataParallel parallel(model, group(), {.grad_reduce_in_fp32 = true, .gradient_as_bucket_view = view});
    for (int64_t step = 0; step < 3; ++step) {
      for (int micro = 0; micro < many; ++micro) {
        const auto local = parallel.no_sync(micro + 1 < many);
        parallel.forward(micro == 0 ? 4.0 : 0.001).backward();
      }
      ASSERT_EQ(model->weight.grad().scalar_type(), at::kBFloat16);
      ASSERT_EQ(model->weight.grad()[0].item<float>(), 4.25) << "view " << view << " step " << step;
      step == 0 ? model->zero_grad() : model->zero_grad(/*set_to_none=*/false);
    }
  }
}

TEST(Accumulation, BEY08_neighbours_exchange_once_a_step) {
  for (const int64_t micros : {1, 2, 4, 8}) {
    const auto log = std::make_shared<CallLog>();
    auto model = std::make_shared<EvenImpl>();
    DecentralizedDataParallel parallel(model, optimizer_recipe<torch::optim::SGD>(sgd), group().recorded(log),
                                       {.topology = make_topology("ring", group().size()), .bucket_cap_mb = 1e-3});
    for (int64_t step = 0; step < steps; ++step) {
      if (step == 1) log->clear();  // ranks agree on buckets in the first step
      for (int64_t micro = 0; micro < micros; ++micro) {
        const auto scope = parallel.no_sync(micro + 1 < micros);
        mean_loss(parallel.forward(input(group().rank(), step, micro))).backward();
      }
    }
    int64_t neighbours = 0;  // of all steps; the first one mixes nothing
    for (int64_t step = 1; step < steps; ++step) {
      neighbours += static_cast<int64_t>(parallel.topology().round(step).sources(group().rank()).size());
    }
    const auto& seen = parallel.statistics();
    EXPECT_EQ(seen.exchanged + seen.newer, even_gradients * neighbours);
    EXPECT_TRUE(log->records().empty()) << "no collective";
  }
}

TEST(Accumulation, BEY08_local_updates_communicate_after_steps_alone) {
  for (const int64_t micros : {1, 2, 4, 8}) {
    const auto log = std::make_shared<CallLog>();
    auto model = std::make_shared<EvenImpl>();
    torch::optim::SGD optimizer(model->parameters(), sgd);
    LocalUpdates local(std::static_pointer_cast<torch::nn::Module>(model), optimizer, group().recorded(log),
                       {.every = 2});
    log->clear();
    for (int64_t step = 0; step < 4; ++step) {
      for (int64_t micro = 0; micro < micros; ++micro) {
        mean_loss(model->forward(input(group().rank(), step, micro))).backward();
      }
      EXPECT_EQ(log->count(Op::all_reduce), step / 2) << "before step " << step;
      local.step();
      local.zero_grad();
    }
    EXPECT_EQ(costs(*log).gradients, (Cost{2, 2 * even_payload}));
    EXPECT_EQ(costs(*log).rest, Cost{});
  }
}

}  // namespace
}  // namespace shoal::test::accumulation_matrix_test
