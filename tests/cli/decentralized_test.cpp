// `shoal train` with ranks, or sharded hosts, that average with a few others (rows DEC19, BEY22).

#include <gtest/gtest.h>

#include <cmath>

#include "tests/cli/shoal_program.h"
#include "tests/support/temp_folder.h"

namespace shoal::test {
namespace {

using nlohmann::json;

json train(const std::vector<std::string>& more) {
  const TempFolder folder;
  std::vector<std::string> line{"train",
                                "--data",
                                "reference",
                                "--model",
                                "mlp",
                                "--ranks",
                                "4",
                                "--threads",
                                "1",
                                "--steps",
                                "20",
                                "--json",
                                folder.file("report.json")};
  line.insert(line.end(), more.begin(), more.end());
  const auto ended = shoal(line);
  EXPECT_EQ(ended.code, 0) << ended.output;
  return ended.code == 0 ? read(folder.file("report.json")) : json();
}

TEST(Train, BEY22_decentralised_exchanges_may_be_rounded_or_compressed) {
  for (const std::string what : {"float32", "bf16", "int8", "top_k"}) {
    const auto report = train({"--strategy", "decentralized", "--exchange-dtype", what});
    ASSERT_FALSE(report.is_null());
    EXPECT_LT(report["loss"].back().get<double>(), report["loss"].front().get<double>()) << what;
    EXPECT_EQ(report["strategy"]["skipped"], 0) << what;
    const auto distance = report["strategy"]["consensus_distance"].get<double>();
    EXPECT_TRUE(distance > 0 && std::isfinite(distance)) << what;
  }
}

TEST(Train, DEC19_hybrid_gossip_of_one_host_is_fsdp_and_of_two_it_gossips) {
  const auto fsdp = train({"--strategy", "fsdp", "--optimizer", "sgd_momentum"});
  const auto one = train({"--strategy", "hybrid_gossip", "--optimizer", "sgd_momentum"});
  ASSERT_FALSE(fsdp.is_null() || one.is_null());
  EXPECT_EQ(one["params"], fsdp["params"]);
  EXPECT_EQ(one["strategy"]["exchanged"], 0);
  const auto two = train({"--strategy", "hybrid_gossip", "--topology-local-size", "2", "--topology", "ring"});
  ASSERT_FALSE(two.is_null());
  EXPECT_LT(two["loss"].back().get<double>(), two["loss"].front().get<double>());
  EXPECT_GT(two["strategy"]["exchanged"].get<double>(), 0);
  EXPECT_EQ(two["strategy"]["skipped"], 0);
  EXPECT_GT(two["strategy"]["consensus_distance"].get<double>(), 0);
}

TEST(Train, DEC19_hybrid_gossip_refuses_what_it_does_not_do) {
  const auto ended = shoal({"train", "--strategy", "hybrid_gossip", "--exchange-dtype", "int8"});
  EXPECT_NE(ended.code, 0);
  EXPECT_NE(ended.output.find("hybrid_gossip exchanges float32 or bf16"), std::string::npos) << ended.output;
}

}  // namespace
}  // namespace shoal::test
