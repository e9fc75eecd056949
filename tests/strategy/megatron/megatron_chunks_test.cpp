// DistributedOptimizer over several chunks, dtypes in one model, ranges and state (MEG03, MEG09, MEG10, MEG11).

#include <c10/util/Exception.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <array>
#include <map>
#include <set>

#include "tests/strategy/megatron/megatron_training.h"
#include "tests/support/refusal.h"

namespace shoal::test::megatron_chunks_test {
namespace {

// Model whose layers are chunks.
struct Chunked {
  explicit Chunked(const DistributedOptimizerOptions& options)
      : model(seeded(1)),
        optimizer({model->first.ptr(), model->second.ptr(), model->third.ptr()}, sgd, group(), options) {}
  Mlp model;
  Sgd optimizer;
};

// Forward and backward of a micro-batch in pieces, as in a pipeline: each chunk has a backward of its own.
void backward_in_pieces(Mlp& model, const at::Tensor& x, double scale) {
  const auto a = torch::tanh(model->first(x));
  const auto a_in = a.detach().requires_grad_(true);
  const auto b = torch::tanh(model->second(a_in));
  const auto b_in = b.detach().requires_grad_(true);
  (mean_loss(model->third(b_in)) * scale).backward();
  b.backward(b_in.grad());
  a.backward(a_in.grad());
}

// Megatron-LM's order of calls in training.
TEST(MegatronChunks, MEG09_each_chunk_in_a_backward_of_its_own) {
  for (const bool overlap : {true, false}) {
    for (const bool gather_late : {false, true}) {
      for (const bool each : {true, false}) {
        SCOPED_TRACE(testing::Message() << overlap << gather_late << each);
        Chunked here({.overlap_grad_reduce = overlap, .overlap_param_gather = gather_late});
        auto reference = seeded(1);
        torch::optim::SGD whole(reference->parameters(), sgd);
        for (int64_t step = 0; step < 3; ++step) {
          here.optimizer.zero_grad();
          for (int micro = 0; micro < 3; ++micro) {
            const auto local = here.optimizer.no_sync(!each && micro < 2);
            backward_in_pieces(here.model, batch(group().rank(), step, micro), 1.0 / 3);
          }
          if (!overlap) here.optimizer.reduce_model_grads();
          here.optimizer.step();
          whole.zero_grad();
          add_mean_gradient(reference, step, 3);
          whole.step();
          ASSERT_LT(difference(here.model->parameters(), reference->parameters()), 1e-12) << "step " << step;
        }
      }
    }
  }
}

// All forwards of the micro-batches, then backwards chunk after chunk: only each chunk's last one is reduced.
TEST(MegatronChunks, MEG09_chunks_end_their_micro_batches_one_after_the_other) {
  Chunked here({});
  auto reference = seeded(1);
  torch::optim::SGD whole(reference->parameters(), sgd);
  for (int64_t step = 0; step < 3; ++step) {
    here.optimizer.zero_grad();
    std::vector<std::array<at::Tensor, 5>> kept;
    for (int micro = 0; micro < 2; ++micro) {
      const auto a = torch::tanh(here.model->first(batch(group().rank(), step, micro)));
      const auto a_in = a.detach().requires_grad_(true);
      const auto b = torch::tanh(here.model->second(a_in));
      const auto b_in = b.detach().requires_grad_(true);
      kept.push_back({a, a_in, b, b_in, mean_loss(here.model->third(b_in)) / 2});
    }
    for (int chunk = 2; chunk >= 0; --chunk) {
      for (int micro = 0; micro < 2; ++micro) {
        const auto local = here.optimizer.no_sync(micro == 0);
        auto& [a, a_in, b, b_in, loss] = kept[micro];
        if (chunk == 2) loss.backward();
        if (chunk == 1) b.backward(b_in.grad());
        if (chunk == 0) a.backward(a_in.grad());
      }
    }
    here.optimizer.step();
    whole.zero_grad();
    add_mean_gradient(reference, step, 2);
    whole.step();
    ASSERT_LT(difference(here.model->parameters(), reference->parameters()), 1e-12) << "step " << step;
  }
}

// The first chunk is unused on some ranks, and in step 2 on all: then neither momentum nor old sums may move it.
TEST(MegatronChunks, MEG09_a_chunk_that_ranks_did_not_run_gets_the_others_gradients_or_rests) {
  const auto runs = [](int rank, int64_t step) { return step != 2 && (rank + step) % 2 == 0; };
  const auto forward = [&](Mlp& model, const at::Tensor& x, bool run) {
    const auto in = run ? torch::tanh(model->first(x)) : at::full({x.size(0), 16}, 0.5, x.options());
    return mean_loss(model->third(torch::tanh(model->second(in))));
  };
  for (const bool overlap : {true, false}) {
    for (const bool zero_first : {true, false}) {
      SCOPED_TRACE(testing::Message() << overlap << zero_first);
      Chunked here({.overlap_grad_reduce = overlap});
      auto reference = seeded(1);
      torch::optim::SGD whole(reference->parameters(), sgd);
      for (int64_t step = 0; step < 5; ++step) {
        if (zero_first) here.optimizer.zero_grad();
        forward(here.model, batch(group().rank(), step), runs(group().rank(), step)).backward();
        here.optimizer.step();
        if (!zero_first) here.optimizer.zero_grad();
        whole.zero_grad();
        for (int rank = 0; rank < group().size(); ++rank) {
          (forward(reference, batch(rank, step), runs(rank, step)) / group().size()).backward();
        }
        whole.step();
        ASSERT_LT(difference(here.model->parameters(), reference->parameters()), 1e-12) << "step " << step;
      }
    }
  }
}

// One backward; on some ranks the last chunk's buffer is full only at its end, but its collectives are issued first.
TEST(MegatronChunks, BEY02_chunks_leave_in_one_order_whatever_ranks_use) {
  const auto forward = [](torch::nn::Linear& low, Mlp& high, const at::Tensor& x, bool all) {
    const auto y = torch::tanh(high->second(torch::tanh(high->first(low(x)))));
    return all ? mean_loss(high->third(y)) : mean_loss(y);
  };
  const auto make_low = [] {
    torch::manual_seed(9);
    torch::nn::Linear low(12, 12);
    low->to(at::kDouble);
    return low;
  };
  auto low = make_low(), reference_low = make_low();
  auto high = seeded(1), reference_high = seeded(1);
  Sgd optimizer({low.ptr(), high.ptr()}, sgd, group(), {.bucket_size = 100});
  auto parameters = reference_high->parameters();
  for (const auto& parameter : reference_low->parameters()) parameters.push_back(parameter);
  torch::optim::SGD whole(parameters, sgd);
  for (int64_t step = 0; step < 4; ++step) {
    forward(low, high, batch(group().rank(), step), (group().rank() + step) % 2 == 0).backward();
    optimizer.step();
    optimizer.zero_grad();
    whole.zero_grad();
    for (int rank = 0; rank < group().size(); ++rank) {
      (forward(reference_low, reference_high, batch(rank, step), (rank + step) % 2 == 0) / group().size()).backward();
    }
    whole.step();
    ASSERT_LT(difference(low->parameters(), reference_low->parameters()), 1e-12) << "step " << step;
    ASSERT_LT(difference(high->parameters(), reference_high->parameters()), 1e-12) << "step " << step;
  }
}

TEST(MegatronChunks, BEY10_a_rank_that_gives_up_ends_the_step_of_all_chunks) {
  for (const bool overlap : {true, false}) {
    for (const bool in_pieces : {true, false}) {
      SCOPED_TRACE(testing::Message() << overlap << in_pieces);
      Chunked here({.overlap_grad_reduce = overlap, .bucket_size = 100});
      auto reference = seeded(1);
      torch::optim::SGD whole(reference->parameters(), sgd);
      const auto step_once = [&](int64_t step) {
        const auto x = batch(group().rank(), step);
        in_pieces ? backward_in_pieces(here.model, x, 1) : mean_loss(here.model->forward(x)).backward();
        here.optimizer.step();
      };
      for (int64_t step = 0; step < 3; ++step) {
        if (step == 1 && group().rank() == 0) {
          here.optimizer.abandon_step();
        } else if (step == 1) {
          EXPECT_THROW(step_once(9), StepAbandoned);
        }
        here.optimizer.zero_grad();
        step_once(step);
        here.optimizer.zero_grad();
        whole.zero_grad();
        add_mean_gradient(reference, step);
        whole.step();
        ASSERT_LT(difference(here.model->parameters(), reference->parameters()), 1e-12) << "step " << step;
      }
    }
  }
}

TEST(MegatronChunks, MEG09_a_parameter_in_two_chunks_is_refused_by_name) {
  auto model = seeded(1);
  torch::nn::Sequential other(model->second, torch::nn::Linear(torch::nn::LinearOptions(16, 5)));
  other->to(at::kDouble);
  const auto text = refusal([&] { Sgd optimizer({model.ptr(), other.ptr()}, sgd, group()); });
  EXPECT_NE(text.find("parameter chunk0.second.weight is also chunk1.0.weight"), std::string::npos) << text;
  EXPECT_NE(refusal([&] {
              Sgd optimizer({model.ptr(), model.ptr()}, sgd, group());
            }).find("also chunk1.first.weight"),
            std::string::npos);
  // One of the two chunks has it.
  Sgd optimizer({model.ptr(), other.ptr()}, sgd, group(), {.ignored = {"chunk1.0.weight", "chunk1.0.bias"}});
  EXPECT_EQ(optimizer.state_dict().count("chunk0.second.weight"), 1U);
  EXPECT_EQ(optimizer.state_dict().count("chunk1.0.weight"), 0U);
}

TEST(MegatronChunks, MEG09_names_of_one_chunk_or_of_all_may_be_ignored) {
  auto model = seeded(1);
  const DistributedOptimizerCore::Modules chunks{model->first.ptr(), model->second.ptr(), model->third.ptr()};
  const auto names = [&](std::vector<std::string> ignored) {
    Sgd optimizer(chunks, sgd, group(), {.ignored = std::move(ignored)});
    std::set<std::string> list;
    for (const auto& [name, entry] : optimizer.state_dict()) list.insert(name);
    return list;
  };
  EXPECT_EQ(names({"bias"}), (std::set<std::string>{"chunk0.weight", "chunk1.weight", "chunk2.weight"}));
  EXPECT_EQ(names({"chunk1.bias", "chunk2.bias"}),
            (std::set<std::string>{"chunk0.bias", "chunk0.weight", "chunk1.weight", "chunk2.weight"}));
  EXPECT_NE(refusal([&] { names({"chunk3.bias"}); }).find("no chunk has a parameter or buffer named chunk3.bias"),
            std::string::npos);
}

// Result of Megatron-LM's build_model_gbuf_param_range_map(), computed from the parameters' places in the buffer.
TEST(MegatronChunks, MEG03_local_ranges_are_within_the_ranks_view) {
  torch::manual_seed(11);
  const int n = group().size();
  for (int round = 0; round < 8; ++round) {
    torch::nn::Sequential model;
    for (int i = 0; i < 3 + round; ++i) {
      const auto in = at::randint(1, 40, {1}, at::kLong).item<int64_t>();
      const auto out = at::randint(1, 40, {1}, at::kLong).item<int64_t>();
      model->push_back(torch::nn::Linear(in, out));
    }
    Sgd optimizer(model, sgd, group(), {.bucket_size = round % 2 == 0 ? 500 : 40'000'000});
    std::map<std::string, Range> whole;  // in its buffer
    std::map<size_t, int64_t> share;     // of a rank, by buffer
    for (int rank = 0; rank < n; ++rank) {
      for (const auto& range : optimizer.param_range_map(rank)) {
        const auto numel = model->named_parameters()[range.name].numel();
        whole[range.name] = Range{0, numel}.normalize(range.world.begin - range.parameter.begin);
        if (rank > 0) share[range.buffer] = (range.world.begin - range.local.begin) / rank;
      }
    }
    for (int rank = 0; rank < n; ++rank) {
      for (const auto& range : optimizer.param_range_map(rank)) {
        const auto size = share.count(range.buffer) > 0 ? share[range.buffer] : int64_t{1} << 40;
        const Range view{rank * size, (rank + 1) * size};
        const auto& world = whole[range.name];
        const Range local{std::max<int64_t>(0, world.begin - view.begin), std::min(size, world.end - view.begin)};
        EXPECT_EQ(range.local, local) << range.name;
        EXPECT_EQ(range.world, local.normalize(local.begin + view.begin)) << range.name;
        EXPECT_EQ(range.parameter, local.normalize(std::max<int64_t>(0, view.begin - world.begin))) << range.name;
      }
    }
    EXPECT_EQ(share.empty(), n == 1);
  }
}

struct HalfWithNormImpl : torch::nn::Module {
  explicit HalfWithNormImpl(at::ScalarType dtype) {
    torch::manual_seed(3);
    first = register_module("first", torch::nn::Linear(12, 16));
    to(dtype);
    norm = register_parameter("norm", at::ones({16}, dtype == at::kHalf ? at::kFloat : dtype));
  }
  at::Tensor forward(const at::Tensor& x) { return (first(x).to(norm.scalar_type()) * norm).pow(2).mean(); }
  torch::nn::Linear first{nullptr};
  at::Tensor norm;
};

TEST(MegatronChunks, MEG10_float32_norms_in_a_float16_model_are_scaled_along) {
  auto model = std::make_shared<HalfWithNormImpl>(at::kHalf);
  auto reference = std::make_shared<HalfWithNormImpl>(at::kDouble);
  Sgd optimizer(model, SGDOptions(0.1), group(), {.scaler = GradScalerOptions{.initial_scale = 1024}});
  torch::optim::SGD whole(reference->parameters(), SGDOptions(0.1));
  for (int64_t step = 0; step < 3; ++step) {
    optimizer.scale_loss(model->forward(batch(group().rank(), step).to(at::kHalf))).backward();
    EXPECT_TRUE(optimizer.step().updated);
    optimizer.zero_grad();
    whole.zero_grad();
    for (int rank = 0; rank < group().size(); ++rank) {
      (reference->forward(batch(rank, step)) / group().size()).backward();
    }
    whole.step();
  }
  EXPECT_EQ(model->norm.scalar_type(), at::kFloat);
  EXPECT_LT(difference({model->norm}, {reference->norm}), 1e-3);
  EXPECT_LT(difference({model->first->weight}, {reference->first->weight}), 5e-3);
  // The same with separate chunks.
  auto half = seeded_as(at::kHalf), wide = seeded_as(at::kFloat);
  Sgd both({half.ptr(), wide.ptr()}, SGDOptions(0.1), group(), {.scaler = GradScalerOptions{}});
}

// Collects warnings.
class Warnings : public c10::WarningHandler {
 public:
  Warnings() : guard_(this) {}
  void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }
  std::vector<std::string> texts;

 private:
  c10::WarningUtils::WarningHandlerGuard guard_;
};

TEST(MegatronChunks, MEG11_the_state_has_the_scaler_and_loads_without) {
  const auto make = [](Mlp& model, bool scaler) {
    DistributedOptimizerOptions options;
    if (scaler) options.scaler = GradScalerOptions{.initial_scale = 64, .dynamic = false};
    return std::make_unique<Sgd>(model, sgd, group(), options);
  };
  auto model = seeded_as(at::kBFloat16), other = seeded_as(at::kBFloat16), plain = seeded_as(at::kBFloat16);
  auto with = make(model, true);
  auto without = make(plain, false);
  DistributedOptimizerOptions options;
  options.scaler = GradScalerOptions{.initial_scale = 2, .dynamic = false};
  Sgd again(other, sgd, group(), options);
  backward(model, *with, 0);
  with->step();
  backward(plain, *without, 0);
  without->step();
  const auto state = with->state_dict();
  EXPECT_EQ(state.at(grad_scaler_key).numbers.at("scale"), 64);
  EXPECT_EQ(with->state_dict(0).count(grad_scaler_key), group().rank() == 0 ? 1U : 0U);
  {
    Warnings warnings;
    again.load_state_dict(state);
    EXPECT_TRUE(warnings.texts.empty());
    EXPECT_EQ(again.scaler()->value(), 64);
  }
  {
    Warnings warnings;
    again.load_state_dict(without->state_dict());
    ASSERT_EQ(warnings.texts.size(), 1U);
    EXPECT_NE(warnings.texts[0].find("has no loss scaler"), std::string::npos) << warnings.texts[0];
    EXPECT_EQ(again.scaler()->value(), 64) << "stays";
  }
  {
    Warnings warnings;
    without->load_state_dict(state);
    ASSERT_EQ(warnings.texts.size(), 1U);
    EXPECT_NE(warnings.texts[0].find("it is ignored"), std::string::npos) << warnings.texts[0];
  }
  auto broken = state;
  broken[grad_scaler_key].numbers.erase("scale");
  EXPECT_NE(refusal([&] { again.load_state_dict(broken); }).find("has no scale"), std::string::npos);
}

}  // namespace
}  // namespace shoal::test::megatron_chunks_test
