// `shoal train` with ranks that exchange their parameters once in many steps (row BEY22).

#include <gtest/gtest.h>

#include <cmath>

#include "tests/cli/shoal_program.h"

namespace shoal::test::local_updates_test {
namespace {

using nlohmann::json;

std::vector<std::string> reference(std::vector<std::string> more) {
  const std::vector<std::string> common{"--data", "reference", "--model", "mlp", "--ranks", "2"};
  more.insert(more.end(), common.begin(), common.end());
  return more;
}

TEST(Train, BEY22_parameters_travel_every_so_many_steps) {
  const std::vector<std::pair<std::vector<std::string>, int>> methods{
      {{"--strategy", "local_sgd"}, 1},
      {{"--strategy", "slowmo", "--outer-momentum", "0.3"}, 1},
      {{"--strategy", "diloco", "--fragments", "2", "--sync-delay", "2", "--outer-lr", "0.5"}, 2}};
  for (const auto& [method, fragments] : methods) {
    auto options = reference({"--steps", "20", "--sync-every", "5"});
    options.insert(options.end(), method.begin(), method.end());
    const auto report = train(options);
    double elements = 0;
    for (const auto& [name, parameter] : report["params"].items()) {
      double numel = 1;
      for (const auto& size : parameter["shape"]) numel *= size.get<double>();
      elements += numel;
    }
    const int compares_rates = method[1] == "slowmo" ? 1 : 0;  // 16 bytes in each exchange
    EXPECT_NEAR(report["communication"]["collectives_per_step"].get<double>(), (fragments + compares_rates) / 5.0, 1e-9)
        << method[1];
    EXPECT_NEAR(report["communication"]["bytes_per_step"].get<double>(), (4 * elements + 16 * compares_rates) / 5, 1e-6)
        << method[1];
    EXPECT_LT(report["loss"].back().get<double>(), report["loss"].front().get<double>()) << method[1];
    EXPECT_EQ(report["config"]["sync_every"], 5);
  }
}

TEST(Train, BEY22_local_sgd_after_every_step_is_ddp) {
  const auto params = [](std::vector<std::string> options) {
    options.insert(options.end(), {"--steps", "5", "--optimizer", "sgd_momentum", "--dtype", "float64"});
    return train(reference(std::move(options)))["params"];
  };
  const auto ddp = params({"--strategy", "ddp"});
  const auto local = params({"--strategy", "local_sgd", "--sync-every", "1"});
  ASSERT_EQ(local.size(), ddp.size());
  for (const auto& [name, digest] : ddp.items()) {
    EXPECT_NEAR(local[name]["l2"].get<double>(), digest["l2"].get<double>(), 1e-9) << name;
    EXPECT_NEAR(local[name]["sum"].get<double>(), digest["sum"].get<double>(), 1e-9) << name;
  }
}

TEST(Train, BEY22_wrong_options_are_refused) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> faults{
      {{"--strategy", "diloco", "--sync-every", "0"}, "--sync-every 0"},
      {{"--strategy", "diloco", "--fragments", "21"}, "fragments is 21"},
      {{"--strategy", "diloco", "--outer-momentum", "1"}, "momentum of OuterNesterov is 1"},
      {{"--strategy", "ddp", "--outer-lr", "1"}, "--outer-lr"}};
  for (const auto& [options, text] : faults) {
    auto line = reference(options);
    line.insert(line.begin(), "train");
    const auto ended = shoal(line);
    EXPECT_EQ(ended.code, 2) << ended.output;
    EXPECT_NE(ended.output.find(text), std::string::npos) << ended.output;
  }
}

}  // namespace
}  // namespace shoal::test::local_updates_test
