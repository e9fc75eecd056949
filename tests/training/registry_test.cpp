// Strategies by name: what a command line, a binding or a test reads from the registry.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <set>

#include "shoal/training.h"
#include "tests/support/forked_ranks.h"
#include "tests/support/models.h"
#include "tests/support/temp_folder.h"

namespace shoal::test {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

std::string refusal(const std::function<void()>& work) {
  try {
    work();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

std::vector<Training<MlpImpl>> trainings_of_the_program;  // destroyed after the library's own global objects
std::vector<TrainingState> states_of_the_program;         // their destructors wait for saves

std::unique_ptr<TrainingCore> make_nothing(const TrainingParts&) {
  return nullptr;
}

TEST(StrategyRegistry, names_are_documented_and_unique) {
  const auto names = strategy_names();
  EXPECT_EQ(std::set<std::string>(names.begin(), names.end()).size(), names.size());
  for (const auto& name : names) {
    const auto& strategy = find_strategy(name);
    EXPECT_EQ(strategy.name, name);
    EXPECT_FALSE(strategy.help.empty()) << name;
    for (const auto& option : strategy.options) EXPECT_FALSE(option.help.empty()) << name << " " << option.name;
  }
}

TEST(StrategyRegistry, an_unknown_name_is_refused_with_all_names) {
  EXPECT_THAT(refusal([] { find_strategy("zero9"); }),
              AllOf(HasSubstr("'zero9'"), HasSubstr("ddp, zero1, zero2, megatron, fsdp"), HasSubstr("diloco")));
}

TEST(StrategyRegistry, defaults_are_values_that_are_accepted) {
  for (const auto& name : strategy_names()) {
    const auto& strategy = find_strategy(name);
    for (const auto& option : strategy.options) {
      if (option.default_value.empty()) continue;
      SCOPED_TRACE(name + " " + option.name);
      EXPECT_EQ(option_values(strategy, {{option.name, option.default_value}}).text(option.name),
                option_values(strategy, {}).text(option.name));
      EXPECT_FALSE(option_values(strategy, {}).given(option.name));
    }
  }
}

TEST(StrategyRegistry, a_foreign_option_is_refused_with_the_strategies_that_have_it) {
  EXPECT_EQ(refusal([] {
              option_values(find_strategy("fsdp"), {{"sync_every", "5"}});
            }),
            "sync_every: fsdp does not have it; it is for local_sgd, slowmo, diloco");
  EXPECT_EQ(refusal([] { option_values(find_strategy("fsdp"), {{"warp", "9"}}); }), "warp: no strategy has it");
}

TEST(StrategyRegistry, values_that_do_not_fit_are_refused_by_name) {
  const auto refused = [](const std::string& strategy, const std::string& option, const std::string& value) {
    return refusal([&] { option_values(find_strategy(strategy), {{option, value}}); });
  };
  EXPECT_THAT(refused("ddp", "static_graph", "yes"), StartsWith("static_graph yes: give true or false"));
  EXPECT_THAT(refused("diloco", "sync_every", "0"), StartsWith("sync_every 0: give at least 1"));
  EXPECT_THAT(refused("diloco", "sync_every", "2.5"), StartsWith("sync_every 2.5: give at least 1"));
  EXPECT_THAT(refused("ddp", "bucket_cap_mb", "many"), StartsWith("bucket_cap_mb many: give a number"));
  EXPECT_THAT(refused("ddp", "bucket_cap_mb", "nan"), StartsWith("bucket_cap_mb nan: give a number"));
  EXPECT_THAT(refused("decentralized", "exchange_dtype", "int4"), HasSubstr("available: float32, bf16, int8, top_k"));
}

TEST(StrategyRegistry, checks_say_before_the_start_what_would_fail) {
  const auto check = [](const std::string& name, const StrategyOptions& options, int ranks) {
    const auto& strategy = find_strategy(name);
    return refusal([&] { strategy.check(option_values(strategy, options), {}, ranks, 1); });
  };
  EXPECT_EQ(check("zero2", {{"compress", "bf16"}}, 2), "");
  EXPECT_THAT(check("zero2", {{"compress", "powersgd:2"}}, 2), HasSubstr("it is for ddp, zero1"));
  EXPECT_THAT(check("ddp", {{"compress", "fp8"}}, 2), StartsWith("compress fp8: give none"));
  EXPECT_THAT(check("decentralized", {{"topology", "nonsense"}}, 2), HasSubstr("unknown topology"));
  EXPECT_THAT(check("hybrid_gossip", {{"topology_local_size", "3"}}, 4), HasSubstr("do not make hosts of 3"));
  EXPECT_THAT(check("hybrid_gossip", {{"topology_local_size", "4294967296"}}, 4),
              StartsWith("topology_local_size 4294967296: give at most 2147483647"));
  EXPECT_THAT(check("diloco", {{"fragments", "4294967297"}}, 4), StartsWith("fragments 4294967297: give at most"));
  EXPECT_THAT(check("none", {}, 2), HasSubstr("one process"));
}

TEST(StrategyRegistry, mixed_precision_is_as_the_strategy_does_it) {
  EXPECT_EQ(precision_of("ddp", "bf16_mixed").parameters, at::kFloat);
  EXPECT_EQ(precision_of("fsdp", "bf16_mixed").parameters, at::kBFloat16);
  EXPECT_THAT(refusal([] { precision_of("ddp", "int8"); }), HasSubstr("float32, bf16_mixed"));
}

TEST(StrategyRegistry, bf16_without_float32_copies_is_taken_by_its_own_name_only) {
  for (const auto& strategy : strategy_names()) {
    const bool copies = find_strategy(strategy).main_copies;
    const auto *name = copies ? "bf16" : "bf16_pure", *other = copies ? "bf16_pure" : "bf16";
    EXPECT_EQ(precision_of(strategy, name).parameters, at::kBFloat16) << strategy;
    EXPECT_THAT(precision_names(strategy), Contains(name)) << strategy;
    EXPECT_THAT(precision_names(strategy), Not(Contains(other))) << strategy;
    EXPECT_THAT(refusal([&] { precision_of(strategy, other); }), HasSubstr("strategy " + strategy + " keeps"));
  }
  EXPECT_THAT(refusal([] { precision_of("zero1", "bf16"); }),
              AllOf(StartsWith("bf16: strategy zero1"),
                    HasSubstr("take bf16_mixed, a strategy with float32 copies (megatron"), HasSubstr("or bf16_pure")));
}

TEST(StrategyRegistry, a_training_may_be_a_global_object_of_the_program_that_has_saved_in_the_background) {
  const TempFolder folder;
  const auto train_and_exit = [&](const World& world) -> std::string {
    for (const auto& name : strategy_names()) {
      if (find_strategy(name).synchronization == Synchronization::single_rank) continue;
      StrategyOptions options;  // parameters that its destructor waits for
      if (name == "megatron") options["overlap_param_gather"] = "true";
      auto training = make_training(name, seeded(1), optimizer_recipe<torch::optim::SGD>(0.1), world.group(),
                                    {.options = options, .precision = Precision::float64()});
      training->backward(mean_loss(training.forward(batch(world.rank(), 0))));
      training->step();
      trainings_of_the_program.push_back(std::move(training));
    }
    world.group().barrier().wait();
    for (const auto& training : trainings_of_the_program) {
      if (training->strategy().name == "megatron") states_of_the_program.push_back(*training->state());
    }
    save_async(folder.file("run"), states_of_the_program.front());
    std::exit(0);
  };
  for (const auto& rank : run_ranks(2, train_and_exit)) {
    EXPECT_EQ(rank.status, 0);
    EXPECT_EQ(rank.text, "");
  }
}

TEST(StrategyRegistry, a_strategy_of_the_programs_own_is_one_of_them) {
  register_strategy({.name = "mine",
                     .help = "a test's",
                     .options = {{.name = "bucket_cap_mb",
                                  .type = StrategyOption::Type::number,
                                  .default_value = "1",
                                  .help = "as others have it"}},
                     .make = make_nothing});
  EXPECT_THAT(strategy_names(), Contains("mine"));
  EXPECT_THAT(strategies_with("bucket_cap_mb"), Contains("mine"));
  EXPECT_THAT(refusal([] { register_strategy({.name = "mine", .help = "again", .make = make_nothing}); }),
              HasSubstr("there is one of this name"));
  EXPECT_THAT(refusal([] { register_strategy({.name = "empty", .help = "does nothing"}); }), HasSubstr("`make`"));
  EXPECT_THAT(refusal([] {
                register_strategy({.name = "other",
                                   .help = "another type",
                                   .options = {{.name = "bucket_cap_mb", .help = "text"}},
                                   .make = make_nothing});
              }),
              HasSubstr("option bucket_cap_mb has another type in ddp"));
  EXPECT_THAT(strategy_names(), testing::Not(Contains("other")));
}

}  // namespace
}  // namespace shoal::test
