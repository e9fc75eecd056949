#include "data/idx.h"

#include <ATen/ops/arange.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/data/data_folder.h"

namespace shoal::data {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class Idx : public testing::Test {
 protected:
  std::string error_of(const std::filesystem::path& file, int64_t dimensions = 3) {
    return refusal([&] { read_idx(file, dimensions); });
  }

  DataFolder folder_;
  const Bytes good_ = idx({4, 3, 2});
};

TEST_F(Idx, reads_plain_and_gzip_files) {
  const auto expected = at::arange(24, at::kByte).view({4, 3, 2});
  EXPECT_TRUE(read_idx(folder_.write("plain", good_), 3).equal(expected));
  EXPECT_TRUE(read_idx(folder_.write_gzip("packed.gz", good_), 3).equal(expected));
}

TEST_F(Idx, reads_files_larger_than_one_chunk) {
  const auto large = idx({3000, 28, 28});
  const auto plain = read_idx(folder_.write("plain", large), 3);
  EXPECT_TRUE(read_idx(folder_.write_gzip("packed.gz", large), 3).equal(plain));
  EXPECT_EQ(plain.numel(), 3000 * 784);
}

TEST_F(Idx, names_a_missing_file) {
  EXPECT_THAT(error_of(folder_.path() / "absent"), AllOf(HasSubstr("absent"), HasSubstr("No such file")));
  EXPECT_THAT(error_of(folder_.path()), HasSubstr("not a regular file"));
}

TEST_F(Idx, names_a_truncated_file_wherever_it_ends) {
  for (const size_t size : {0, 3, 4, 15, 16, 39}) {
    const auto file = folder_.write("short", Bytes(good_.begin(), good_.begin() + static_cast<std::ptrdiff_t>(size)));
    EXPECT_THAT(error_of(file), AllOf(HasSubstr("short"), HasSubstr("truncated"))) << size << " bytes";
  }
}

TEST_F(Idx, names_a_too_long_file) {
  auto bytes = good_;
  bytes.push_back(0);
  EXPECT_THAT(error_of(folder_.write("long", bytes)),
              AllOf(HasSubstr("long"), HasSubstr("24 bytes, the file has more")));
}

TEST_F(Idx, names_a_wrong_magic_number) {
  auto bytes = good_;
  bytes[2] = 0x0d;  // floats
  EXPECT_THAT(error_of(folder_.write("floats", bytes)),
              AllOf(HasSubstr("floats"), HasSubstr("0x00000d03 instead of 0x00000803")));
  EXPECT_THAT(error_of(folder_.write("images", good_), 1), HasSubstr("0x00000803 instead of 0x00000801"));
}

TEST_F(Idx, names_damaged_sizes) {
  auto bytes = good_;
  for (size_t i = 4; i < 16; ++i) bytes[i] = 0xff;
  EXPECT_THAT(error_of(folder_.write("damaged", bytes)), AllOf(HasSubstr("damaged"), HasSubstr("truncated")));
}

TEST_F(Idx, names_a_file_that_is_no_gzip) {
  EXPECT_THAT(error_of(folder_.write("plain.gz", good_)), AllOf(HasSubstr("plain.gz"), HasSubstr("not a gzip file")));
  EXPECT_THAT(error_of(folder_.write("empty.gz", {})), AllOf(HasSubstr("empty.gz"), HasSubstr("not a gzip file")));
}

TEST_F(Idx, names_bad_gzip_data) {
  const auto whole = folder_.write_gzip("whole.gz", idx({100, 28, 28}));
  std::ifstream stream(whole, std::ios::binary);
  const Bytes packed{std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
  for (const size_t cut : {size_t{1}, size_t{8}, packed.size() / 2}) {
    const auto file = folder_.write("cut.gz", Bytes(packed.begin(), packed.end() - static_cast<std::ptrdiff_t>(cut)));
    EXPECT_THAT(error_of(file), AllOf(HasSubstr("cut.gz"), HasSubstr("truncated"))) << cut << " bytes less";
  }
  auto wrong_sum = packed;
  wrong_sum[wrong_sum.size() - 8] ^= 1;
  EXPECT_THAT(error_of(folder_.write("sum.gz", wrong_sum)), AllOf(HasSubstr("sum.gz"), HasSubstr("corrupt gzip")));
  auto wrong_block = packed;
  wrong_block[10] = 0xff;  // a deflate block of a kind that does not exist
  EXPECT_THAT(error_of(folder_.write("block.gz", wrong_block)),
              AllOf(HasSubstr("block.gz"), HasSubstr("corrupt gzip")));
}

}  // namespace
}  // namespace shoal::data
