// `shoal top` and `shoal report`: what they say of a run, and of files that are none.

#include <gmock/gmock.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>

#include "tests/cli/shoal_program.h"
#include "tests/support/temp_folder.h"

namespace shoal::test::runs_test {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

class Runs : public ::testing::Test {
 protected:
  std::string write(const std::string& name, const std::string& text) {
    std::ofstream(folder_.file(name), std::ios::binary) << text;
    return folder_.file(name);
  }
  // A run with metrics and flight recorders.
  void train_here(const std::vector<std::string>& data = {"--data", "reference", "--model", "mlp"}) {
    std::vector<std::string> line{
        "train", "--steps", "12", "--ranks", "2", "--metrics", folder_.file("metrics.jsonl"), "--flight-recorder",
        here()};
    line.insert(line.end(), data.begin(), data.end());
    const auto ended = shoal(line);
    ASSERT_EQ(ended.code, 0) << ended.output;
  }
  std::string here() const { return folder_.path(); }
  void refused(const std::vector<std::string>& arguments, const std::string& because) {
    const auto ended = shoal(arguments, 20);
    EXPECT_TRUE(ended.code == 1 || ended.code == 2) << ended.code;
    EXPECT_THAT(ended.output, AllOf(HasSubstr("error: "), HasSubstr(because)));
    EXPECT_EQ(std::count(ended.output.begin(), ended.output.end(), '\n'), 1) << "one line: " << ended.output;
    EXPECT_LT(ended.output.size(), 600U);
  }

  TempFolder folder_;
};

TEST_F(Runs, top_says_where_a_run_is_and_what_its_ranks_do) {
  train_here();
  const auto ended = shoal({"top", here(), "--json", folder_.file("top.json")});
  ASSERT_EQ(ended.code, 0) << ended.output;
  const auto frame = read(folder_.file("top.json"));
  std::vector<json> lines;
  std::ifstream file(folder_.file("metrics.jsonl"));
  for (std::string line; std::getline(file, line);) lines.push_back(json::parse(line));
  const auto& metrics = frame["metrics"];
  EXPECT_EQ(metrics["step"], 11);
  EXPECT_EQ(metrics["loss"], lines[11]["loss"]);
  double waits = 0;
  for (const auto& line : lines) waits += line["wait_ms"].get<double>() / 12;
  EXPECT_NEAR(metrics["wait_ms"].get<double>(), waits, 1e-9);
  const double seconds = lines[11]["seconds"].get<double>() - lines[0]["seconds"].get<double>();
  EXPECT_NEAR(metrics["samples_per_second"].get<double>(), 11 * 8 / seconds, 1e-6 / seconds);
  ASSERT_EQ(frame["ranks"].size(), 2U);
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(frame["ranks"][rank]["rank"], rank);
    EXPECT_EQ(frame["ranks"][rank]["state"], "left in order");
    EXPECT_EQ(frame["ranks"][rank]["step"], 11);
    EXPECT_GE(frame["ranks"][rank]["late_ms"], 0);
  }
  EXPECT_THAT(ended.output, AllOf(HasSubstr("step 11   loss "), HasSubstr("a step takes "), HasSubstr("loss █"),
                                  HasSubstr("left in order"), HasSubstr("no rank waits for another")))
      << "one look, since there is no terminal";
  EXPECT_THAT(ended.output, Not(HasSubstr("\x1b")));
}

// Reads what a terminal shows for a second, while the run goes on.
constexpr const char* watch = R"(
import os, pty, select, signal, sys, time
pid, terminal = pty.fork()
if pid == 0:
    os.execv(sys.argv[1], [sys.argv[1], "top", sys.argv[2], "--interval", "0.1"])
shown, end, later = b"", time.time() + 60, False
while time.time() < end and b"step 2 " not in shown:
    if select.select([terminal], [], [], 0.1)[0]:
        shown += os.read(terminal, 65536)
    if b"step 1 " in shown and not later:
        with open(sys.argv[2], "a") as file:
            file.write('{"step":2,"loss":0.5}\n')
        later = True
os.kill(pid, signal.SIGINT)
print(os.waitpid(pid, 0)[1])
sys.stdout.write(shown.decode().replace("\x1b", "ESC"))
)";

TEST_F(Runs, top_redraws_in_a_terminal_until_it_is_interrupted) {
  write("m.jsonl", "{\"step\":1,\"loss\":1}\n");
  const auto ended = run({"python3", "-c", watch, SHOAL, folder_.file("m.jsonl")}, 100);
  EXPECT_EQ(ended.code, 0) << ended.output;
  EXPECT_THAT(ended.output, ::testing::StartsWith("2\n")) << "by the signal";
  EXPECT_THAT(ended.output,
              AllOf(HasSubstr("ESC[H"), HasSubstr("step 1   loss 1.0000"), HasSubstr("step 2   loss 0.5000")));
}

TEST_F(Runs, top_takes_one_file_of_a_run) {
  train_here();
  const auto metrics = shoal({"top", folder_.file("metrics.jsonl")});
  EXPECT_EQ(metrics.code, 0) << metrics.output;
  EXPECT_THAT(metrics.output, AllOf(HasSubstr("step 11   loss "), Not(HasSubstr("last operation"))));
  const auto flight = shoal({"top", folder_.file("rank-1.flight"), "--once"});
  EXPECT_EQ(flight.code, 0) << flight.output;
  EXPECT_THAT(flight.output, AllOf(HasSubstr("rank 0 of 2: no record here"), Not(HasSubstr("loss"))));
}

TEST_F(Runs, top_reads_the_end_of_a_long_file) {
  std::string text;
  for (int step = 0; step < 20'000; ++step) {
    text +=
        json{{"step", step}, {"seconds", 0.5 * step}, {"loss", 1.0 / (1 + step)}, {"samples", 8 * step}}.dump() + "\n";
  }
  write("metrics.jsonl", text + R"({"step":20000,"eval_loss":0.25})" + "\n" + R"({"step":2000)");  // being written
  const auto ended = shoal({"top", here(), "--json", "-"});
  ASSERT_EQ(ended.code, 0) << ended.output;
  const auto frame = json::parse(ended.output);
  EXPECT_EQ(frame["metrics"]["step"], 19'999);
  EXPECT_DOUBLE_EQ(frame["metrics"]["samples_per_second"].get<double>(), 16);
  EXPECT_TRUE(frame["metrics"]["step_ms"].is_null());
  EXPECT_EQ(frame["evaluation"]["eval_loss"], 0.25);
}

TEST_F(Runs, report_is_one_page_with_the_curves_of_the_run) {
  std::ofstream(folder_.file("text.txt")) << std::string(6000, 'a') + std::string(6000, 'b');
  train_here({"--data", "text:" + folder_.file("text.txt"), "--model", "gpt", "--batch", "2", "--eval"});
  const auto page = folder_.file("report.html");
  const auto ended = shoal({"report", here(), "-o", page, "--json", folder_.file("report.json")});
  ASSERT_EQ(ended.code, 0) << ended.output;
  const auto html = text_of(page);
  for (const auto* part : {"<h2>Loss</h2>", "<h2>Samples per second, all ranks</h2>", "<h2>Time of a step</h2>",
                           "<h2>Learning rate</h2>", "eval_accuracy", "<polyline", "left in order", "</html>"}) {
    EXPECT_THAT(html, HasSubstr(part));
  }
  EXPECT_THAT(html, AllOf(Not(HasSubstr("<script")), Not(HasSubstr("href")), Not(HasSubstr("src="))));
  const auto check = run(
      {"python3", "-c",
       "import sys, xml.dom.minidom; print(len(xml.dom.minidom.parse(sys.argv[1]).getElementsByTagName('svg')))", page},
      60);
  EXPECT_EQ(check.code, 0) << "well-formed: " << check.output;
  EXPECT_GE(std::stoi(check.output), 6);
  const auto metrics = read(folder_.file("report.json"))["runs"][0]["metrics"];
  EXPECT_EQ(metrics["loss"]["count"], 12);
  EXPECT_EQ(metrics["loss"]["points"].size(), 12U);
  EXPECT_EQ(metrics["eval_loss"]["count"], 1);
}

TEST_F(Runs, report_compares_runs_and_thins_out_long_ones) {
  std::string text;
  for (int step = 0; step < 3000; ++step)
    text += json{{"step", step}, {"mine <&>", step % 2}, {"loss", step}}.dump() + "\n";
  text += R"({"step":3000,"loss":null,"text":"words"})";
  write("a.jsonl", text + "\n\n");
  write("b.jsonl", R"({"step":1,"loss":1e308,"samples":5,"seconds":1,"samples_per_second":7})"
                   "\n"
                   R"({"step":2,"loss":-2,"samples":9,"seconds":2,"samples_per_second":7})"
                   "\n");
  const auto ended =
      shoal({"report", folder_.file("a.jsonl"), folder_.file("b.jsonl"), "-o", folder_.file("r.html"), "--json", "-"});
  ASSERT_EQ(ended.code, 0) << ended.output;
  const auto runs = json::parse(ended.output)["runs"];
  const auto& loss = runs[0]["metrics"]["loss"];
  EXPECT_EQ(loss["count"], 3000);
  EXPECT_EQ(loss["beyond"], 1) << "null: NaN";
  EXPECT_EQ(loss["values_per_point"], 4);
  EXPECT_EQ(loss["points"].size(), 750U);
  for (const auto& point : loss["points"]) EXPECT_EQ(point[0], point[1]) << "means of steps and of values";
  EXPECT_EQ(runs[1]["metrics"]["loss"]["beyond"], 1);
  EXPECT_EQ(runs[1]["metrics"]["samples"]["count"], 2) << "a file's own names are drawn";
  EXPECT_EQ(runs[1]["metrics"]["samples_per_second"]["points"], json::array({{1, 7}, {2, 7}})) << "and no other rate";
  EXPECT_EQ(runs[1]["metrics"]["loss"]["points"].size(), 1U);
  const auto html = text_of(folder_.file("r.html"));
  EXPECT_THAT(html,
              AllOf(HasSubstr("b.jsonl: loss"), HasSubstr("mine &lt;&amp;&gt;"), HasSubstr("mean of up to 4 steps")));
}

TEST_F(Runs, all_metrics_files_of_a_folder_are_runs) {
  write("b.jsonl", "{\"step\":1,\"loss\":1}\n{\"step\":2,\"loss\":1}\n");
  write("a.jsonl", "{\"step\":1,\"loss\":3}\n");
  std::filesystem::last_write_time(folder_.file("a.jsonl"),
                                   std::filesystem::file_time_type::clock::now() - std::chrono::hours(1));
  const auto report = shoal({"report", here(), "-o", folder_.file("r.html"), "--json", "-"});
  ASSERT_EQ(report.code, 0) << report.output;
  const auto runs = json::parse(report.output)["runs"];
  ASSERT_EQ(runs.size(), 2U);
  EXPECT_EQ(runs[0]["run"], here() + "/a.jsonl");
  EXPECT_EQ(runs[0]["metrics"]["loss"]["count"], 1);
  EXPECT_EQ(runs[1]["metrics"]["loss"]["count"], 2);
  EXPECT_THAT(shoal({"top", here()}).output,
              ::testing::StartsWith("shoal top " + here() + "/b.jsonl (the newest of 2)\n"));
  refused({"report", here(), "-o", folder_.file("a.jsonl")}, "--output: cannot write");
  write("data.jsonl", "{\"text\":\"a sample\"}\n");
  const auto beside = shoal({"report", here(), "-o", folder_.file("r.html")});
  EXPECT_EQ(beside.code, 0) << beside.output;
  EXPECT_THAT(text_of(folder_.file("r.html")), AllOf(HasSubstr("b.jsonl"), ::testing::Not(HasSubstr("data.jsonl"))));
}

TEST_F(Runs, figures_have_the_digits_that_tell_them_apart) {
  const auto labels = [&](double first, double step, const std::string& name) {
    std::string text;
    for (int i = 0; i < 12; ++i) text += json{{"step", i}, {name, first + i * step}}.dump() + "\n";
    write("m.jsonl", text);
    EXPECT_EQ(shoal({"report", folder_.file("m.jsonl"), "-o", folder_.file("r.html")}).code, 0);
    const auto html = text_of(folder_.file("r.html"));
    std::vector<std::string> found;
    const std::string begin = "text-anchor=\"end\">";
    for (auto at = html.find(begin); at != std::string::npos; at = html.find(begin, at + 1)) {
      const auto label = html.substr(at + begin.size(), html.find('<', at) - at - begin.size());
      if (label != "11") found.push_back(label);  // the last step
    }
    EXPECT_GE(found.size(), 4U);
    EXPECT_EQ(std::set<std::string>(found.begin(), found.end()).size(), found.size())
        << ::testing::PrintToString(found);
    for (const auto& label : found) {
      EXPECT_GE(std::stod(label), first - 12 * step) << label;
      EXPECT_LE(std::stod(label), first + 24 * step) << label;
    }
  };
  labels(2.302, 1e-4, "loss");
  labels(2.30258, 1e-5, "loss");
  labels(123400, 10, "samples_per_second");
  labels(0.98765, 1e-5, "eval_accuracy");
  labels(1e-12, 1e-12, "lr");
  write("m.jsonl", R"({"step":1,"loss":1,"seconds":1,"samples":123456}
{"step":2,"loss":1,"seconds":2,"samples":246967}
{"step":2,"eval_count":59999,"eval_loss":0.123456}
)");
  EXPECT_THAT(shoal({"top", folder_.file("m.jsonl")}).output,
              AllOf(HasSubstr("   123511 samples/s"), HasSubstr("   eval_count 59999   eval_loss 0.1235")));
}

TEST_F(Runs, an_output_that_is_read_is_refused_before_it_is_written) {
  const std::string text = "{\"step\":1,\"loss\":1}\n";
  const auto metrics = write("metrics.jsonl", text);
  std::filesystem::create_symlink(metrics, folder_.file("link"));
  refused({"report", here(), "-o", metrics}, "--output: cannot write");
  refused({"report", here(), "-o", folder_.file("page.html"), "--json", folder_.file("link")}, "--json: cannot write");
  refused({"report", here(), "-o", folder_.file("one"), "--json", here() + "/./one"}, "give two files");
  refused({"top", here(), "--json", metrics}, "the command reads");
  EXPECT_EQ(text_of(metrics), text);
}

TEST_F(Runs, metrics_whose_names_begin_alike_stay_apart) {
  const auto name = std::string(70, 'a');
  write("m.jsonl", json{{"step", 1}, {name + "X", 1}, {name + "Y", 100}}.dump() + "\n");
  const auto ended = shoal({"report", folder_.file("m.jsonl"), "-o", folder_.file("r.html"), "--json", "-"});
  const auto found = json::parse(ended.output)["runs"][0]["metrics"];
  EXPECT_EQ(found[name + "X"]["most"], 1);
  EXPECT_EQ(found[name + "Y"]["least"], 100);
}

// The seconds of a resumed run begin anew, and may be more than those of the last line before.
TEST_F(Runs, the_rate_is_that_since_the_last_resume) {
  std::string text = json{{"step", 1}, {"loss", 1}, {"seconds", 1}, {"samples", 1000}}.dump() + "\n";
  text += json{{"step", 2}, {"loss", 1}, {"seconds", 2}, {"samples", 10}}.dump() + "\n";
  text += json{{"step", 3}, {"loss", 1}, {"seconds", 3}, {"samples", 20}}.dump() + "\n";
  write("m.jsonl", text);
  EXPECT_THAT(shoal({"top", folder_.file("m.jsonl")}).output, HasSubstr("   10 samples/s"));
}

TEST_F(Runs, a_damaged_line_is_left_out_and_said_once) {
  const std::string long_line = "{\"step\":2,\"text\":\"" + std::string(200'000, 'x') + "\"}\n";
  write("m.jsonl", "{\"step\":1,\"loss\":1}\n{\"step\":2,\"loss\":0.9\n" + long_line + "{\"step\":3,\"loss\":0.75}\n");
  const auto fault = folder_.file("m.jsonl") + ": line 2: not JSON";
  const auto top = shoal({"top", folder_.file("m.jsonl")});
  EXPECT_EQ(top.code, 0) << top.output;
  EXPECT_THAT(top.output,
              AllOf(HasSubstr(fault), HasSubstr("; it and 1 more are left out\n"), HasSubstr("step 3   loss 0.7500")));
  const auto report =
      shoal({"report", folder_.file("m.jsonl"), "-o", folder_.file("r.html"), "--json", folder_.file("r.json")});
  EXPECT_EQ(report.code, 0) << report.output;
  EXPECT_THAT(report.output, ::testing::StartsWith("shoal: " + fault));
  EXPECT_EQ(std::count(report.output.begin(), report.output.end(), '\n'), 2)
      << "once, and the page's name: " << report.output;
  EXPECT_THAT(text_of(folder_.file("r.html")), HasSubstr("m.jsonl: line 2: not JSON"));
  const auto run = read(folder_.file("r.json"))["runs"][0];
  EXPECT_EQ(run["metrics"]["loss"]["count"], 2);
  EXPECT_EQ(run["damaged_lines"]["count"], 2);
}

TEST_F(Runs, a_damaged_line_behind_the_part_that_top_reads_has_its_number) {
  std::string text;
  for (int step = 1; step <= 9999; ++step)
    text += json{{"step", step}, {"loss", 1.0}, {"seconds", 0.5 * step}}.dump() + "\n";
  write("m.jsonl", text + "{\"step\":10000\n{\"step\":10001,\"loss\":0.5}\n");
  const auto top = shoal({"top", folder_.file("m.jsonl")});
  EXPECT_EQ(top.code, 0) << top.output;
  EXPECT_THAT(top.output, AllOf(HasSubstr("m.jsonl: line 10000: "), HasSubstr("step 10001   loss 0.5000")));
}

// As shoal writes NaN, and as Python does.
TEST_F(Runs, a_loss_that_is_no_number_is_shown) {
  for (const auto& [value, shown] : std::vector<std::pair<std::string, std::string>>{
           {"null", "NaN"}, {"NaN", "NaN"}, {"Infinity", "Infinity"}, {"-Infinity", "-Infinity"}}) {
    write("m.jsonl", "{\"step\":1,\"loss\":1,\"note\":\"a \\\\\"}\n{\"step\":2,\"loss\":" + value + ",\"lr\":0.5}\n");
    const auto top = shoal({"top", folder_.file("m.jsonl"), "--json", folder_.file("top.json")});
    EXPECT_EQ(top.code, 0) << top.output;
    EXPECT_THAT(top.output, AllOf(HasSubstr("step 2   loss " + shown + "   rate 0.5"), HasSubstr("loss ▁×\n")));
    EXPECT_EQ(read(folder_.file("top.json"))["metrics"]["loss"], shown);
    const auto report = shoal({"report", folder_.file("m.jsonl"), "-o", folder_.file("r.html")});
    EXPECT_EQ(report.output, folder_.file("r.html") + "\n");
    EXPECT_THAT(text_of(folder_.file("r.html")),
                HasSubstr("that are NaN or beyond 1e100 in " + folder_.file("m.jsonl") + ": 1, the first in step 2."));
  }
}

TEST_F(Runs, files_that_are_no_metrics_are_refused_in_one_sentence) {
  refused({"top", here()}, "has neither metrics (*.jsonl) nor flight recorders");
  refused({"report", here(), "-o", folder_.file("r.html")}, "has neither metrics");
  refused({"top", "/nowhere"}, "/nowhere");
  const std::vector<std::pair<std::string, std::string>> faults{
      {"\n{\"loss\":1}\n", "m.jsonl: line 2: no step"},
      {"nonsense\n", "m.jsonl: line 1: not JSON"},
      {"[1]\n", "line 1: not an object"},
      {"{\"step\":1.5}\n", "line 1: the step is no whole number"},
      {"{\"step\":18446744073709551615}\n", "line 1: the step is no whole number"},
      {"{\"step\":1,\"step\":2}\n", "two entries named step"},
      {"{\"step\":1,\"a\":" + std::string(10'000, '[') + "\n", "nested deeper"},
      {std::string(3'000'000, 'x'), "line 1: longer than 65536 bytes"}};
  for (const auto& [text, because] : faults) {
    write("m.jsonl", text);
    refused({"report", folder_.file("m.jsonl"), "-o", folder_.file("r.html")}, because);
    const auto ended = shoal({"top", folder_.file("m.jsonl")}, 20);
    EXPECT_EQ(ended.code, 1) << ended.output;
  }
  std::string many = "{\"step\":1";
  for (int i = 0; i < 65; ++i) many += ",\"m" + std::to_string(i) + "\":1";
  write("m.jsonl", many + "}\n");
  refused({"report", folder_.file("m.jsonl"), "-o", folder_.file("r.html")}, "more than 64 numbers");
  write("m.jsonl", "{\"step\":1}\n");
  write("rank-0.flight", "short");
  refused({"top", here(), "--once"}, "rank-0.flight is too short");
  mkfifo(folder_.file("pipe.jsonl").c_str(), 0600);
  refused({"report", folder_.file("pipe.jsonl"), "-o", folder_.file("r.html")}, "is not a regular file");
  EXPECT_FALSE(std::filesystem::exists(folder_.file("r.html")));
  refused({"report", folder_.file("m.jsonl"), "-o", "/nowhere/r.html"}, "--output");
  refused({"top", here(), "--interval", "0"}, "--interval 0: give 0.1 to 3600 seconds");
}

}  // namespace
}  // namespace shoal::test::runs_test
