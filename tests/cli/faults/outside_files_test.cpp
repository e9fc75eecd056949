// Files from outside: each bad one gives one sentence that names it, quickly and in little memory.

#include <gmock/gmock.h>
#include <sys/stat.h>
#include <zlib.h>

#include <algorithm>
#include <cstring>
#include <fstream>

#include "tests/cli/shoal_program.h"
#include "tests/support/temp_folder.h"

namespace shoal::test::outside_files_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

// Runs the program with an address space that holds little beside its libraries.
Ended confined(const std::vector<std::string>& arguments, [[maybe_unused]] double limit = 20) {
#ifdef __SANITIZE_ADDRESS__
  return shoal(arguments, 100);
#else
  std::vector<std::string> line{"/bin/sh", "-c", "ulimit -v 1400000; exec \"$0\" \"$@\"", SHOAL};
  line.insert(line.end(), arguments.begin(), arguments.end());
  return run(line, limit);
#endif
}

class OutsideFiles : public ::testing::Test {
 protected:
  // Expects one line that contains all `parts`, without a crash or a timeout.
  void refused(const std::vector<std::string>& arguments, const std::vector<std::string>& parts) {
    const auto ended = confined(arguments);
    EXPECT_FALSE(ended.overdue) << arguments[0];
    EXPECT_TRUE(ended.code == 1 || ended.code == 2) << arguments[0] << ": " << ended.code;
    EXPECT_THAT(ended.output, StartsWith("error: "));
    EXPECT_EQ(std::count(ended.output.begin(), ended.output.end(), '\n'), 1) << ended.output;
    EXPECT_LT(ended.output.size(), 500U);
    EXPECT_THAT(ended.output, Not(HasSubstr("json.exception")));
    for (const auto& part : parts) EXPECT_THAT(ended.output, HasSubstr(part));
  }
  std::string write(const std::string& name, const std::string& text) {
    std::ofstream(folder_.file(name), std::ios::binary) << text;
    return folder_.file(name);
  }
  std::string pipe(const std::string& name) {
    EXPECT_EQ(mkfifo(folder_.file(name).c_str(), 0600), 0);
    return folder_.file(name);
  }
  // A trace of rank 0 with these events.
  std::string trace(const std::string& events) {
    return write("rank-0.json", R"({"traceEvents": [)" + events + R"(], "shoal": {"rank": 0}})");
  }

  TempFolder folder_;
};

TEST_F(OutsideFiles, named_pipes_are_refused_at_once) {
  const std::string what = "is not a regular file";
  refused({"topology", "--file", pipe("t.json")}, {"t.json", what});
  refused({"flight", pipe("rank-0.flight")}, {"rank-0.flight", what});
  refused({"trace", "merge", pipe("rank-0.json"), "-o", folder_.file("out")}, {"rank-0.json", what});
  refused({"checkpoint", "inspect", pipe("x.safetensors")}, {"x.safetensors", what});
  refused({"checkpoint", "inspect", pipe("index.json")}, {"index.json", what});
  refused({"checkpoint", "inspect", pipe("model.safetensors.index.json")}, {"model.safetensors.index.json", what});
  refused({"train", "--strategy", "none", "--model", "gpt", "--size", "tiny", "--data", "text:" + pipe("text")},
          {"text", what});
  for (const auto* name : {"train-images-idx3-ubyte", "train-images-idx3-ubyte.gz"}) {
    const auto images = pipe(name);
    write("train-labels-idx1-ubyte", "");
    refused({"train", "--strategy", "none", "--model", "mlp", "--data", "fashion-mnist:" + folder_.path().string()},
            {name, what});
    std::filesystem::remove(images);
  }
}

TEST_F(OutsideFiles, deep_nesting_is_refused) {
  const auto deep = std::string(3'000'000, '[');
  refused({"topology", "--file", write("t.json", R"({"ranks": )" + deep)}, {"t.json", "nested deeper than 8"});
  refused({"trace", "merge", write("rank-0.json", R"({"traceEvents": [)" + deep), "-o", folder_.file("out")},
          {"rank-0.json", "nested deeper than 16"});
  refused(
      {"trace", "merge", trace(R"({"args": )" + deep + std::string(deep.size(), ']') + "}"), "-o", folder_.file("out")},
      {"rank-0.json", "nested deeper than 16"});
  refused({"checkpoint", "inspect", write("index.json", R"({"format": )" + deep)}, {"index.json", "nested deeper"});
}

TEST_F(OutsideFiles, numbers_of_ranks_have_a_limit) {
  refused({"topology", "--file", write("t.json", R"({"ranks": 2000000000, "rounds": [{"groups": [[0, 1]]}]})")},
          {"topology file " + folder_.file("t.json"), "2000000000 ranks; at most 4096 are possible"});
  refused({"topology", "ring", "--ranks", "2147483647"}, {"2147483647 ranks; at most 4096"});
  refused({"plan", "--ranks", "2147483647"}, {"--ranks 2147483647: give at most 100000"});
  refused({"plan", "--params", "7e9", "--ranks", "2147483647"}, {"--ranks 2147483647: give at most 100000"});
  refused({"launch", "-n", "2147483647", "--", "true"}, {"2147483647 ranks: give at most 100000"});
}

TEST_F(OutsideFiles, a_small_topology_file_may_not_mean_a_large_topology) {
  std::string group = "[0";
  for (int rank = 1; rank < 4096; ++rank) group += "," + std::to_string(rank);
  const auto round = R"({"groups": [)" + group + "]]}";
  std::string rounds = round;
  for (int i = 0; i < 300; ++i) rounds += "," + round;
  refused({"topology", "--file", write("t.json", R"({"ranks": 4096, "rounds": [)" + rounds + "]}")},
          {"t.json", "5048709120 edges; at most 16777216 are possible"});
}

TEST_F(OutsideFiles, times_of_a_trace_are_numbers) {
  const auto refused_trace = [&](const std::string& events, const std::string& part) {
    refused({"trace", "merge", trace(events), "-o", folder_.file("out.json")}, {"rank-0.json", part});
    EXPECT_FALSE(std::filesystem::exists(folder_.file("out.json")));
  };
  refused_trace(R"({"ts": 1}, {"ts": "1"})", "traceEvents[1].ts is not a number");
  refused_trace(R"({"ts": null})", "traceEvents[0].ts is not a number");
  refused_trace(R"({"ts": {}})", "traceEvents[0].ts is not a number");
  refused_trace(R"({"ts": 1e300})", "traceEvents[0].ts is beyond all times");
  refused_trace(R"({"ts": 1e999})", "not JSON");
  refused_trace(R"([1])", "traceEvents[0] is not an object");
  refused_trace(R"("ts")", "traceEvents[0] is not an object");
  refused({"trace", "merge", write("rank-0.json", R"({"traceEvents": [], "shoal": {"rank": 99999999999999999999}})"),
           "-o", "-"},
          {"rank-0.json"});
  refused({"trace", "merge", write("rank-0.json", R"({"traceEvents": [], "shoal": {"rank": 4294967296}})"), "-o", "-"},
          {"rank-0.json: rank 4294967296; ranks are 0 to 99999"});
  refused({"trace", "merge", trace(R"({"ts": 3})"), "-o", folder_.file("rank-0.json")}, {"give another output"});
}

TEST_F(OutsideFiles, traces_larger_than_memory_are_merged) {
  const auto path = folder_.file("rank-0.json");
  {
    std::ofstream file(path);
    file << R"({"traceEvents": [{"ts": 5})";
    for (int i = 0; i < 2'000'000; ++i) file << R"(,{"ts": )" << 6 + i % 1000 << R"(, "args": {"name": [[], [], []]}})";
    file << R"(], "shoal": {"rank": 0}})";
  }
  const auto ended =
      confined({"trace", "merge", path, "-o", folder_.file("job.json")}, 90);  // 70 MB, beside other tests
  EXPECT_EQ(ended.code, 0) << ended.output;
  EXPECT_GT(std::filesystem::file_size(folder_.file("job.json")), 50'000'000U);
}

// gzip of `header` and then `size` zeros.
void pack(const std::string& path, const std::string& header, int64_t size) {
  const gzFile file = gzopen(path.c_str(), "wb1");
  gzwrite(file, header.data(), static_cast<unsigned>(header.size()));
  const std::string zeros(size_t{1} << 20, '\0');
  for (; size > 0; size -= static_cast<int64_t>(zeros.size())) gzwrite(file, zeros.data(), unsigned{1} << 20);
  gzclose(file);
}

TEST_F(OutsideFiles, packed_data_are_unpacked_as_far_as_their_header_says) {
  write("train-labels-idx1-ubyte", std::string("\0\0\x08\x01\0\0\0\x01\0", 9));
  const auto images = folder_.file("train-images-idx3-ubyte.gz");
  const auto refused_images = [&](const std::string& part) {
    refused({"train", "--strategy", "none", "--model", "mlp", "--data", "fashion-mnist:" + folder_.path().string()},
            {"train-images-idx3-ubyte.gz", part});
  };
  const int64_t gigabytes = int64_t{2} << 30;
  pack(images, "no header", gigabytes);
  refused_images("not an IDX file");
  pack(images, std::string("\0\0\x08\x03\0\0\0\x01\0\0\0\x1c\0\0\0\x1c", 16), gigabytes);
  refused_images("too long: the header announces 1 x 28 x 28");
  pack(images, std::string("\0\0\x08\x03\0\x40\0\0\0\0\0\x1c\0\0\0\x1c", 16), gigabytes);
  refused_images("the header announces 4194304 x 28 x 28 = 3288334336 bytes, a file of its size holds at most");
}

TEST_F(OutsideFiles, a_sparse_safetensors_file_is_not_trusted_with_its_size) {
  std::string header = "{";
  for (int i = 0; header.size() < 90'000'000; ++i) {
    if (i > 0) header += ',';
    header += "\"" + std::to_string(i) + R"(":{"dtype":"U8","shape":[1],"data_offsets":[0,1]})";
  }
  header += '}';
  const uint64_t length = header.size();
  const auto path = write("x.safetensors", std::string(reinterpret_cast<const char*>(&length), 8) + header);
  std::filesystem::resize_file(path, uintmax_t{1} << 40);
  refused({"checkpoint", "inspect", path}, {"x.safetensors", "its JSON takes more than"});
  const std::string one = R"({"a":{"dtype":"U8","shape":[1099511627676],"data_offsets":[0,1099511627676]}})";
  const uint64_t short_length = one.size();
  write("y.safetensors", std::string(reinterpret_cast<const char*>(&short_length), 8) + one);
  std::filesystem::resize_file(folder_.file("y.safetensors"), uintmax_t{1099511627676} + 8 + one.size());
  const auto ended = confined({"checkpoint", "inspect", folder_.file("y.safetensors")});
  EXPECT_EQ(ended.code, 0) << ended.output;
}

}  // namespace
}  // namespace shoal::test::outside_files_test
