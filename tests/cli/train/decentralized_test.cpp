// `shoal train` with ranks, or sharded hosts, that average with a few others (rows DEC18, DEC19, BEY22).

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>

#include "tests/cli/shoal_program.h"
#include "tests/golden/compare.h"

namespace shoal::test::decentralized_test {
namespace {

using nlohmann::json;

json train_small(std::vector<std::string> more) {
  const std::vector<std::string> common{"--data", "reference", "--model", "mlp",     "--ranks",
                                        "4",      "--threads", "1",       "--steps", "20"};
  more.insert(more.end(), common.begin(), common.end());
  return train(more);
}

// Values of one figure, by rank.
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

// Digests of every rank, in the JSON format of the reference peers.
TEST(Train, DEC01_the_report_has_the_digests_of_every_ranks_parameters_and_of_their_mean) {
  for (const std::string topology : {"ring", "one-peer-exp"}) {
    const auto golden = golden::load(std::string(GOLDEN) + "/decentralized/" + topology + "_mlp_sgd_momentum_w4.json");
    const auto number = [&](const char* name) { return std::to_string(golden["config"][name].get<int>()); };
    auto report = train({"--data",        "reference",  "--model",       "mlp",           "--strategy",
                         "decentralized", "--topology", topology,        "--optimizer",   "sgd_momentum",
                         "--threads",     "1",          "--ranks",       number("world"), "--steps",
                         number("steps"), "--batch",    number("batch"), "--seed",        number("seed")});
    ASSERT_FALSE(report.is_null());
    const auto run = golden["peers"]["consecutive"];
    const auto ranks = report["params_per_rank"];
    ASSERT_EQ(ranks.size(), 4U);
    EXPECT_EQ(report["params"], ranks[0]) << "as the peers have it";
    for (size_t rank = 0; rank < 4; ++rank) {
      report["params"] = ranks[rank];
      const json expected{{"loss", run["loss"]}, {"params", run["params_per_rank"][rank]}};
      const json reference{
          {"config", golden["config"]}, {"shapes", golden["shapes"]}, {"peers", {{"consecutive", expected}}}};
      for (const auto& line : golden::compare(report, reference, "consecutive")) {
        ADD_FAILURE() << topology << ", rank " << rank << ": " << line;
      }
    }
    EXPECT_NE(ranks[0], ranks[1]);
    for (const auto& [name, mean] : report["params_mean"].items()) {
      for (const auto* linear : {"sum", "probe"}) {
        double sum = 0;
        for (const auto& rank : ranks) sum += rank[name][linear].get<double>();
        EXPECT_NEAR(mean[linear].get<double>(), sum / 4, 1e-5) << name << " " << linear;
      }
    }
  }
}

TEST(Train, DEC18_the_distance_to_the_mean_is_in_what_is_printed_in_metrics_and_in_the_report) {
  const TempFolder folder;
  std::ofstream(folder.file("text")) << std::string(3000, 'a') + std::string(3000, 'b');
  for (const std::string strategy : {"decentralized", "hybrid_gossip"}) {
    std::vector<std::string> line{"train",
                                  "--data",
                                  "text:" + folder.file("text"),
                                  "--model",
                                  "gpt",
                                  "--batch",
                                  "2",
                                  "--strategy",
                                  strategy,
                                  "--ranks",
                                  "4",
                                  "--threads",
                                  "1",
                                  "--steps",
                                  "4",
                                  "--eval",
                                  "--metrics",
                                  folder.file(strategy),
                                  "--json",
                                  folder.file("report.json")};
    if (strategy == "hybrid_gossip") line.insert(line.end(), {"--topology-local-size", "2"});
    const auto ended = shoal(line);
    ASSERT_EQ(ended.code, 0) << ended.output;
    const std::string says = ", consensus distance ";
    const auto place = ended.output.find(says);
    ASSERT_NE(place, std::string::npos) << ended.output;
    const double printed = std::stod(ended.output.substr(place + says.size()));
    EXPECT_GT(printed, 0);
    std::ifstream metrics(folder.file(strategy));
    std::vector<double> distances;
    for (std::string text; std::getline(metrics, text);) {
      const auto entry = json::parse(text);
      if (entry.contains("eval_loss")) distances.push_back(entry.at("consensus_distance"));
    }
    ASSERT_EQ(distances.size(), 1U);
    EXPECT_NEAR(distances[0], printed, 0.01 * printed);
    const auto report = read(folder.file("report.json"));
    for (const double distance : by_rank(report, "consensus_distance")) EXPECT_DOUBLE_EQ(distance, distances[0]);
    // Ranks of one host share a model.
    const auto& ranks = report["params_per_rank"];
    ASSERT_EQ(ranks.size(), 4U);
    EXPECT_EQ(ranks[0] == ranks[1], strategy == "hybrid_gossip");
    EXPECT_NE(ranks[1], ranks[2]);
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
  EXPECT_NE(ended.output.find("--exchange-dtype int8: not in this version; available: float32, bf16"),
            std::string::npos)
      << ended.output;
}

}  // namespace
}  // namespace shoal::test::decentralized_test
