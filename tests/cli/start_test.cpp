// Checks of `shoal train`, `bench` and `launch` before they start anything: options that do not fit the strategy or the
// number of ranks, and numbers. One error, nothing started.

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "tests/cli/shoal_program.h"
#include "tests/cli/start.h"

namespace shoal::test::start_test {
namespace {

using namespace start;  // NOLINT(google-build-using-namespace): helpers of this folder's tests

TEST(Start, an_option_of_another_strategy_is_refused_with_those_that_have_it) {
  expect_refused(reference({"--strategy", "ddp", "--sync-every", "5", "--topology", "nonsense"}),
                 "--sync-every: ddp does not have it; it is for local_sgd, slowmo, diloco");
  expect_refused(reference({"--topology", "nonsense"}),
                 "--topology: ddp does not have it; it is for decentralized, hybrid_gossip");
  expect_refused(reference({"--strategy", "local_sgd", "--outer-lr", "1"}), "it is for slowmo, diloco");
  expect_refused(reference({"--strategy", "fsdp", "--static-graph"}),
                 "--static-graph: fsdp does not have it; it is for ddp, zero1");
  expect_refused(reference({"--strategy", "zero2", "--bucket-cap-mb", "3"}), "it is for ddp, zero1, decentralized");
  expect_refused(reference({"--strategy", "zero1", "--optimizer-in-backward"}), "it is for ddp");
  expect_refused(reference({"--strategy", "none", "--ranks", "1", "--logging-data"}), "--logging-data");
  expect_refused({"bench", "--train", "--strategies", "ddp:ring"}, "--strategies ddp:ring: ddp has no topology");
  expect_refused(reference({"--strategy", "hybrid", "--shard-size", "3"}),
                 "--shard-size 3: 2 ranks are not a multiple");
}

TEST(Start, what_a_run_of_the_bench_would_refuse_is_refused_before_it) {
  const auto bench = [](const Line& more) {
    Line line{"bench", "--train"};
    line.insert(line.end(), more.begin(), more.end());
    return line;
  };
  expect_refused(bench({"--model", "xx"}), "xx");
  expect_refused(bench({"--size", "huge"}), "huge");
  expect_refused(bench({"--optimizer", "foo"}), "--optimizer foo: not in this version");
  expect_refused(bench({"--batch", "0"}), "--batch must be at least 1");
  expect_refused(bench({"--strategies", "decentralized:foo"}),
                 "--strategies decentralized:foo: unknown topology 'foo'");
  expect_refused(bench({"--strategies", "none"}), "--strategies none: choose from ");
}

// Two ranks of `shoal train`, which are told how to meet as torchrun tells them. Report of rank 0.
nlohmann::json train_at(const std::string& address, const std::vector<std::string>& options) {
  const TempFolder folder;
  const auto port = std::to_string(free_port());
  std::vector<Command> ranks;
  for (const auto* rank : {"0", "1"}) {
    Command command{
        {SHOAL, "train", "--data", "reference", "--model", "mlp", "--steps", "5", "--json", folder.file("report.json")},
        {{"MASTER_ADDR", address}, {"MASTER_PORT", port}, {"WORLD_SIZE", "2"}, {"RANK", rank}}};
    command.arguments.insert(command.arguments.end(), options.begin(), options.end());
    ranks.push_back(std::move(command));
  }
  for (const auto& ended : run_together(ranks, 100)) EXPECT_EQ(ended.code, 0) << ended.output;
  return read(folder.file("report.json"));
}

// What two ranks of `shoal train` say that another launcher has started with options of their own.
std::vector<Ended> train_with(const Line& first, const Line& second) {
  const auto port = std::to_string(free_port());
  std::vector<Command> ranks;
  for (const auto& [rank, options] : {std::pair("0", first), {"1", second}}) {
    ranks.push_back({reference(options),
                     {{"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", port}, {"WORLD_SIZE", "2"}, {"RANK", rank}}});
    ranks.back().arguments.insert(ranks.back().arguments.begin(), SHOAL);
  }
  return run_together(ranks, 60);
}

TEST(Start, options_that_ranks_must_share_are_compared_and_others_are_not) {
  const TempFolder folder;
  for (const auto& ended : train_with({"--lr", "0.1", "--json", folder.file("json")}, {"--lr", "0.2"})) {
    EXPECT_EQ(ended.code, 1);
    EXPECT_NE(ended.output.find("options of shoal train, which must be the same on all ranks"), std::string::npos);
    EXPECT_NE(ended.output.find("rank 0 has --lr 0.1, rank 1 has --lr 0.2"), std::string::npos) << ended.output;
  }
  for (const auto& ended : train_with({"--trace", folder.file("trace")}, {})) {
    EXPECT_NE(ended.output.find("rank 0 has --trace, rank 1 has no --trace"), std::string::npos) << ended.output;
  }
  const auto own = train_with({"--batch", "4", "--json", folder.file("json"), "--metrics", folder.file("metrics")},
                              {"--batch", "2", "--threads", "1", "--bucket-cap-mb", "25.0"});
  for (const auto& ended : own) EXPECT_EQ(ended.code, 0) << ended.output;
  EXPECT_EQ(read(folder.file("json"))["loss"].size(), 2U);
}

bool has_ipv6() {
  const int probe = socket(AF_INET6, SOCK_STREAM, 0);
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  address.sin6_addr = in6addr_loopback;
  const bool bound = probe >= 0 && bind(probe, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
  if (probe >= 0) close(probe);
  return bound;
}

TEST(Start, SCA09_ranks_meet_and_train_at_an_ipv6_address_as_at_an_ipv4_one) {
  if (!has_ipv6()) GTEST_SKIP() << "this machine has no ::1";
  for (const std::vector<std::string>& options : {std::vector<std::string>{"--transport", "auto"},
                                                  {"--transport", "gloo"},
                                                  {"--transport", "gloo", "--strategy", "decentralized"}}) {
    SCOPED_TRACE(options.back());
    const auto v6 = train_at("::1", options);
    const auto v4 = train_at("127.0.0.1", options);
    ASSERT_EQ(v6["loss"].size(), 5U);
    EXPECT_EQ(v6["loss"][0], v4["loss"][0]);
    if (options.back() == "decentralized") continue;  // ranks mix what has arrived
    EXPECT_EQ(v6["loss"], v4["loss"]);
    EXPECT_EQ(v6["communication"]["bytes_per_step"], v4["communication"]["bytes_per_step"]);
  }
  const auto bracketed =
      run_together({{{SHOAL, "train", "--data", "reference"},
                     {{"MASTER_ADDR", "[::1]"}, {"MASTER_PORT", "29500"}, {"WORLD_SIZE", "2"}, {"RANK", "0"}}}},
                   60)[0];
  EXPECT_NE(bracketed.code, 0);
  EXPECT_NE(bracketed.output.find("cannot resolve the address '[::1]'"), std::string::npos) << bracketed.output;
}

TEST(Start, topologies_are_looked_at_before_ranks_are_started) {
  const TempFolder folder;
  const auto file = folder.file("three.json");
  std::ofstream(file) << R"({"ranks": 3, "rounds": [{"groups": [[0, 1, 2]]}]})";
  const Line gossip{"--strategy", "decentralized", "--ranks", "4"};
  const auto refused = [&](Line more, const std::string& because) {
    more.insert(more.begin(), gossip.begin(), gossip.end());
    expect_refused(reference(more), because);
  };
  refused({"--topology", "nonsense"}, "unknown topology 'nonsense'");
  refused({"--topology", "hypercube", "--ranks", "3"}, "--ranks");
  refused({"--topology-local-size", "3"}, "4 ranks cannot be divided into hosts of 3");
  refused({"--topology-file", folder.file("none.json")}, "cannot open");
  refused({"--topology-file", file}, "3");
  refused({"--topology-file", file, "--topology", "ring"}, "give one of them");
  expect_refused(reference({"--strategy", "hybrid_gossip", "--ranks", "4", "--topology-local-size", "3"}),
                 "--topology-local-size 3: 4 ranks do not make hosts of 3");
  expect_refused(
      reference({"--strategy", "hybrid_gossip", "--ranks", "4", "--topology-local-size", "2", "--topology-file", file}),
      "three is for 3 hosts, there are 2");
}

TEST(Start, numbers_that_do_not_fit_are_refused_by_name) {
  const std::string digits(300, '9');
  for (const auto* option : {"--seed", "--sync-every", "--save-every", "--keep-last", "--neighbour-timeout", "--lr",
                             "--clip", "--timeout", "--threads", "--accumulate"}) {
    SCOPED_TRACE(option);
    const auto ended = shoal(reference({"--strategy", "decentralized", option, digits}));
    EXPECT_EQ(ended.code, 2) << ended.output;
    EXPECT_NE(ended.output.find(option), std::string::npos) << ended.output;
  }
  expect_refused(reference({"--seed", "-1"}), "--seed -1: give a whole number from 0 to 18446744073709551615");
  expect_refused(reference({"--lr", "nan"}), "--lr nan");
  expect_refused(reference({"--lr", "inf"}), "--lr inf: give a number above 0");
  expect_refused(reference({"--elastic", "1", "--silent-host-seconds", "inf"}),
                 "--silent-host-seconds inf: give 0.5 or more, below 1e6");
  expect_refused({"topology", "random", "--ranks", "4", "--seed", "-1"}, "--seed -1");
  expect_refused(reference({"--threads", "100000"}), "--threads 100000: give at most 1024");
  expect_refused(reference({"--batch", "100000000000"}), "--batch 100000000000: give at most 1000000");
  expect_refused({"bench", "--threads", "100000"}, "--threads 100000: give 1 to 1024");
  for (const std::string ranks : {"0", "100001"})
    expect_refused({"checkpoint", "reshard", "from", "to", "--ranks", ranks},
                   "--ranks " + ranks + ": give 1 to 100000");
  expect_refused({"bench", "--rounds", "0"}, "--rounds 0: give at least 1");
  expect_refused({"bench", "--sizes", digits + "G"}, "give at most");
  EXPECT_EQ(shoal(reference({"--seed", "18446744073709551615", "--ranks", "1"})).code, 0);
}

TEST(Start, an_option_without_a_value_does_not_take_the_next) {
  expect_refused({"bench", "--train", "--peers", "--model", "mlp"}, "--peers: give a value; found --model instead");
  expect_refused({"bench", "--ops", "--rounds", "1"}, "--ops: give a value; found --rounds");
  expect_refused({"train", "--json", "--eval"}, "--json: give a value; found --eval");
}

// "$UNSET" in a shell.
TEST(Start, an_empty_value_is_not_taken_for_an_option_that_is_not_given) {
  for (const auto* option : {"--save", "--resume", "--metrics", "--trace", "--flight-recorder", "--replan", "--json"})
    expect_refused(reference({option, ""}), std::string(option) + ": give a value; it is empty");
  expect_refused(reference({"--strategy", "decentralized", "--topology-file", ""}), "--topology-file: give a value");
  expect_refused({"topology", "ring", "--ranks", "4", "--html", ""}, "--html: give a value");
  expect_refused({"launch", "--elastic", "", "--", "true"}, "--elastic: give a value");
  expect_refused({"checkpoint", "export", "run", ""}, "OUTPUT: give a value; it is empty");
  expect_refused(reference({"--optimizer-in-backward", ""}), "--optimizer-in-backward: give a value");
  for (const std::string option : {"--optimizer-in-backward", "--static-graph", "--json"})
    expect_refused(reference({option + "="}), option + ": give a value; it is empty");
  EXPECT_EQ(shoal(reference({"--ranks", "1", "--optimizer-in-backward"})).code, 0);
  EXPECT_EQ(shoal({"launch", "-n", "1", "--", "/bin/sh", "-c", "test \"$1\" = ''", "sh", ""}).code, 0);
}

TEST(Start, a_flag_takes_a_truth_value_or_none) {
  for (const std::string value : {"maybe", "99999999999999999999", "12x"}) {
    expect_refused(reference({"--static-graph=" + value}), "--static-graph=" + value + ": give true or false");
    expect_refused(reference({"--eval=" + value}), "--eval=" + value + ": give true or false");
  }
  for (const std::string value : {"true", "False", "1", "off"})
    EXPECT_EQ(shoal(reference({"--ranks", "1", "--static-graph=" + value})).code, 0) << value;
}

TEST(Start, reference_data_is_made_as_it_is_needed) {
  const TempFolder folder;
  const auto ended =
      run({"timeout", "-s", "INT", "8", SHOAL, "train", "--data", "reference", "--model", "mlp", "--strategy", "none",
           "--ranks", "1", "--steps", "1000000", "--metrics", folder.file("metrics.jsonl")},
          60);
  std::ifstream metrics(folder.file("metrics.jsonl"));
  std::string line;
  EXPECT_TRUE(std::getline(metrics, line)) << "training begins at once: " << ended.output;
}

TEST(Start, every_variant_of_the_slow_links_bench_is_one_that_train_takes) {
  const auto variants = run({PYTHON, "-c",
                             "import sys, json; sys.path.insert(0, sys.argv[1]); import slow_links; "
                             "print(json.dumps(slow_links.VARIANTS))",
                             std::string(SCRIPTS) + "/../bench"},
                            60);
  ASSERT_EQ(variants.code, 0) << variants.output;
  const auto list = nlohmann::json::parse(variants.output);
  EXPECT_GT(list.size(), 5U);
  for (const auto& [name, options] : list.items()) {
    SCOPED_TRACE(name);
    auto line = options.get<Line>();
    line.insert(line.begin(), {"train", "--model", "gpt", "--data", "text:/nowhere"});
    expect_refused(line, "cannot open /nowhere");
  }
}

// A process that was killed while it wrote leaves an unfinished file, which the next save removes; other hosts' files
// stay.
TEST(Start, a_save_takes_away_what_the_dead_have_left) {
  const TempFolder folder;
  const auto run_folder = folder.file("run");
  std::filesystem::create_directories(run_folder);
  const pid_t dead = fork();
  if (dead == 0) _exit(0);
  waitpid(dead, nullptr, 0);
  char host[256] = {};
  gethostname(host, sizeof host - 1);
  const auto left = [&](const std::string& whose) {
    const auto path = run_folder + "/model.safetensors.tmp-" + whose;
    std::ofstream(path) << "unfinished";
    return path;
  };
  const auto of_the_dead = left(host + ("-" + std::to_string(dead)));
  const auto of_the_living = left(host + ("-" + std::to_string(getpid())));
  const auto elsewhere = left("another-host-" + std::to_string(dead));
  ASSERT_EQ(shoal(reference({"--ranks", "1", "--strategy", "none", "--save", run_folder})).code, 0);
  EXPECT_FALSE(std::filesystem::exists(of_the_dead));
  EXPECT_TRUE(std::filesystem::exists(of_the_living));
  EXPECT_TRUE(std::filesystem::exists(elsewhere));
}

}  // namespace
}  // namespace shoal::test::start_test
