// Unusual graphs: parts unused, used by some ranks, used several times, recomputed; nested outputs.

#include <torch/autograd.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/adaptive.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <array>

#include "shoal/ddp.h"
#include "shoal/error.h"
#include "tests/support/models.h"
#include "tests/support/world.h"

namespace shoal::ddp_graph_test {
namespace {

using test::batch;
using test::difference;
using test::group;

struct BranchImpl : torch::nn::Module {
  BranchImpl() {
    torch::manual_seed(5);
    shared = register_module("shared", torch::nn::Linear(12, 6));
    left = register_module("left", torch::nn::Linear(6, 6));
    right = register_module("right", torch::nn::Linear(6, 6));
    to(at::kDouble);
  }
  // Bit 0: left, bit 1: right; each used `times` times.
  at::Tensor forward(at::Tensor x, int branches, int times = 1) {
    x = torch::tanh(shared(x));
    for (int i = 0; i < times && (branches & 1) != 0; ++i) x = torch::tanh(left(x));
    for (int i = 0; i < times && (branches & 2) != 0; ++i) x = torch::tanh(right(x));
    return x.pow(2).mean();
  }
  torch::nn::Linear shared{nullptr}, left{nullptr}, right{nullptr};
};

// The mean over ranks of the gradients that each computes; undefined if none does.
std::vector<at::Tensor> expected(const std::function<at::Tensor(BranchImpl&, int)>& loss_of_rank) {
  BranchImpl model;
  for (int rank = 0; rank < group().size(); ++rank) (loss_of_rank(model, rank) / group().size()).backward();
  return test::gradients(model);
}

void expect_equal(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i].defined(), want[i].defined()) << i;
    EXPECT_TRUE(!want[i].defined() || difference({got[i]}, {want[i]}) < 1e-12) << i;
  }
}

TEST(DdpGraph, BEY02_ranks_may_use_different_halves_without_a_flag) {
  for (const bool find : {false, true}) {
    auto model = std::make_shared<BranchImpl>();
    DistributedDataParallel parallel(model, group(), {.find_unused_parameters = find});
    const auto branches = [](int rank) { return rank == 0 ? 1 : 2; };
    for (int64_t step = 0; step < 3; ++step) {
      model->zero_grad();
      parallel.forward(batch(group().rank(), step), branches(group().rank())).backward();
      // With one rank, the other half is unused.
      if (group().size() == 1 && !find) break;
      expect_equal(test::gradients(*model),
                   expected([&](BranchImpl& m, int rank) { return m.forward(batch(rank, step), branches(rank)); }));
    }
  }
}

TEST(DdpGraph, BEY02_ranks_may_use_a_module_a_different_number_of_times) {
  auto model = std::make_shared<BranchImpl>();
  DistributedDataParallel parallel(model, group());
  for (int64_t step = 0; step < 3; ++step) {
    model->zero_grad();
    parallel.forward(batch(group().rank(), step), 3, 1 + 2 * group().rank()).backward();
    expect_equal(test::gradients(*model),
                 expected([&](BranchImpl& m, int rank) { return m.forward(batch(rank, step), 3, 1 + 2 * rank); }));
  }
}

TEST(DdpGraph, DDP06_unused_on_all_ranks_is_an_error_that_names_them_at_the_next_forward) {
  auto model = std::make_shared<BranchImpl>();
  DistributedDataParallel parallel(model, group());
  parallel.forward(batch(group().rank(), 0), 1).backward();
  try {
    parallel.forward(batch(group().rank(), 1), 3);
    FAIL() << "no error";
  } catch (const UsageError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("right.weight"), std::string::npos) << text;
    EXPECT_NE(text.find("right.bias"), std::string::npos) << text;
    EXPECT_EQ(text.find("left"), std::string::npos) << text;
  }
  // Reported once; training may continue.
  model->zero_grad();
  parallel.forward(batch(group().rank(), 1), 3).backward();
  expect_equal(test::gradients(*model), expected([](BranchImpl& m, int rank) { return m.forward(batch(rank, 1), 3); }));
}

TEST(DdpGraph, DDP06_with_the_option_gradients_of_unused_parameters_stay_untouched) {
  for (const bool view : {true, false}) {
    auto model = std::make_shared<BranchImpl>();
    DistributedDataParallel parallel(model, group(), {.find_unused_parameters = true, .gradient_as_bucket_view = view});
    parallel.forward(batch(group().rank(), 0), 1).backward();
    EXPECT_FALSE(model->right->weight.grad().defined());
    model->zero_grad(false);
    model->right->weight.mutable_grad() = at::full_like(model->right->weight, 0.3);
    for (int64_t step = 1; step < 4; ++step) {
      parallel.forward(batch(group().rank(), step), 1).backward();
      EXPECT_TRUE(at::equal(model->right->weight.grad(), at::full_like(model->right->weight, 0.3)));
    }
  }
}

TEST(DdpGraph, DDP06_unused_parameters_do_not_hold_their_bucket_up) {
  auto log = std::make_shared<CallLog>();
  auto model = std::make_shared<BranchImpl>();
  DistributedDataParallel parallel(model, group().recorded(log),
                                   {.find_unused_parameters = true, .bucket_cap_mb = 1e-5, .first_bucket_mb = 1e-5});
  Clock::time_point last_gradient;
  model->shared->weight.register_hook([&](const at::Tensor&) { last_gradient = Clock::now(); });
  // `right` is unused, and in the first bucket.
  parallel.forward(batch(group().rank(), 0), 1).backward();
  const auto records = log->records();
  const auto first = std::find_if(records.begin(), records.end(),
                                  [](const CallRecord& record) { return record.op == Op::all_reduce; });
  ASSERT_NE(first, records.end());
  EXPECT_LT(first->issued, last_gradient);
}

struct Answer {
  at::Tensor logits;
  std::string note;
};

struct NestedImpl : torch::nn::Module {
  using Output = std::tuple<std::vector<at::Tensor>, std::map<std::string, std::optional<at::Tensor>>, Answer, int>;
  NestedImpl() {
    for (const auto* name : {"a", "b", "c", "d"}) layers.push_back(register_module(name, torch::nn::Linear(3, 3)));
  }
  Output forward(at::Tensor x) {
    return {{layers[0](x)}, {{"b", layers[1](x)}, {"none", std::nullopt}}, {layers[2](x), "text"}, 7};
  }
  std::vector<torch::nn::Linear> layers;
};

}  // namespace
}  // namespace shoal::ddp_graph_test

template <>
struct shoal::OutputTensors<shoal::ddp_graph_test::Answer> {
  static void collect(const shoal::ddp_graph_test::Answer& answer, std::vector<at::Tensor>& into) {
    shoal::collect_tensors(answer.logits, into);
  }
};

namespace shoal::ddp_graph_test {
namespace {

TEST(DdpGraph, DDP06_finds_the_tensors_of_nested_outputs_and_user_structs) {
  auto model = std::make_shared<NestedImpl>();
  std::vector<at::Tensor> tensors;
  collect_tensors(model->forward(at::ones({1, 3})), tensors);
  EXPECT_EQ(tensors.size(), 3U);
  collect_tensors(std::array<at::Tensor, 2>{at::ones(1), at::ones(1)}, tensors);
  collect_tensors(c10::List<at::Tensor>({at::ones(1)}), tensors);
  collect_tensors(torch::nn::ASMoutput(at::ones(1), 2.0), tensors);
  EXPECT_EQ(tensors.size(), 7U);
  DistributedDataParallel parallel(model, group(), {.find_unused_parameters = true});
  for (int step = 0; step < 2; ++step) {
    const auto [list, map, answer, number] = parallel.forward(at::ones({1, 3}));
    (list[0].sum() + map.at("b")->sum() + answer.logits.sum()).backward();
    EXPECT_EQ(number, 7);
  }
  EXPECT_TRUE(model->layers[2]->weight.grad().defined());
  EXPECT_FALSE(model->layers[3]->weight.grad().defined());
}

// Recomputes tanh(layer(x)) in backward with an inner backward, as activation checkpointing does.
struct Recompute : torch::autograd::Function<Recompute> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, torch::nn::Linear* layer) {
    context->save_for_backward({x});
    context->saved_data["layer"] = reinterpret_cast<int64_t>(layer);
    return torch::tanh((*layer)(x));
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const auto input = context->get_saved_variables()[0].detach().requires_grad_(true);
    auto* layer = reinterpret_cast<torch::nn::Linear*>(context->saved_data["layer"].toInt());
    const torch::AutoGradMode enabled(true);
    torch::tanh((*layer)(input)).backward(grads[0]);
    return {input.grad(), at::Tensor()};
  }
};

struct CheckpointedImpl : torch::nn::Module {
  explicit CheckpointedImpl(bool recompute) : recompute(recompute) {
    torch::manual_seed(5);
    first = register_module("first", torch::nn::Linear(12, 12));
    block = register_module("block", torch::nn::Linear(12, 12));
    last = register_module("last", torch::nn::Linear(12, 2));
    to(at::kDouble);
  }
  at::Tensor forward(at::Tensor x) {
    x = torch::tanh(first(x));
    // The block's weights are used three times.
    for (int i = 0; i < 3; ++i) x = recompute ? Recompute::apply(x, &block) : torch::tanh(block(x));
    return last(x).pow(2).mean();
  }
  bool recompute;
  torch::nn::Linear first{nullptr}, block{nullptr}, last{nullptr};
};

TEST(DdpGraph, DDP08_static_graph_serves_shared_and_recomputed_blocks) {
  auto log = std::make_shared<CallLog>();
  auto model = std::make_shared<CheckpointedImpl>(true);
  DistributedDataParallel parallel(model, group().recorded(log),
                                   {.static_graph = true, .bucket_cap_mb = 1e-5, .first_bucket_mb = 1e-5});
  Clock::time_point last_gradient;
  model->first->weight.register_hook([&](const at::Tensor&) { last_gradient = Clock::now(); });
  for (int64_t step = 0; step < 4; ++step) {
    log->clear();
    model->zero_grad();
    parallel.forward(batch(group().rank(), step)).backward();
    CheckpointedImpl reference(false);
    for (int rank = 0; rank < group().size(); ++rank) {
      (reference.forward(batch(rank, step)) / group().size()).backward();
    }
    ASSERT_LT(difference(test::gradients(*model), test::gradients(reference)), 1e-12) << step;
    const auto records = log->records();
    const auto reduction = std::find_if(records.begin(), records.end(),
                                        [](const CallRecord& record) { return record.op == Op::all_reduce; });
    // The first backward only records arrivals; later ones overlap.
    EXPECT_EQ(reduction->issued > last_gradient, step == 0) << step;
  }
}

TEST(DdpGraph, DDP08_a_changed_graph_is_an_error) {
  auto model = std::make_shared<BranchImpl>();
  DistributedDataParallel parallel(model, group(), {.static_graph = true});
  parallel.forward(batch(group().rank(), 0), 1).backward();
  EXPECT_THROW(parallel.forward(batch(group().rank(), 1), 3).backward(), UsageError);
  parallel.abandon_step();
  model->zero_grad();
  parallel.forward(batch(group().rank(), 2), 1).backward();
  expect_equal(test::gradients(*model), expected([](BranchImpl& m, int rank) { return m.forward(batch(rank, 2), 1); }));
}

TEST(DdpGraph, DDP08_recomputation_without_static_graph_is_an_error_that_says_so) {
  auto model = std::make_shared<CheckpointedImpl>(true);
  DistributedDataParallel parallel(model, group());
  EXPECT_THROW(
      {
        parallel.forward(batch(group().rank(), 0)).backward();
        parallel.forward(batch(group().rank(), 1)).backward();
      },
      UsageError);
}

}  // namespace
}  // namespace shoal::ddp_graph_test
