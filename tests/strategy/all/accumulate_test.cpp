// Gradients between steps: what no_sync accumulates where, and what zero_grad drops (rows SDP05 and MEG12).

#include <torch/optim/sgd.h>
#include <torch/types.h>

#include "shoal/error.h"
#include "shoal/megatron.h"
#include "shoal/zero.h"
#include "tests/support/models.h"
#include "tests/support/world.h"

namespace shoal::accumulate_test {
namespace {

using test::batch;
using test::difference;
using test::group;
using test::mean_loss;
using test::Mlp;
using test::seeded;

const torch::optim::SGDOptions sgd = torch::optim::SGDOptions(0.1).momentum(0.9);

// Sum over one rank's micro-batches, or the mean over ranks of these sums.
std::vector<at::Tensor> local_sums(int rank, int64_t micros) {
  auto model = seeded(1);
  for (int64_t micro = 0; micro < micros; ++micro) mean_loss(model->forward(batch(rank, 0, micro))).backward();
  return test::gradients(*model);
}
std::vector<at::Tensor> mean_of_sums(int64_t micros) {
  auto total = local_sums(0, micros);
  for (int rank = 1; rank < group().size(); ++rank) {
    const auto other = local_sums(rank, micros);
    for (size_t i = 0; i < total.size(); ++i) total[i] += other[i];
  }
  for (auto& gradient : total) gradient /= group().size();
  return total;
}

TEST(ShardedDdp, SDP05_no_sync_accumulates_in_place_and_the_next_backward_reduces_the_sum) {
  const auto log = std::make_shared<CallLog>();
  const auto recorded = group().recorded(log);
  auto model = seeded(1);
  OSS<torch::optim::SGD> optimizer(model->parameters(), sgd, recorded);
  ShardedDataParallel parallel(model, optimizer, recorded);
  // Buckets follow the order of the first backward from the second one on.
  for (int i = 0; i < 2; ++i) mean_loss(parallel.forward(batch(group().rank(), 0))).backward();
  const auto one_step = [&](int64_t accumulated) {
    optimizer.zero_grad();
    for (int64_t micro = 0; micro <= accumulated; ++micro) {
      const auto scope = parallel.no_sync(micro < accumulated);
      log->clear();
      std::vector<void*> memory;
      for (const auto& parameter : model->parameters()) {
        memory.push_back(micro > 0 ? parameter.grad().data_ptr() : nullptr);
      }
      mean_loss(parallel.forward(batch(group().rank(), 0, micro))).backward();
      if (micro == accumulated) break;
      EXPECT_TRUE(log->records().empty()) << "nobody is told of micro-batch " << micro;
      EXPECT_LT(difference(test::gradients(*model), local_sums(group().rank(), micro + 1)), 1e-12);
      for (size_t i = 0; i < memory.size() && micro > 0; ++i) {
        EXPECT_EQ(model->parameters()[i].grad().data_ptr(), memory[i]) << "accumulates in place";
      }
    }
    return std::make_pair(log->records().size(), log->bytes(Op::reduce) + log->bytes(Op::reduce_scatter));
  };
  const auto alone = one_step(0);
  EXPECT_EQ(one_step(2), alone) << "three micro-batches cost the collectives of one";
  const auto expected = mean_of_sums(3);
  for (size_t i = 0; i < expected.size(); ++i) {
    const auto& gradient = model->parameters()[i].grad();
    if (optimizer.param_to_rank(model->parameters()[i]) == group().rank()) {
      EXPECT_LT(difference({gradient}, {expected[i]}), 1e-12);
    } else {
      EXPECT_THROW(gradient.sum(), UsageError) << "a stand-in";
    }
  }
}

TEST(Megatron, MEG12_zero_grad_drops_the_gradients_of_all_groups) {
  for (const bool set_to_none : {true, false}) {
    for (const bool overlap : {true, false}) {
      auto model = seeded(1);
      auto reference = seeded(1);
      const auto halves = [&](const Mlp& whole) {
        auto body = whole->first->parameters();
        for (const auto& parameter : whole->second->parameters()) body.push_back(parameter);
        std::vector<torch::optim::OptimizerParamGroup> groups;
        groups.emplace_back(body);
        groups.emplace_back(whole->third->parameters(), std::make_unique<torch::optim::SGDOptions>(0.01));
        return groups;
      };
      DistributedOptimizer<torch::optim::SGD> optimizer({model.ptr()}, halves(model), sgd, group(),
                                                        {.overlap_grad_reduce = overlap});
      torch::optim::SGD whole(halves(reference), sgd);
      // Gradients of a batch that the loop discards, accumulated or already reduced, then a real step, which would
      // include leftovers.
      for (int64_t step = 0; step < 3; ++step) {
        for (const bool accumulate : {false, true}) {
          const auto scope = optimizer.no_sync(accumulate);
          mean_loss(100 * model->forward(batch(group().rank(), 50 + step))).backward();
        }
        optimizer.zero_grad(set_to_none);
        for (const auto& parameter : model->parameters()) {
          if (parameter.grad().defined()) {
            EXPECT_FALSE(set_to_none);
            EXPECT_EQ(parameter.grad().count_nonzero().item<int64_t>(), 0);
          }
        }
        mean_loss(model->forward(batch(group().rank(), step))).backward();
        optimizer.step();
        optimizer.zero_grad(set_to_none);
        whole.zero_grad();
        for (int rank = 0; rank < group().size(); ++rank) {
          (mean_loss(reference->forward(batch(rank, step))) / group().size()).backward();
        }
        whole.step();
      }
      EXPECT_LT(difference(model->parameters(), reference->parameters()), 1e-12) << set_to_none << overlap;
    }
  }
}

}  // namespace
}  // namespace shoal::accumulate_test
