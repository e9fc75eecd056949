// Files from outside, which are opened without trust.

#include "base/input_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <fstream>

#include "tests/support/refusal.h"
#include "tests/support/temp_folder.h"

namespace shoal::test {
namespace {

using ::testing::HasSubstr;

std::string refusal_of(const std::string& path) {
  return refusal([&] { InputFile(path, refuse_as<UsageError>); });
}

TEST(InputFile, what_is_no_regular_file_is_refused_at_once_by_name) {
  const TempFolder folder;
  const auto pipe = folder.file("pipe");
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_EQ(refusal_of(pipe), pipe + " is not a regular file");
  EXPECT_EQ(refusal_of(folder.path()), folder.path().string() + " is not a regular file");
  EXPECT_EQ(refusal_of("/dev/zero"), "/dev/zero is not a regular file");
  EXPECT_EQ(refusal_of(folder.file("none")), "cannot open " + folder.file("none") + ": No such file or directory");
}

TEST(InputFile, a_sparse_file_is_trusted_with_what_its_disk_holds) {
  const TempFolder folder;
  const auto path = folder.file("sparse");
  std::ofstream(path) << "{\"a\": 1}";
  std::filesystem::resize_file(path, uintmax_t{1} << 40);
  const InputFile file(path, refuse_as<UsageError>);
  EXPECT_EQ(file.size(), int64_t{1} << 40);
  EXPECT_LT(file.stored(), 1 << 20);
  EXPECT_THAT(refusal([&] { read_text(path, int64_t{1} << 50, refuse_as<UsageError>); }),
              HasSubstr("sparse is not text: it has a byte of value 0"));
  EXPECT_THAT(refusal([&] { read_text(path, 1000, refuse_as<UsageError>); }),
              HasSubstr("1099511627776 bytes; at most 1000 are expected"));
}

TEST(InputFile, a_file_that_ends_early_is_named) {
  const TempFolder folder;
  std::ofstream(folder.file("short")) << "12345";
  const InputFile file(folder.file("short"), refuse_as<UsageError>);
  char bytes[8];
  EXPECT_EQ(file.read_some(bytes, 8, 2), 3);
  EXPECT_EQ(refusal([&] { file.read(bytes, 8, 2); }), folder.file("short") + " ends at byte 5; it was longer");
}

}  // namespace
}  // namespace shoal::test
