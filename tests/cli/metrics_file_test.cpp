// The metrics file when its writer ends and another rank takes over.

#include "cli/train/metrics.h"

#include <gtest/gtest.h>

#include <filesystem>
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

TEST_F(MetricsFile, a_full_disk_is_told_once_and_ends_nothing) {
  Metrics metrics("/dev/full");
  testing::internal::CaptureStderr();
  for (int64_t number = 7; number < 10; ++number) metrics.write(step(number));
  metrics.hand_over();
  metrics.take_over();
  metrics.write(step(10));
  EXPECT_EQ(metrics.fault(),
            "--metrics: cannot write /dev/full: No space left on device; lines from step 7 on are missing");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "shoal: " + metrics.fault() + "; training continues\n");
}

// As programs that rotate logs do.
TEST_F(MetricsFile, goes_on_at_its_beginning_if_another_program_empties_it) {
  std::ofstream(path()) << "of a former run\n";
  Metrics metrics(path());
  metrics.write(step(0));
  EXPECT_EQ(text(), text_of({step(0)}));
  std::filesystem::resize_file(path(), 0);
  metrics.write(step(1));
  EXPECT_EQ(text(), text_of({step(1)}));
}

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

// With more ranks an epoch has fewer steps, so that numbers go back.
TEST_F(MetricsFile, ELA11_lines_are_there_once_where_steps_are_numbered_anew) {
  Metrics first(path());
  Metrics second(path(), Metrics::Start::anew, /*writes=*/false);
  std::vector<Line> lines;
  for (int64_t number = 0; number < 40; ++number) lines.push_back(step(number));
  lines.push_back(change(2, 26));
  for (int64_t number = 26; number < 30; ++number) lines.push_back(step(number));
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i + 1 < lines.size()) first.write(lines[i]);
    second.write(lines[i]);
  }
  second.take_over();
  for (const auto& line : {change(3, 30), step(30), change(4, 20), step(20)}) {
    second.write(line);
    lines.push_back(line);
  }
  EXPECT_EQ(text(), text_of(lines));
}

// What a successor reads of the file begins behind the last change.
TEST_F(MetricsFile, ELA11_lines_are_there_once_long_after_a_change) {
  for (const bool changes : {false, true}) {
    SCOPED_TRACE(changes);
    std::vector<Line> lines;
    for (int64_t number = 0; number < 10; ++number) lines.push_back(step(number));
    lines.push_back(change(2, 5));
    for (int64_t number = 5; number < 4000; ++number) lines.push_back(step(number));
    const size_t written = lines.size();
    if (changes) {
      lines.push_back(change(3, 3000));
      lines.push_back(step(3000));
    }
    {
      Metrics first(path());
      Metrics second(path(), Metrics::Start::anew, /*writes=*/false);
      for (size_t i = 0; i < lines.size(); ++i) {
        if (i + (changes ? 0 : 2) < written) first.write(lines[i]);
        second.write(lines[i]);
      }
      second.take_over();
      second.write(change(4, 2000));
      lines.push_back(change(4, 2000));
    }
    EXPECT_EQ(std::filesystem::file_size(path()), text_of(lines).size());
    EXPECT_TRUE(text() == text_of(lines));
  }
}

// The writer ends before it has said how the ranks changed.
TEST_F(MetricsFile, ELA11_a_change_that_the_writer_did_not_live_to_write) {
  Metrics first(path());
  Metrics second(path(), Metrics::Start::anew, /*writes=*/false);
  for (int64_t number = 0; number < 40; ++number) {
    first.write(step(number));
    second.write(step(number));
  }
  second.write(change(2, 26));
  second.write(step(26));
  second.take_over();
  second.write(change(3, 27));
  std::vector<Line> lines;
  for (int64_t number = 0; number < 40; ++number) lines.push_back(step(number));
  for (const auto& line : {change(2, 26), step(26), change(3, 27)}) lines.push_back(line);
  EXPECT_EQ(text(), text_of(lines));
}

// A rank that has joined leads from now on.
TEST_F(MetricsFile, ELA11_a_writer_hands_over_to_another_one) {
  Metrics first(path());
  Metrics second(path(), Metrics::Start::behind, /*writes=*/false);
  first.write(step(0));
  first.hand_over();
  second.take_over();
  for (auto* each : {&first, &second}) {
    each->write(change(2, 1));
    each->write(step(1));
  }
  first.take_over();
  EXPECT_EQ(text(), text_of({step(0), change(2, 1), step(1)}));
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
