// `shoal train` with ranks, or sharded hosts, that average with a few others (rows DEC19, BEY22).

#include <gtest/gtest.h>

#include <cmath>

#include "tests/cli/shoal_program.h"

namespace shoal::test {
namespace {

using nlohmann::json;

json train_small(std::vector<std::string> more) {
  const std::vector<std::string> common{"--data", "reference", "--model", "mlp",     "--ranks",
                                        "4",      "--threads", "1",       "--steps", "20"};
  more.insert(more.end(), common.begin(), common.end());
  return train(more);
}

// A figure of every rank.
std::vector<double> by_rank(const json& report, const char* figure) {
  return report["strategy"][figure];
}

const std::vector<double> none(4, 0);

TEST(Train, BEY22_decentralised_exchanges_may_be_rounded_or_compressed) {
  for (const std::string what : {"float32", "bf16", "int8", "top_k"}) {
    const auto report = train_small({"--strategy", "decentralized", "--exchange-dtype", what});
    ASSERT_FALSE(report.is_null());
    EXPECT_LT(report["loss"].back().get<double>(), report["loss"].front().get<double>()) << what;
    EXPECT_EQ(by_rank(report, "skipped"), none) << what;
    for (const double distance : by_rank(report, "consensus_distance")) {
      EXPECT_TRUE(distance > 0 && std::isfinite(distance)) << what;
    }
  }
}

TEST(Train, DEC19_hybrid_gossip_of_one_host_is_fsdp_and_of_two_it_gossips) {
  const auto fsdp = train_small({"--strategy", "fsdp", "--optimizer", "sgd_momentum"});
  const auto one = train_small({"--strategy", "hybrid_gossip", "--optimizer", "sgd_momentum"});
  ASSERT_FALSE(fsdp.is_null() || one.is_null());
  EXPECT_EQ(one["params"], fsdp["params"]);
  EXPECT_EQ(by_rank(one, "exchanged"), none);
  const auto two = train_small({"--strategy", "hybrid_gossip", "--topology-local-size", "2", "--topology", "ring"});
  ASSERT_FALSE(two.is_null());
  EXPECT_LT(two["loss"].back().get<double>(), two["loss"].front().get<double>());
  EXPECT_EQ(by_rank(two, "skipped"), none);
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_GT(by_rank(two, "exchanged")[rank], 0) << rank;
    EXPECT_GT(by_rank(two, "consensus_distance")[rank], 0) << rank;
  }
}

TEST(Train, DEC19_hybrid_gossip_refuses_what_it_does_not_do) {
  const auto ended = shoal({"train", "--strategy", "hybrid_gossip", "--exchange-dtype", "int8"});
  EXPECT_NE(ended.code, 0);
  EXPECT_NE(ended.output.find("hybrid_gossip exchanges float32 or bf16"), std::string::npos) << ended.output;
}

}  // namespace
}  // namespace shoal::test
