// Strategies with all shards on each host: OSS over by_host() under ShardedDataParallel, and DistributedOptimizer with
// shard_within_host.

#include <gmock/gmock.h>
#include <torch/nn/utils/clip_grad.h>

#include "shoal/call_log.h"
#include "shoal/checkpoint.h"
#include "shoal/hooks.h"
#include "shoal/megatron.h"
#include "shoal/zero.h"
#include "tests/strategy/by_host.h"
#include "tests/support/forked_hosts.h"
#include "tests/support/models.h"
#include "tests/support/temp_folder.h"

namespace shoal::by_host_test {
namespace {

using namespace by_host;  // NOLINT(google-build-using-namespace): helpers of this folder's tests
using ::testing::HasSubstr;

// One process that sees the batches of all ranks.
class Reference {
 public:
  explicit Reference(int ranks) : ranks_(ranks), model_(model_of(0)), optimizer_(model_->parameters(), adam) {}
  void step(int64_t number) {
    optimizer_.zero_grad();
    for (int rank = 0; rank < ranks_; ++rank) {
      for (int64_t micro = 0; micro < micro_batches; ++micro) {
        (test::mean_loss(model_->forward(test::batch(rank, number, micro))) / ranks_).backward();
      }
    }
    torch::nn::utils::clip_grad_norm_(model_->parameters(), max_norm);
    optimizer_.step();
  }
  test::Mlp& model() { return model_; }

 private:
  int ranks_;
  test::Mlp model_;
  torch::optim::Adam optimizer_;
};

// Equal where all bits are.
std::string digest(const torch::nn::Module& model) {
  std::vector<at::Tensor> flat;
  for (const auto& parameter : model.parameters()) flat.push_back(parameter.detach().flatten().to(at::kDouble));
  const auto all = at::cat(flat);
  return fmt::format("{:a}", at::dot(all, at::arange(1, all.numel() + 1, all.options())).item<double>());
}

// Every rank has computed the same bits.
std::string all_equal(const Group& group, const torch::nn::Module& model) {
  std::vector<at::Tensor> parameters;
  for (const auto& parameter : model.parameters()) parameters.push_back(parameter.detach().flatten().to(at::kDouble));
  const auto own = at::cat(parameters);
  auto first = own.clone();
  group.broadcast(first, 0).wait();
  return at::equal(own, first) ? "" : "this rank's parameters are not those of rank 0";
}

std::string train_zero2(const World& world) {
  Reference reference(world.size());
  auto model = model_of(world.rank());
  Adam optimizer(model->parameters(), adam, world.group().by_host());
  ShardedDataParallelOptions options;
  options.reduce_buffer_size = 100;  // several buckets
  Parallel parallel(model.ptr(), optimizer, world.group(), options);
  for (int64_t number = 0; number < 6; ++number) {
    if (number == 3) {
      for (const auto& frozen : {model, reference.model()}) frozen->second->weight.set_requires_grad(false);
      reference.model()->second->weight.mutable_grad().reset();
    }
    if (number == 5) {
      for (const auto& thawed : {model, reference.model()}) thawed->second->weight.set_requires_grad(true);
    }
    {
      const auto accumulate = parallel.no_sync();
      test::mean_loss(parallel.forward(test::batch(world.rank(), number, 0))).backward();
    }
    test::mean_loss(parallel.forward(test::batch(world.rank(), number, 1))).backward();
    optimizer.clip_grad_norm(max_norm);
    optimizer.step();
    optimizer.zero_grad();
    reference.step(number);
  }
  const auto error = test::difference(model->parameters(), reference.model()->parameters());
  if (error > 1e-10) return fmt::format("differs from one process by {}", error);
  return all_equal(world.group(), *model);
}

std::string train_megatron(const World& world, bool overlap) {
  Reference reference(world.size());
  auto model = model_of(world.rank());
  DistributedOptimizerOptions options;
  options.shard_within_host = true;
  options.bucket_size = 100;
  options.clip_grad = max_norm;
  options.overlap_grad_reduce = overlap;
  DistributedOptimizer<torch::optim::Adam> optimizer(model, adam, world.group(), options);
  if (optimizer.group().size() != world.size()) return "group() is not that of all ranks";
  for (int64_t number = 0; number < 6; ++number) {
    {
      const auto accumulate = optimizer.no_sync();
      test::mean_loss(model->forward(test::batch(world.rank(), number, 0))).backward();
    }
    test::mean_loss(model->forward(test::batch(world.rank(), number, 1))).backward();
    optimizer.step();
    optimizer.zero_grad();
    reference.step(number);
  }
  const auto error = test::difference(model->parameters(), reference.model()->parameters());
  if (error > 1e-10) return fmt::format("differs from one process by {}", error);
  return all_equal(world.group(), *model);
}

TEST_F(ByHost, SDP01_gradients_are_the_mean_over_all_ranks_of_all_hosts) {
  for (const auto& hosts : kinds) run(hosts, train_zero2);
}

TEST_F(ByHost, MEG01_gradients_are_the_mean_over_all_ranks_of_all_hosts) {
  for (const auto& hosts : kinds) {
    for (const bool overlap : {true, false}) {
      run(hosts, [&](const World& world) { return train_megatron(world, overlap); });
    }
  }
}

// Within the host each gradient goes to its owner; between hosts the owners exchange their own, a half of the model
// each.
TEST_F(ByHost, SDP02_MEG02_what_is_sent_within_and_between_hosts) {
  run({2, 2}, [](const World& world) -> std::string {
    const auto log = std::make_shared<CallLog>();
    const auto group = world.group().recorded(log);
    const auto bytes = [&](Op op, int ranks) {
      int64_t sum = 0;
      for (const auto& call : log->records()) {
        const bool gradients = call.label.what.find("gradients of") != std::string::npos;
        const auto members = call.group == "world" ? 4 : 2;
        if (gradients && call.op == op && members == ranks) sum += call.bytes;
      }
      return sum;
    };
    auto model = model_of(0);
    Adam optimizer(model->parameters(), adam, group.by_host());
    Parallel parallel(model.ptr(), optimizer, group);
    int64_t all = 0;
    int64_t own = 0;
    for (const auto& parameter : model->parameters()) all += static_cast<int64_t>(parameter.nbytes());
    for (const auto& parameter : optimizer.local_params()) own += static_cast<int64_t>(parameter.nbytes());
    // Pieces of a bucket begin at multiples of 64 bytes.
    const auto is_about = [](int64_t sent, int64_t bytes) { return sent >= bytes && sent < bytes + 6 * 64; };
    log->clear();
    test::mean_loss(parallel.forward(test::batch(world.rank(), 0))).backward();
    if (!is_about(bytes(Op::reduce, 2), all)) return fmt::format("{} bytes reduced, of {}", bytes(Op::reduce, 2), all);
    if (!is_about(bytes(Op::all_reduce, 2), own))
      return fmt::format("{} bytes between hosts, of {}", bytes(Op::all_reduce, 2), own);
    if (bytes(Op::all_reduce, 4) + bytes(Op::reduce, 4) != 0) return "gradients of all ranks in one operation";

    auto other = model_of(1);
    DistributedOptimizer<torch::optim::Adam> megatron(other, adam, group, {.shard_within_host = true});
    log->clear();
    test::mean_loss(other->forward(test::batch(world.rank(), 0))).backward();
    const auto scattered = bytes(Op::reduce_scatter, 2);
    if (scattered < all || scattered > all + 2048) return fmt::format("{} bytes scattered, of {}", scattered, all);
    if (bytes(Op::all_reduce, 2) * 2 != scattered) return "not half of it between hosts";
    const auto ranges = megatron.param_range_map();
    const auto of_host_mate = megatron.param_range_map(world.rank() ^ 1);
    const auto of_replica = megatron.param_range_map((world.rank() + 2) % 4);
    if (ranges.empty() || ranges.size() + of_host_mate.size() < other->parameters().size()) return "ranges are missing";
    if (of_replica.size() != ranges.size() || of_replica.front().world.begin != ranges.front().world.begin) {
      return "the other host's owner has other ranges";
    }
    return "";
  });
}

TEST_F(ByHost, SDP01_MEG01_a_hook_makes_the_sum_between_hosts) {
  run({2, 2}, [](const World& world) -> std::string {
    const auto train = [&](bool hook) {
      auto model = model_of(0, at::kFloat);
      Adam optimizer(model->parameters(), adam, world.group().by_host());
      ShardedDataParallelOptions options;
      if (hook) options.communication_hook = std::make_shared<CompressHook>(at::kBFloat16);
      Parallel parallel(model.ptr(), optimizer, world.group(), options);
      test::mean_loss(parallel.forward(test::batch(world.rank(), 0).to(at::kFloat))).backward();
      std::vector<at::Tensor> gradients;
      for (const auto& parameter : optimizer.local_params()) gradients.push_back(parameter.grad().clone());
      return gradients;
    };
    const auto error = test::difference(train(true), train(false));
    return error > 0 && error < 2e-2 ? "" : fmt::format("gradients differ by {}", error);
  });
}

TEST_F(ByHost, BEY05_a_checkpoint_of_equal_hosts_goes_on_with_unequal_ones_and_back) {
  const test::TempFolder folder;
  const auto steps = [](const World& world, auto&& each) {
    for (int64_t number = 0; number < 3; ++number) each(test::batch(world.rank() % 2, number));
  };
  // Every rank has the batches of rank 0 or 1, so that the mean over equally many of both is that of two ranks.
  const auto body = [&](const World& world, bool first) -> std::string {
    auto model = model_of(first ? 0 : 5);
    Adam optimizer(model->parameters(), adam, world.group().by_host());
    Parallel parallel(model.ptr(), optimizer, world.group());
    TrainingState training(parallel, optimizer);
    if (!first) load(folder.path(), training);
    steps(world, [&](const at::Tensor& x) {
      test::mean_loss(parallel.forward(x)).backward();
      optimizer.step();
      optimizer.zero_grad();
    });
    if (first) save(folder.path(), training, {.step = 3});
    return digest(*model).empty() ? "no digest" : all_equal(world.group(), *model);
  };
  run({2, 2}, [&](const World& world) { return body(world, true); });
  run({1, 3}, [&](const World& world) { return body(world, false); });
  run({1, 1}, [&](const World& world) -> std::string {
    auto model = model_of(6);
    DistributedOptimizer<torch::optim::Adam> optimizer(model, adam, world.group(), {.shard_within_host = true});
    TrainingState training(optimizer);
    load(folder.path(), training);
    auto again = model_of(0);
    torch::optim::Adam reference(again->parameters(), adam);
    for (int64_t number = 0; number < 3; ++number) {
      reference.zero_grad();
      for (int rank = 0; rank < 2; ++rank) (test::mean_loss(again->forward(test::batch(rank, number))) / 2).backward();
      reference.step();
    }
    const auto error = test::difference(model->parameters(), again->parameters());
    return error < 1e-10 ? "" : fmt::format("differs from one process by {}", error);
  });
}

TEST_F(ByHost, SDP01_values_that_hosts_write_differently_are_refused) {
  for (const auto& hosts : {std::vector<int>{2, 2}, {1, 2}, {2, 1}}) {
    for (const bool everywhere : {true, false}) {
      const auto body = [&](const World& world) {
        auto model = model_of(0);
        Adam optimizer(model->parameters(), adam, world.group().by_host());
        Parallel parallel(model.ptr(), optimizer, world.group());
        const auto step = [&](int64_t number) {
          test::mean_loss(parallel.forward(test::batch(world.rank(), number))).backward();
          optimizer.step();
          optimizer.zero_grad();
        };
        step(0);
        const bool first_host = world.rank() < hosts[0];
        const auto write = [&](const auto& act) {
          const torch::NoGradGuard no_grad;
          act();
        };
        write([&] {
          for (auto& parameter : model->parameters()) parameter.mul_(0.5);  // alike
        });
        step(1);
        if (everywhere || first_host) write([&] { model->second->bias.fill_(first_host ? 1.0 : 2.0); });
        return test::refusal<DisagreeError>([&] { step(2); });
      };
      run(hosts, body, HasSubstr("values of parameters that were loaded or written"));
    }
  }
}

TEST_F(ByHost, SDP09_parameters_that_come_later_have_the_values_of_rank_0) {
  for (const auto& hosts : {std::vector<int>{2, 2}, {1, 2}, {2, 3}}) {
    for (const bool before : {true, false}) {
      run(hosts, [&](const World& world) -> std::string {
        auto model = model_of(world.rank());
        const auto all = model->parameters();
        Adam optimizer(std::vector<at::Tensor>(all.begin(), all.begin() + 4), adam, world.group().by_host());
        const auto add = [&] {
          optimizer.add_param_group(torch::optim::OptimizerParamGroup(std::vector{all[4], all[5]}));
        };
        if (before) add();
        if (!before) model->third->weight.set_requires_grad(false), model->third->bias.set_requires_grad(false);
        Parallel parallel(model.ptr(), optimizer, world.group());
        const auto step = [&](int64_t number) {
          test::mean_loss(parallel.forward(test::batch(world.rank(), number))).backward();
          optimizer.step();
          optimizer.zero_grad();
        };
        step(0);
        if (!before) {
          const torch::NoGradGuard no_grad;
          torch::manual_seed(10 + world.rank());
          model->third->weight.uniform_(-1, 1);
          model->third->weight.set_requires_grad(true);
          model->third->bias.set_requires_grad(true);
          add();
        }
        step(1);
        step(2);
        return all_equal(world.group(), *model);
      });
    }
  }
}

// Ranks of a host may agree where hosts do not.
TEST_F(ByHost, OSS01_gradients_beside_the_module_are_compared_over_hosts) {
  const auto step = [](const World& world) {
    auto model = model_of(0);
    const auto beside = torch::ones({}, torch::dtype(at::kDouble).requires_grad(true));
    auto parameters = model->parameters();
    parameters.push_back(beside);
    Adam optimizer(parameters, adam, world.group().by_host());
    Parallel parallel(model.ptr(), optimizer, world.group(), {.log_sizes = false});
    (test::mean_loss(parallel.forward(test::batch(world.rank(), 0, 0))) * beside).backward();
    return test::refusal<DisagreeError>([&] { optimizer.step(); });
  };
  run({1, 1}, step, HasSubstr("gradients that no wrapper averages, of parameters outside of the wrapped modules"));
}

}  // namespace
}  // namespace shoal::by_host_test
