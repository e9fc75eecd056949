// What an elastic job with second owners of shards refuses, by one error on all ranks.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/elastic/elastic_second.h"
#include "tests/support/refusal.h"

namespace shoal::elastic_second_refusal_test {
namespace {

using test::backward_of;
using test::ElasticSecondOwner;
using test::ForkedHosts;
using test::fsdp_of;
using test::fully_sharded;
using test::group_of;
using test::name_of;
using test::over;
using test::quick;
using test::Trained;

TEST_F(ElasticSecondOwner, ELA02_options_that_differ_are_named_before_the_update) {
  ForkedHosts hosts(
      {1, 1},
      [](const World& world) {
        alarm(30);
        const auto net = std::make_shared<test::Net>();
        const auto wrapped = test::wrap_as(fully_sharded[0], net, world.group());
        const auto elastic = wrapped.elastic(world, quick);
        const auto x = test::inputs_of({1, 2});
        wrapped.optimizer->param_groups()[0].options().set_lr(0.01 * (1 + world.rank()));
        return test::refusal<DisagreeError>([&] {
          elastic->step(
              2, [&] { backward_of(wrapped, x); }, [&] { wrapped.step(); });
        });
      },
      over("tcp"));
  for (const auto& one : hosts.wait(20))
    EXPECT_THAT(one.text, testing::HasSubstr("different options of the optimizer"));
}

// A change of the gradients behind the commit would be one of the first owners alone.
TEST_F(ElasticSecondOwner, ELA02_gradients_that_change_in_the_update_are_refused) {
  for (const auto& [zeroes, kind] : {std::pair(false, 0), {true, 0}, {true, 6}, {true, 7}}) {
    ForkedHosts hosts(
        {1, 1},
        [&, zeroes = zeroes, kind = static_cast<size_t>(kind)](const World& world) {
          alarm(30);
          const auto net = std::make_shared<test::Net>();
          const auto wrapped = test::wrap_as(fully_sharded[kind], net, world.group());
          const auto elastic = wrapped.elastic(world, quick);
          const auto x = test::inputs_of({1, 2});
          const auto update = [&] {
            if (zeroes) net->parameters()[0].mutable_grad().zero_();
            if (!zeroes) fsdp_of(wrapped).own_gradients()[0].mul_(2);
            wrapped.step();
          };
          return test::refusal([&] {
            elastic->step(
                2, [&] { backward_of(wrapped, x); }, update);
          });
        },
        over("tcp"));
    for (const auto& one : hosts.wait(20))
      EXPECT_THAT(one.text, testing::HasSubstr("gradients were changed in the second function"));
  }
}

// On two hosts: what the step after `change` is refused with.
template <class Error>
void expect_refused_after(const Trained& trained, const std::function<void(const test::Wrapped&)>& change,
                          const std::string& text) {
  ForkedHosts hosts(
      {1, 1},
      [&](const World& world) {
        alarm(30);
        const auto net = std::make_shared<test::Net>();
        const auto wrapped = test::wrap_as(trained, net, world.group());
        const auto elastic = wrapped.elastic(world, quick);
        const auto x = test::inputs_of({1, 2});
        const auto step = [&] {
          elastic->step(
              2, [&] { backward_of(wrapped, x); }, [&] { wrapped.step(); });
          wrapped.optimizer->zero_grad();
        };
        step();
        change(wrapped);
        return test::refusal<Error>(step);
      },
      over("tcp"));
  for (const auto& one : hosts.wait(20)) EXPECT_THAT(one.text, testing::HasSubstr(text));
}

TEST_F(ElasticSecondOwner, ELA02_optimizer_state_that_is_loaded_later_is_refused) {
  expect_refused_after<UsageError>(
      fully_sharded[0],
      [](const test::Wrapped& wrapped) {
        const auto state = wrapped.by_range()->state_dict();
        if (group_of(wrapped).rank() == 0) wrapped.by_range()->load_state_dict(state);
      },
      "rank 0 has loaded or replaced the state");
  expect_refused_after<UsageError>(
      fully_sharded[6],
      [](const test::Wrapped& wrapped) {
        const auto& module = wrapped.parallel->module();
        wrapped.oss()->load_state_dict(*module, wrapped.oss()->state_dict(*module));
      },
      "load it before Elastic is constructed");
}

// Values come to all ranks from the first owner; state does not.
TEST_F(ElasticSecondOwner, ELA02_optimizer_state_that_only_one_owner_has_is_found) {
  for (const size_t kind : {0, 1, 4, 6, 7}) {
    SCOPED_TRACE(name_of(fully_sharded[kind]));
    expect_refused_after<DisagreeError>(
        fully_sharded[kind],
        [](const test::Wrapped& wrapped) {
          if (group_of(wrapped).rank() != 1) return;
          for (const auto& tensor : state_tensors(*wrapped.share())) tensor.mul_(2);
        },
        "rank 0 and rank 1, which own the same shards in an elastic job, have different values of them or optimizer "
        "state");
  }
}

// Past the operators and the wrapper, so that only the first owners have it.
TEST_F(ElasticSecondOwner, ELA02_values_that_only_first_owners_have_are_found) {
  const std::string said = "rank 0 and rank 1, which own the same shards in an elastic job, have different";
  expect_refused_after<DisagreeError>(
      fully_sharded[0],
      [](const test::Wrapped& wrapped) {
        for (const auto& values : fsdp_of(wrapped).own_parameters()) values.detach().add_(1);
      },
      said);
  expect_refused_after<DisagreeError>(
      fully_sharded[6],
      [](const test::Wrapped& wrapped) {
        for (const auto& parameter : wrapped.oss()->local_params()) {
          std::fill_n(parameter.data_ptr<float>(), parameter.numel(), 1.5F);
        }
      },
      said);
}

// Without second owners, nobody else looks at them.
TEST_F(ElasticSecondOwner, ELA02_gradients_that_only_first_owners_change_are_found) {
  ForkedHosts hosts(
      {1, 1},
      [](const World& world) {
        alarm(30);
        const auto net = std::make_shared<test::Net>();
        const auto wrapped = test::wrap_as(fully_sharded[6], net, world.group());
        const auto elastic = wrapped.elastic(world, quick);
        const auto x = test::inputs_of({1, 2});
        const auto compute = [&] {
          backward_of(wrapped, x);
          for (const auto& parameter : wrapped.oss()->local_params()) parameter.grad().clamp_(-1e-3, 1e-3);
        };
        return test::refusal<DisagreeError>([&] { elastic->step(2, compute, [&] { wrapped.step(); }); });
      },
      over("tcp"));
  for (const auto& one : hosts.wait(20)) {
    EXPECT_THAT(one.text, testing::HasSubstr("rank 0 and rank 1, which own the same parameters"));
  }
}

// There, behind its own update, a rank has none of the others'. Whatever one rank does with its error, all get it.
void read_early(const Trained& trained, bool caught) {
  ForkedHosts hosts(
      {1, 1, 1},
      [&](const World& world) {
        alarm(30);
        const auto net = std::make_shared<test::Net>();
        const auto wrapped = test::wrap_as(trained, net, world.group());
        const auto elastic = wrapped.elastic(world, quick);
        const auto x = test::inputs_of({1, 2, 3});
        const auto read = [&] { net->parameters()[0].sum(); };
        const auto step = [&](bool reads) {
          const auto update = [&] {
            read();
            wrapped.step();
            if (!reads) return;
            if (!caught) read();
            test::refusal(read);
          };
          elastic->step(
              2, [&] { backward_of(wrapped, x); }, update);
        };
        step(false);
        read();
        wrapped.optimizer->zero_grad();
        const auto said = test::refusal([&] { step(world.rank() == 1); });
        wrapped.optimizer->zero_grad();
        step(false);  // no rank has left the job
        return fmt::format("{} of {}", said, world.size());
      },
      over("tcp"));
  for (const auto& one : hosts.wait(20)) {
    EXPECT_THAT(one.text, testing::AllOf(testing::StartsWith("rank 1: parameter "),
                                         testing::HasSubstr("has not come from the ranks that have updated it"),
                                         testing::EndsWith(" of 3")));
  }
}

TEST_F(ElasticSecondOwner,
       ELA02_parameters_that_have_not_come_from_all_ranks_are_an_error_on_all_where_one_reads_them) {
  for (const auto& trained : {fully_sharded[4], fully_sharded[6]}) {
    for (const bool caught : {true, false}) {
      SCOPED_TRACE(fmt::format("{}, {}", name_of(trained), caught ? "caught" : "not caught"));
      read_early(trained, caught);
    }
  }
}

std::string refused(const World& world, const FullyShardedDataParallelOptions& options, bool frozen) {
  const auto net = std::make_shared<test::Net>();
  if (frozen) net->first->weight.requires_grad_(false);
  FullyShardedDataParallel<test::Net> parallel(net, world.group(), options);
  FullyShardedOptimizer<FusedAdamW> optimizer(parallel, torch::optim::AdamWOptions(1e-3));
  return test::refusal([&] { const Elastic elastic(world, parallel, optimizer, quick); });
}

TEST_F(ElasticSecondOwner, ELA04_what_has_no_second_owners_is_refused_by_name) {
  FullyShardedDataParallelOptions hooked, hybrid;
  hooked.communication_hook = std::make_shared<SumHook>();
  hybrid.sharding_strategy = ShardingStrategy::hybrid_shard;
  struct Case {
    FullyShardedDataParallelOptions options;
    bool frozen;
    std::string said;
  };
  for (const auto& one : {Case{{}, true, "frozen parameters, such as first.weight"},
                          Case{hooked, false, "communication_hook is not supported where shards have second owners"},
                          Case{hybrid, false, "hybrid_shard needs hosts whose ranks share memory"}}) {
    ForkedHosts hosts(
        {2, 2}, [&](const World& world) { return refused(world, one.options, one.frozen); }, over("tcp"));
    for (const auto& rank : hosts.wait(20)) EXPECT_THAT(rank.text, testing::HasSubstr(one.said));
  }
}

TEST_F(ElasticSecondOwner, ELA04_a_hook_of_zero2_is_refused_by_name) {
  ForkedHosts hosts(
      {1, 1},
      [](const World& world) {
        const auto net = std::make_shared<test::Net>();
        OSS<FusedAdamW> optimizer(net->parameters(), torch::optim::AdamWOptions(1e-3), world.group());
        const ShardedDataParallelOptions options{.log_sizes = false, .reduce_fp16 = true};
        ShardedDataParallel<test::Net> parallel(net, optimizer, world.group(), options);
        return test::refusal([&] { const Elastic elastic(world, parallel, optimizer, quick); });
      },
      over("tcp"));
  for (const auto& rank : hosts.wait(20)) {
    EXPECT_THAT(rank.text, testing::HasSubstr("a communication_hook or reduce_fp16 is not supported where parameters"));
  }
}

TEST_F(ElasticSecondOwner, ELA04_a_hook_of_megatron_is_refused_by_name) {
  ForkedHosts hosts(
      {1, 1},
      [](const World& world) {
        DistributedOptimizerOptions options;
        options.communication_hook = std::make_shared<SumHook>();
        DistributedOptimizer<FusedAdamW> optimizer(std::make_shared<test::Net>(), torch::optim::AdamWOptions(1e-3),
                                                   world.group(), options);
        return test::refusal([&] { const Elastic elastic(world, optimizer, quick); });
      },
      over("tcp"));
  for (const auto& rank : hosts.wait(20)) {
    EXPECT_THAT(rank.text, testing::HasSubstr("communication_hook is not supported where shards have second owners"));
  }
}

}  // namespace
}  // namespace shoal::elastic_second_refusal_test
