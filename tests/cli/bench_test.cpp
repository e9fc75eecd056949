// `shoal bench` as a user calls it.

#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "tests/cli/shoal_program.h"
#include "tests/support/temp_folder.h"

namespace shoal::test::bench_test {
namespace {

TEST(Bench, collectives_are_measured_over_every_transport_beside_a_copy) {
  const TempFolder folder;
  const auto ended =
      shoal({"bench", "--rounds", "2", "--sizes", "4,64K", "--dtypes", "float32,bfloat16", "--ops",
             "all_reduce,all_gather,send_recv,barrier", "--ranks", "3", "--json", folder.file("bench.json")});
  ASSERT_EQ(ended.code, 0) << ended.output;
  EXPECT_NE(ended.output.find("all_reduce      bfloat16      64 KiB      3  host   shared"), std::string::npos)
      << ended.output;
  const auto report = read(folder.file("bench.json"));
  EXPECT_GE(report["machine"]["cores"], 1);
  std::set<std::string> kinds;
  for (const auto& figure : report["collectives"]) {
    kinds.insert(std::string(figure["transport"]) + " " + std::string(figure["buffers"]));
    EXPECT_EQ(figure["ranks"], 3);
    EXPECT_EQ(figure["rounds"], 2);
    EXPECT_GT(figure["min_us"], 0);
    EXPECT_LE(figure["min_us"], figure["median_us"]);
    EXPECT_LE(figure["median_us"], figure["max_us"]);
    if (figure["op"] == "barrier") {
      EXPECT_EQ(figure["bytes"], 0);
      EXPECT_EQ(figure["dtype"], "none");
      continue;
    }
    EXPECT_GT(figure["memcpy_us"], 0);
    const bool moves = figure["bytes"] > 4 && figure["transport"] != "host";
    if (moves) {
      EXPECT_GE(figure["wire_bytes"], figure["bytes"]) << figure;
    }
    if (figure["buffers"] == "once") {
      EXPECT_EQ(figure["op"], "all_gather");
    }
  }
  EXPECT_EQ(kinds, (std::set<std::string>{"gloo none", "gloo staged", "host none", "host once", "host shared",
                                          "host staged", "tcp none", "tcp staged"}));
}

TEST(Bench, the_size_is_that_of_the_tensor_that_was_measured) {
  const TempFolder folder;
  const auto ended = shoal({"bench", "--rounds", "1", "--sizes", "5", "--dtypes", "float64,bfloat16", "--ops",
                            "all_reduce,all_gather,send_recv", "--transports", "host", "--buffers", "staged", "--ranks",
                            "3", "--json", folder.file("bench.json")});
  ASSERT_EQ(ended.code, 0) << ended.output;
  std::map<std::string, int> bytes;
  const auto report = read(folder.file("bench.json"));
  for (const auto& figure : report["collectives"]) {
    bytes[std::string(figure["op"]) + " " + std::string(figure["dtype"])] = figure["bytes"];
  }
  EXPECT_EQ(bytes, (std::map<std::string, int>{{"all_gather bfloat16", 6},
                                               {"all_gather float64", 24},
                                               {"all_reduce bfloat16", 4},
                                               {"all_reduce float64", 8},
                                               {"send_recv bfloat16", 4},
                                               {"send_recv float64", 8}}));
}

TEST(Bench, mpi_is_measured_in_the_world_that_mpirun_makes) {
  if (std::string(MPIRUN).empty()) GTEST_SKIP() << "this build has no MPI";
  const TempFolder folder;
  const Command command{{MPIRUN, "-n", "2", SHOAL, "bench", "--transports", "mpi,host,gloo", "--rounds", "2", "--sizes",
                         "4,64K", "--json", folder.file("bench.json")},
                        variables_of(MPIRUN_ENVIRONMENT)};
  const auto ended = run_together({command}, 110)[0];
  ASSERT_EQ(ended.code, 0) << ended.output;
  EXPECT_NE(ended.output.find("x gloo    x mpi"), std::string::npos) << ended.output;
  const auto report = read(folder.file("bench.json"));
  std::map<std::string, int> figures;
  for (const auto& figure : report["collectives"]) {
    ++figures[figure["transport"]];
    EXPECT_EQ(figure["ranks"], 2);
    if (figure["transport"] != "mpi") continue;
    EXPECT_GT(figure["min_us"], 0);
    EXPECT_EQ(figure["buffers"], figure["op"] == "barrier" ? "none" : "staged");
  }
  // Three operations of two sizes, and a barrier; on host in two kinds of memory, all_gather in three.
  EXPECT_EQ(figures, (std::map<std::string, int>{{"gloo", 7}, {"host", 15}, {"mpi", 7}}));
}

TEST(Bench, mpi_without_mpirun_is_refused) {
  if (std::string(MPIRUN).empty()) GTEST_SKIP() << "this build has no MPI";
  const auto ended = shoal({"bench", "--transports", "host,mpi", "--ranks", "3"});
  EXPECT_EQ(ended.code, 2);
  EXPECT_EQ(ended.output, "error: --transports mpi: start the ranks with mpirun -n 3 shoal bench ...\n");
  EXPECT_NE(shoal({"bench", "--train", "--transports", "mpi"}).output.find("it does not go with --train"),
            std::string::npos);
}

TEST(Bench, BEY20_strategies_are_measured_beside_compute_alone) {
  const TempFolder folder;
  const auto ended = shoal({"bench", "--train", "--transports", "host,tcp", "--model", "mlp", "--steps", "20",
                            "--rounds", "2", "--accumulate", "2", "--json", folder.file("bench.json")});
  ASSERT_EQ(ended.code, 0) << ended.output;
  const auto figures = read(folder.file("bench.json"))["train"];
  ASSERT_EQ(figures.size(), 3U) << "local, ddp over host, ddp over tcp";
  for (const auto& figure : figures) {
    EXPECT_GT(figure["step_ms"]["min"], 0);
    const double parts = figure["compute_ms"].get<double>() + figure["exposed_comm_ms"].get<double>() +
                         figure["update_ms"].get<double>();
    EXPECT_LE(parts, figure["step_ms"]["max"].get<double>() * 1.01);
    EXPECT_GT(figure["ratio_to_local"], 0);
    EXPECT_EQ(figure["median_ms_per_round"].size(), 2U);
    EXPECT_NEAR(figure["memory"]["params"].get<double>(), 118282 * 4 / double(1 << 20), 0.01);
    EXPECT_NEAR(figure["memory"]["state"].get<double>(), 2 * 118282 * 4 / double(1 << 20), 0.01);
  }
  EXPECT_EQ(figures[0]["collectives_per_step"], 0);
  EXPECT_GT(figures[1]["collectives_per_step"], 0);
  for (const int i : {0, 1}) EXPECT_EQ(figures[i]["wire_bytes_per_step"], 0) << "others' traffic does not count";
  EXPECT_GT(figures[2]["wire_bytes_per_step"], 2 * 118282 * 4) << "tcp sends every gradient";
  EXPECT_LT(figures[2]["wire_bytes_per_step"], 2.05 * 118282 * 4) << "once";
}

TEST(Bench, an_interrupted_bench_of_training_leaves_nothing_behind) {
  for (const std::string signal : {"INT", "TERM"}) {
    SCOPED_TRACE(signal);
    const TempFolder folder;
    const auto ended = run({"sh", "-c",
                            "export TMPDIR=" + folder.file("") + "; " + SHOAL +
                                " bench --train --strategies ddp --transports host --model mlp --steps 100000000 & "
                                "pid=$!; until ls $TMPDIR/shoal-bench-*/log; do sleep 0.1; done > /dev/null 2>&1; "
                                "sleep 1; kill -" +
                                signal + " $pid; wait $pid; code=$?; ls $TMPDIR; exit $code"},
                           60);
    EXPECT_EQ(ended.code, 130) << ended.output;
    EXPECT_NE(ended.output.find("interrupted\n"), std::string::npos) << ended.output;
    EXPECT_EQ(ended.output.find("shoal-bench-"), std::string::npos) << ended.output;
  }
}

TEST(Bench, wrong_options_are_refused) {
  for (const auto& [arguments, because] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"--ranks", "1"}, "--ranks must be at least 2"},
           {{"--ops", "all_reduce,sum"}, "--ops sum: choose from all_reduce"},
           {{"--transports", "host,udp"}, "--transports udp: choose from host, tcp, gloo"},
           {{"--sizes", "4X"}, "'4X' is not a size"},
           {{"--dtypes", "float8"}, "--dtypes float8"},
           {{"--steps", "10"}, "--steps is for training steps"},
           {{"--train", "--sizes", "4"}, "--sizes is for collectives"},
           {{"--ops", "all_reduce", "--transports", "tcp", "--buffers", "shared"}, "--buffers shared: none of --ops"},
           {{"--ops", "all_reduce", "--transports", "host", "--buffers", "staged,once"}, "--buffers once: none of"},
           {{"--ops", "barrier", "--buffers", "staged"}, "--buffers staged: none of --ops barrier"},
           {{"--train", "--peers", "foo"}, "--peers is for Python peers: give --peer-python"},
           {{"--train", "--peer-impl", "bar"}, "--peer-impl is for Python peers"},
           {{"--train", "--peer-script", "/nonexistent"}, "--peer-script is for Python peers"},
           {{"--threads", "0"}, "--threads 0: give 1 to 1024"},
           {{"--train", "--strategies", "zero9"}, "--strategies zero9"},
           {{"--train", "--steps", "2"}, "--steps must be at least 4"},
           {{"--train", "--peer-python", "python3"}, "--peer-script ''"}}) {
    auto line = arguments;
    line.insert(line.begin(), "bench");
    const auto ended = shoal(line);
    EXPECT_EQ(ended.code, 2) << ended.output;
    EXPECT_NE(ended.output.find(because), std::string::npos) << ended.output;
  }
}

}  // namespace
}  // namespace shoal::test::bench_test
