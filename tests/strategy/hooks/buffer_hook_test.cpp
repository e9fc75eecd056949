// Buffer hooks (DDP10): they replace rank 0's broadcast, before or after forward.

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "shoal/ddp.h"
#include "shoal/error.h"
#include "shoal/join.h"
#include "shoal/optim.h"
#include "shoal/zero.h"
#include "tests/support/models.h"
#include "tests/support/world.h"

namespace shoal::buffer_hook_test {
namespace {

using test::batch;
using test::difference;
using test::group;

struct NormedImpl : torch::nn::Module {
  NormedImpl() {
    torch::manual_seed(5);
    linear = register_module("linear", torch::nn::Linear(12, 6));
    norm = register_module("norm", torch::nn::BatchNorm1d(6));
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) {
    if (fail) throw std::runtime_error("injected");
    return norm(linear(x)).pow(3).mean();
  }
  torch::nn::Linear linear{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  bool fail = false;
};

// Mean of floating-point buffers over ranks, in one collective; other buffers are not changed.
class Averaging : public BufferHook {
 public:
  PendingExchange begin(const Group& among, const std::vector<NamedBuffer>& buffers, int lead,
                        const Label& label) override {
    ++calls;
    leads.push_back(lead);
    std::vector<at::Tensor> flat;
    for (const auto& entry : buffers) {
      if (entry.buffer.is_floating_point()) flat.push_back(entry.buffer.reshape({-1}));
    }
    auto all = at::cat(flat);
    return {.work = among.all_reduce(all, ReduceOp::avg, label), .finish = [this, all, buffers] {
              ++finished;
              int64_t begin = 0;
              for (const auto& entry : buffers) {
                if (!entry.buffer.is_floating_point()) continue;
                entry.buffer.copy_(all.narrow(0, begin, entry.buffer.numel()).view(entry.buffer.sizes()));
                begin += entry.buffer.numel();
              }
            }};
  }
  int calls = 0;
  int finished = 0;
  std::vector<int> leads;
};

// Statistics of one rank after its forward in `step`, starting from `before`.
at::Tensor updated(const at::Tensor& mean, NormedImpl& model, int rank, int64_t step) {
  const torch::NoGradGuard no_grad;
  return 0.9 * mean + 0.1 * model.linear(batch(rank, step)).mean(0);
}

template <class Step>
void averages_as_by_hand(BufferHookLocation location, NormedImpl& model, Averaging& hook, const Step& train) {
  std::vector<at::Tensor> means(group().size(), at::zeros({6}, at::kDouble));
  const auto average = [&] {
    auto sum = at::zeros({6}, at::kDouble);
    for (const auto& mean : means) sum += mean;
    for (auto& mean : means) mean = sum / group().size();
  };
  for (int64_t step = 0; step < 4; ++step) {
    if (location == BufferHookLocation::pre_forward) average();
    for (int rank = 0; rank < group().size(); ++rank) means[rank] = updated(means[rank], model, rank, step);
    if (location == BufferHookLocation::post_forward) average();
    train(step);
    ASSERT_LT(difference({model.norm->running_mean}, {means[group().rank()]}), 1e-12) << "step " << step;
    ASSERT_EQ(hook.calls, step + 1);
    ASSERT_EQ(hook.finished, step + 1);
  }
}

TEST(BufferHooks, DDP10_an_averaging_hook_before_or_after_forward_equals_the_mean_by_hand) {
  for (const auto location : {BufferHookLocation::pre_forward, BufferHookLocation::post_forward}) {
    auto model = std::make_shared<NormedImpl>();
    auto log = std::make_shared<CallLog>();
    const auto hook = std::make_shared<Averaging>();
    DistributedDataParallel parallel(model, group().recorded(log),
                                     {.buffer_hook = hook, .buffer_hook_location = location});
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    log->clear();
    averages_as_by_hand(location, *model, *hook, [&](int64_t step) {
      optimizer.zero_grad();
      parallel.forward(batch(group().rank(), step)).backward();
      optimizer.step();
    });
    int64_t broadcasts = 0;
    for (const auto& record : log->records()) {
      broadcasts += record.op == Op::broadcast && record.label.what == "buffers" ? 1 : 0;
    }
    EXPECT_EQ(broadcasts, 0) << "the hook takes its place";
  }
}

TEST(BufferHooks, DDP10_under_zero2_too) {
  for (const auto location : {BufferHookLocation::pre_forward, BufferHookLocation::post_forward}) {
    auto model = std::make_shared<NormedImpl>();
    const auto hook = std::make_shared<Averaging>();
    OSS<FusedSGD> optimizer(model->parameters(), torch::optim::SGDOptions(0.1), group());
    ShardedDataParallel parallel(model, optimizer, group(), {.buffer_hook = hook, .buffer_hook_location = location});
    averages_as_by_hand(location, *model, *hook, [&](int64_t step) {
      optimizer.zero_grad();
      parallel.forward(batch(group().rank(), step)).backward();
      optimizer.step();
    });
  }
}

TEST(BufferHooks, DDP10_is_not_called_under_no_sync_nor_in_evaluation) {
  for (const auto location : {BufferHookLocation::pre_forward, BufferHookLocation::post_forward}) {
    auto model = std::make_shared<NormedImpl>();
    const auto hook = std::make_shared<Averaging>();
    DistributedDataParallel parallel(model, group(), {.buffer_hook = hook, .buffer_hook_location = location});
    {
      const auto local = parallel.no_sync();
      parallel.forward(batch(group().rank(), 0)).backward();
    }
    EXPECT_EQ(hook->calls, 0);
    parallel.forward(batch(group().rank(), 1)).backward();
    EXPECT_EQ(hook->calls, 1);
    const torch::NoGradGuard no_grad;
    parallel.forward(batch(group().rank(), 1));
    EXPECT_EQ(hook->calls, 1);
  }
}

TEST(BufferHooks, DDP10_a_rank_whose_forward_fails_takes_part) {
  if (group().size() == 1) GTEST_SKIP() << "nobody waits";
  for (const auto location : {BufferHookLocation::pre_forward, BufferHookLocation::post_forward}) {
    auto model = std::make_shared<NormedImpl>();
    const auto hook = std::make_shared<Averaging>();
    DistributedDataParallel parallel(model, group(), {.buffer_hook = hook, .buffer_hook_location = location});
    const auto step = [&](int64_t number) { parallel.forward(batch(group().rank(), number)).backward(); };
    step(0);
    model->fail = group().rank() == 1;
    if (model->fail) {
      EXPECT_THROW(step(1), std::runtime_error);
    } else {
      EXPECT_THROW(step(1), StepAbandoned);
    }
    model->fail = false;
    step(2);
    step(3);
    EXPECT_EQ(hook->calls, 4);
    EXPECT_EQ(hook->finished, 4);
  }
}

TEST(BufferHooks, DDP10_a_rank_without_a_batch_takes_part_in_a_join) {
  for (const auto location : {BufferHookLocation::pre_forward, BufferHookLocation::post_forward}) {
    auto model = std::make_shared<NormedImpl>();
    const auto hook = std::make_shared<Averaging>();
    DistributedDataParallel parallel(model, group(), {.buffer_hook = hook, .buffer_hook_location = location});
    Join join({parallel});
    int64_t step = 0;
    for (; join.next(step < 2 + group().rank()); ++step) {
      if (join.active()) {
        parallel.forward(batch(group().rank(), step)).backward();
      } else {
        parallel.shadow();
      }
    }
    EXPECT_EQ(hook->calls, step);
    EXPECT_EQ(hook->finished, step);
    EXPECT_EQ(hook->leads.back(), group().size() - 1) << "the last one that has a batch";
  }
}

TEST(BufferHooks, DDP10_a_hook_that_would_never_be_called_is_refused) {
  auto model = std::make_shared<NormedImpl>();
  DistributedDataParallelOptions options{.broadcast_buffers = false, .buffer_hook = std::make_shared<Averaging>()};
  EXPECT_THROW(DistributedDataParallel(model, group(), options), UsageError);
}

}  // namespace
}  // namespace shoal::buffer_hook_test
