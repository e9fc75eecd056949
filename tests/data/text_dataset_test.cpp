#include "data/text_dataset.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include "tests/data/data_folder.h"

namespace shoal::data {
namespace {

using testing::AllOf;
using testing::HasSubstr;

TEST(TextDataset, cuts_windows_whose_targets_are_one_further_on) {
  TextDataset data(at::arange(12, at::kByte), 3);
  EXPECT_EQ(data.size(), 3u);  // 0..3, 3..6, 6..9; 10 and 11 fill no window
  const auto batch = data.get_batch(std::vector<size_t>{2, 0});
  EXPECT_TRUE(batch.data.equal(at::tensor({6, 7, 8, 0, 1, 2}, at::kLong).view({2, 3})));
  EXPECT_TRUE(batch.target.equal(at::tensor({7, 8, 9, 1, 2, 3}, at::kLong).view({2, 3})));
  EXPECT_TRUE(batch.data.is_contiguous());
}

TEST(TextDataset, takes_exactly_one_window) {
  EXPECT_EQ(TextDataset(at::arange(4, at::kByte), 3).size(), 1u);
  EXPECT_THAT(refusal([] { TextDataset(at::arange(3, at::kByte), 3); }),
              HasSubstr("3 bytes are too short for one window of 4"));
  EXPECT_THROW(TextDataset(at::arange(3, at::kByte), 0), UsageError);
}

TEST(TextDataset, refuses_an_index_beyond_the_end) {
  TextDataset data(at::arange(12, at::kByte), 3);
  EXPECT_THROW(data.get_batch(std::vector<size_t>{3}), UsageError);
}

Bytes counting(size_t size) {
  Bytes bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<uint8_t>(i);
  return bytes;
}

TEST(TextFile, holds_its_end_out_for_testing) {
  const DataFolder folder;
  const auto file = folder.write("text", counting(100));
  const auto train = text_file(file, 9, Split::train);
  const auto test = text_file(file, 9, Split::test);
  EXPECT_EQ(train->size(), 9u);
  EXPECT_EQ(test->size(), 1u);
  EXPECT_EQ(train->get_batch(std::vector<size_t>{8}).target[0][8].item<int64_t>(), 81);
  EXPECT_EQ(test->get_batch(std::vector<size_t>{0}).data[0][0].item<int64_t>(), 90);
  EXPECT_EQ(text_file(file, 9, Split::train, 0)->size(), 11u);
}

TEST(TextFile, names_a_missing_or_short_file) {
  const DataFolder folder;
  EXPECT_THAT(refusal([&] { text_file(folder.path() / "absent", 9, Split::train); }),
              AllOf(HasSubstr("absent"), HasSubstr("No such file")));
  const auto file = folder.write("short", counting(90));
  EXPECT_NO_THROW(text_file(file, 9, Split::train));
  EXPECT_THAT(refusal([&] { text_file(file, 9, Split::test); }),
              AllOf(HasSubstr("short"), HasSubstr("90 bytes, of which 9 are for testing; a window needs 10")));
  EXPECT_THROW(text_file(folder.write("empty", {}), 9, Split::train), UsageError);
  EXPECT_THROW(text_file(file, 9, Split::train, 1.0), UsageError);
}

}  // namespace
}  // namespace shoal::data
