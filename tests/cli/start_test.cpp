// Checks of `shoal train`, `bench` and `launch` before they start anything: options that do not fit the strategy or the
// number of ranks, numbers, output paths, and the system's limits. One error, nothing started.

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "tests/cli/shoal_program.h"

namespace shoal::test::start_test {
namespace {

using Line = std::vector<std::string>;

void expect_one_error(const Ended& ended, int code, const std::string& because) {
  EXPECT_EQ(ended.code, code) << ended.output;
  EXPECT_NE(ended.output.find(because), std::string::npos) << because << "\n" << ended.output;
  EXPECT_EQ(std::count(ended.output.begin(), ended.output.end(), '\n'), 1) << "one line: " << ended.output;
}

void expect_refused(const Line& line, const std::string& because) {
  expect_one_error(shoal(line), 2, because);
}

Line reference(const Line& more) {
  Line line{"train", "--data", "reference", "--model", "mlp", "--steps", "2"};
  line.insert(line.end(), more.begin(), more.end());
  return line;
}

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

TEST(Start, places_to_write_to_are_looked_at_before_training) {
  const TempFolder folder;
  std::ofstream(folder.file("a_file")) << "x";
  for (const auto* option : {"--json", "--metrics"}) {
    expect_refused(reference({option, folder.file("none/report")}), option);
  }
  for (const auto* option : {"--trace", "--save"}) {
    expect_refused(reference({option, folder.file("a_file/in")}), option);
    expect_refused(reference({option, "/proc"}), std::string(option) + ": cannot write /proc: ");
  }
  std::filesystem::create_directory(folder.file("loop"));
  std::filesystem::create_symlink("latest", folder.file("loop/latest"));
  expect_refused(reference({"--save", folder.file("loop")}), "--save: cannot look at " + folder.file("loop/latest"));
  expect_refused({"bench", "--json", folder.file("none/report")}, "--json: cannot write");
  expect_refused({"bench", "--html", folder.file("none/report")}, "--html: cannot write");
  // The check does not create the file: a training that fails later leaves no empty report.
  const auto report = folder.file("report.json");
  EXPECT_EQ(shoal(reference({"--json", report, "--resume", folder.file("nothing")})).code, 1);
  EXPECT_FALSE(std::filesystem::exists(report));
}

// Without --ranks the script has probably forgotten srun.
TEST(Start, ranks_that_a_batch_script_of_slurm_asks_for_are_started) {
  const std::vector<std::pair<std::string, std::string>> script{
      {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}, {"SLURM_JOB_ID", "7"}};
  Line line = reference({"--ranks", "1"});
  line.insert(line.begin(), SHOAL);
  const auto ended = run_together({{line, script}}, 60).front();
  EXPECT_EQ(ended.code, 0) << ended.output;
  line.resize(line.size() - 2);
  expect_one_error(run_together({{line, script}}, 60).front(), 2, "start the program with srun");
}

// Ranks of a launcher find the places of rank 0 out after they have met, so that none waits for it in vain.
TEST(Start, places_that_rank_0_cannot_write_to_are_an_error_on_all_ranks) {
  const TempFolder folder;
  std::ofstream(folder.file("a_file")) << "x";
  const auto refused = [&](const std::string& option, const std::string& path) {
    const auto ended = shoal({"launch", "-n", "2", "--", SHOAL, "train", "--data", "reference", "--model", "mlp",
                              "--steps", "2", option, folder.file(path)});
    EXPECT_EQ(ended.code, 1) << ended.output;
    for (const std::string rank : {"0", "1"}) {
      const auto said =
          "[" + rank + "] rank " + rank + ": error: rank 0: " + option + ": cannot write " + folder.file(path);
      EXPECT_NE(ended.output.find(said), std::string::npos) << ended.output;
    }
  };
  refused("--save", "a_file/in");
  refused("--metrics", "none/metrics");
  // As on two hosts without a shared file system.
  const auto elsewhere = shoal({"launch", "-n", "2", "--", "sh", "-c",
                                "cd " + folder.path().string() + " && mkdir $RANK && cd $RANK && exec " + SHOAL +
                                    " train --data reference --model mlp --steps 2 --save run"});
  for (const std::string rank : {"0", "1"}) {
    const auto said =
        "[" + rank + "] rank " + rank + ": error: rank 1: --save: run, which rank 0 has made, is not there";
    EXPECT_NE(elsewhere.output.find(said), std::string::npos) << elsewhere.output;
  }
}

TEST(Start, outputs_do_not_replace_what_the_command_reads_or_saves) {
  const TempFolder folder;
  const auto text = folder.file("text"), topology = folder.file("topology.json"), save = folder.file("run");
  std::ofstream(text) << std::string(5000, 'x');
  std::ofstream(topology) << R"({"ranks": 2, "rounds": [{"groups": [[0, 1]]}]})";
  for (const std::string name : {"train-images-idx3-ubyte", "train-labels-idx1-ubyte"})
    std::ofstream(folder.file(name)) << "not read before the ranks start";
  for (const std::string option : {"--json", "--metrics"}) {
    SCOPED_TRACE(option);
    expect_refused({"train", "--model", "gpt", "--data", "text:" + text, option, text},
                   option + ": cannot write " + text + ": the command reads");
    const auto labels = folder.file("train-labels-idx1-ubyte");
    expect_refused({"train", "--data", "fashion-mnist:" + folder.file(""), option, labels},
                   option + ": cannot write " + labels + ": the command reads");
    expect_refused(reference({"--strategy", "decentralized", "--topology-file", topology, option, topology}),
                   option + ": cannot write " + topology + ": the command reads");
    for (const std::string saved : {"/latest", "/model.safetensors"})
      expect_refused(reference({"--save", save, option, save + saved}), "are both " + save + saved);
  }
  for (const std::string option : {"--json", "--metrics"}) {
    for (const auto& [of_ranks, name] : {std::pair("--trace", "rank-0.json"), {"--flight-recorder", "rank-1.flight"}})
      expect_refused(reference({of_ranks, folder.file("ranks"), option, folder.file("ranks/../ranks/") + name}),
                     "files of ranks have such names there");
  }
  expect_refused({"launch", "--flight-recorder", save, "--json", save + "/rank-0.flight", "--", "true"},
                 "--json: cannot write " + save + "/rank-0.flight: files of ranks have such names there");
  EXPECT_EQ(std::filesystem::file_size(text), 5000U);
  expect_refused(reference({"--metrics", "-"}), "--metrics -: it does not go to standard output: give a file");
  expect_refused({"bench", "--html", "-"}, "--html -: it does not go to standard output: give a file");
}

// Output that is still possible is written.
TEST(Start, a_place_that_vanishes_during_training_is_an_error_at_the_end) {
  const TempFolder folder;
  const auto line = std::string(SHOAL) + " train --data reference --model mlp --steps 1500 --ranks 2 --json " +
                    folder.file("gone/report") + " --metrics " + folder.file("metrics") + " --save " +
                    folder.file("run");
  const auto ended =
      run({"sh", "-c",
           "mkdir " + folder.file("gone") + "; " + line + " & pid=$!; until [ -s " + folder.file("metrics") +
               " ]; do sleep 0.02; done; rmdir " + folder.file("gone") + "; wait $pid"},
          60);
  EXPECT_EQ(ended.code, 1);
  EXPECT_NE(ended.output.find("error: cannot write " + folder.file("gone/report")), std::string::npos) << ended.output;
  EXPECT_NE(ended.output.find("1500 steps in"), std::string::npos) << ended.output;
  EXPECT_TRUE(std::filesystem::exists(folder.file("run/model.safetensors")));
  EXPECT_TRUE(std::filesystem::exists(folder.file("run/step-1500/index.json")));
}

TEST(Start, a_full_disk_under_the_metrics_costs_neither_the_checkpoint_nor_the_report) {
  const TempFolder folder;
  const auto ended = shoal(reference(
      {"--ranks", "1", "--metrics", "/dev/full", "--save", folder.file("run"), "--json", folder.file("report")}));
  EXPECT_EQ(ended.code, 0) << ended.output;
  EXPECT_NE(
      ended.output.find("/dev/full: No space left on device; lines from step 0 on are missing; training continues"),
      std::string::npos)
      << ended.output;
  EXPECT_TRUE(std::filesystem::exists(folder.file("run/step-2/index.json")));
  EXPECT_EQ(read(folder.file("report"))["loss"].size(), 2U);
}

TEST(Start, standard_streams_that_are_closed_or_full_lose_nothing_in_silence) {
  const auto train = std::string(SHOAL) + " train --data reference --model mlp --steps 2 --ranks 2 --json ";
  const TempFolder folder;
  auto ended = run({"sh", "-c", train + folder.file("report") + " <&- >&- 2>&-"}, 60);
  EXPECT_EQ(ended.code, 0);
  EXPECT_EQ(read(folder.file("report"))["loss"].size(), 2U);
  ended = run({"sh", "-c", train + "- > /dev/full"}, 60);
  EXPECT_EQ(ended.code, 1);
  EXPECT_NE(ended.output.find("error: cannot write to standard output: "), std::string::npos) << ended.output;
  // With this option it says that there is no checkpoint yet.
  const auto saves = " train --data reference --model mlp --steps 2 --ranks 1 --resume latest --save ";
  ended = run({"sh", "-c", SHOAL + (saves + folder.file("run")) + " 2> /dev/full"}, 60);
  EXPECT_EQ(ended.code, 0) << ended.output;
  EXPECT_TRUE(std::filesystem::exists(folder.file("run/step-2/index.json")));
  EXPECT_EQ(run({"sh", "-c", std::string(SHOAL) + " train --no 2> /dev/full"}, 60).code, 2);
}

// As `shoal launch` tells its ranks to stop, of `| head` and of a collector of logs that has crashed.
TEST(Start, training_whose_output_nobody_reads_any_more_saves_and_stops) {
  const TempFolder folder;
  std::ofstream(folder.file("text.txt")) << std::string(6000, 'a') + std::string(6000, 'b');
  const auto unread = [&](const std::string& options) {
    return run({"sh", "-c", "{ " + std::string(SHOAL) + " train --ranks 2 " + options + "; echo code $? >&2; } | true"},
               60);
  };
  for (const std::string more : {"", " --elastic 1:2"}) {
    const auto save = folder.file("run" + std::to_string(more.size()));
    const auto ended =
        unread("--model gpt --eval --epochs 50 --data text:" + folder.file("text.txt") + " --save " + save + more);
    EXPECT_NE(ended.output.find("shoal: nobody reads the output any more: training stops\n"), std::string::npos)
        << ended.output;
    EXPECT_NE(ended.output.find("interrupted; checkpoint in " + save + "/step-"), std::string::npos) << ended.output;
    EXPECT_TRUE(ended.output.ends_with("\ncode 1\n")) << ended.output;
    EXPECT_EQ(ended.output.find("no rank has ended well"), std::string::npos) << ended.output;
    EXPECT_TRUE(std::filesystem::exists(save + "/latest"));
  }
  for (const std::string more : {"", " --elastic 1", " --strategy decentralized"}) {
    const auto report = folder.file("report" + std::to_string(more.size()));
    const auto ended = unread("--data reference --model mlp --steps 2 --json " + report + more);
    EXPECT_NE(ended.output.find("error: cannot write to standard output: Broken pipe\n"), std::string::npos)
        << ended.output;
    EXPECT_TRUE(ended.output.ends_with("\ncode 1\n")) << ended.output;
    EXPECT_EQ(read(report)["loss"].size(), 2U);
  }
}

// The limit applies to the shell and everything that it starts.
Ended with_limit(const std::string& limit, const std::string& line) {
  return run({"sh", "-c", "ulimit " + limit + "; exec " + SHOAL + " " + line}, 60);
}

TEST(Start, few_open_files_are_one_named_error) {
  const std::string train = "train --data reference --model mlp --steps 2 --ranks 2";
  expect_one_error(with_limit("-n 8", train), 2, "a process may have 8 files open here, and 2 ranks need 34 at least");
  expect_one_error(with_limit("-n 8", "launch -n 2 -- true"), 1, "ulimit -n");
  expect_one_error(with_limit("-n 16", "bench --ops barrier --rounds 1"), 1, "ulimit -n");
  EXPECT_EQ(with_limit("-n 34", train).code, 0) << "the least is enough";
  EXPECT_EQ(with_limit("-n 34", "launch -n 2 -- true").code, 0);
}

// In blocks of 512 bytes: 100 MiB.
TEST(Start, small_files_are_one_named_error) {
  const std::string train = "train --data reference --model mlp --steps 2 --ranks 2";
  expect_one_error(with_limit("-f 204800", train), 2, "ulimit -f");
  EXPECT_EQ(with_limit("-f 204800", train + " --transport gloo").code, 0);
}

// A checkpoint exceeds the limit: the training ends, and reports why.
TEST(Start, a_file_that_may_not_grow_is_an_error) {
  const TempFolder folder;
  const auto ended = with_limit(
      "-f 64", "train --data reference --model mlp --steps 2 --ranks 1 --strategy none --save " + folder.file("run"));
  EXPECT_EQ(ended.code, 1) << ended.output;
  EXPECT_NE(ended.output.find("File too large"), std::string::npos) << ended.output;
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
