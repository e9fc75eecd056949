// The metrics file when its writer ends and another rank takes over.

#include "cli/train/metrics.h"

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "tests/support/temp_folder.h"

namespace shoal::test::metrics_file_test {
namespace {

using cli::Metrics;
using Line = nlohmann::ordered_json;

Line step(int64_t number) {
  return {{"step", number}, {"loss", 0.5}};
}
Line evaluation(int64_t number) {
  return {{"step", number}, {"eval_loss", 0.5}};
}
Line change(int64_t generation, int64_t number) {
  return {{"step", number}, {"event", "rank 0 has ended"}, {"generation", generation}};
}

class MetricsFile : public testing::Test {
 protected:
  std::string path() const { return folder_.file("metrics.jsonl"); }
  std::string text() const {
    std::ostringstream text;
    text << std::ifstream(path()).rdbuf();
    return text.str();
  }
  static std::string text_of(const std::vector<Line>& lines) {
    std::string text;
    for (const auto& line : lines) text += line.dump() + '\n';
    return text;
  }

  TempFolder folder_;
};

TEST_F(MetricsFile, ELA11_a_line_that_the_writer_did_not_live_to_write_is_written_by_its_successor) {
  Metrics first(path());
  Metrics second(path(), Metrics::Start::anew, /*writes=*/false);
  for (int64_t number = 0; number < 100; ++number) {
    if (number < 98) first.write(step(number));
    second.write(step(number));
  }
  first.write(evaluation(97));
  second.write(evaluation(97));
  second.write(evaluation(99));
  second.take_over();
  second.write(change(2, 100));
  second.write(step(100));
  std::vector<Line> expected;
  for (int64_t number = 0; number < 98; ++number) expected.push_back(step(number));
  for (const auto& line : {evaluation(97), step(98), step(99), evaluation(99), change(2, 100), step(100)}) {
    expected.push_back(line);
  }
  EXPECT_EQ(text(), text_of(expected));
}

// A rank that is in a step when the writer ends finishes it in the recovery, and writes only then.
TEST_F(MetricsFile, ELA11_a_line_of_the_writer_is_not_repeated_by_its_successor) {
  Metrics first(path());
  Metrics second(path(), Metrics::Start::anew, /*writes=*/false);
  for (const auto& line : {step(0), evaluation(0), step(1), change(2, 2), evaluation(1)}) first.write(line);
  second.write(step(0));
  second.take_over();
  for (const auto& line : {step(1), change(2, 2), evaluation(1), step(2)}) second.write(line);
  EXPECT_EQ(text(), text_of({step(0), evaluation(0), step(1), change(2, 2), evaluation(1), step(2)}));
}

TEST_F(MetricsFile, ELA11_a_part_of_a_line_is_cut_off) {
  {
    Metrics first(path());
    first.write(step(0));
  }
  std::ofstream(path(), std::ios::app) << R"({"step":1,"lo)";
  Metrics second(path(), Metrics::Start::behind, /*writes=*/false);
  second.write(step(1));
  second.take_over();
  EXPECT_EQ(text(), text_of({step(0), step(1)}));
  std::ofstream(path(), std::ios::app) << R"({"step":2)";
  Metrics(path(), Metrics::Start::behind).write(step(2));
  EXPECT_EQ(text(), text_of({step(0), step(1), step(2)}));
}

// A run that is resumed from an earlier step has written higher numbers before.
TEST_F(MetricsFile, ELA11_lines_before_a_resume_hide_none_of_the_successors) {
  {
    Metrics former(path());
    for (int64_t number = 0; number < 9; ++number) former.write(step(number));
  }
  Metrics first(path(), Metrics::Start::behind);
  Metrics second(path(), Metrics::Start::behind, /*writes=*/false);
  for (int64_t number = 5; number < 7; ++number) second.write(step(number));
  first.write(step(5));
  second.take_over();
  second.write(step(7));
  std::vector<Line> expected;
  for (int64_t number = 0; number < 9; ++number) expected.push_back(step(number));
  for (int64_t number = 5; number < 8; ++number) expected.push_back(step(number));
  EXPECT_EQ(text(), text_of(expected));
}

// Foreign bytes in the file, and more of them than are read.
TEST_F(MetricsFile, ELA11_what_is_no_line_is_left_alone) {
  const std::string foreign = "[1]\nnull\n{\"step\":\"7\",\"loss\":1}\n" + std::string(100000, 'x') + "\n{}\n";
  std::ofstream(path()) << foreign;
  Metrics second(path(), Metrics::Start::anew, /*writes=*/false);
  second.write(step(0));
  second.take_over();
  EXPECT_EQ(text(), foreign + text_of({step(0)}));
}

}  // namespace
}  // namespace shoal::test::metrics_file_test
