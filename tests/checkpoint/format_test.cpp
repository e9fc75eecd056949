// File formats: files of the Python package, and invalid files.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <torch/types.h>
#include <zlib.h>

#include <climits>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>

#include "checkpoint/format/crc32.h"
#include "checkpoint/format/index.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/format/safetensors_reader.h"
#include "checkpoint/loading/export.h"
#include "checkpoint/loading/reader.h"
#include "checkpoint/pt/pt_file.h"
#include "checkpoint/saving/pieces.h"
#include "shoal/error.h"
#include "tests/checkpoint/tensors.h"
#include "tests/support/refusal.h"
#include "tests/support/temp_folder.h"

namespace shoal::format_test {
namespace {

using test::refusal;
using ::testing::HasSubstr;

void write_file(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

TEST(Crc32, equals_zlibs_for_any_size_place_and_division) {
  std::mt19937 random(1);
  std::vector<unsigned char> data(70000);
  std::generate(data.begin(), data.end(), [&] { return static_cast<unsigned char>(random()); });
  for (int i = 0; i < 3000; ++i) {
    const size_t begin = random() % 100;
    const size_t size = i < 600 ? static_cast<size_t>(i) : random() % (data.size() - begin);
    const auto before = static_cast<uint32_t>(random());
    ASSERT_EQ(crc32(data.data() + begin, size, before), ::crc32_z(before, data.data() + begin, size)) << size;
  }
  BlockChecksums whole(1000), parts(1000);
  whole.add(data.data(), 4321);
  for (size_t begin = 0, size = 0; begin < 4321; begin += size) {
    size = std::min<size_t>(random() % 700, 4321 - begin);
    parts.add(data.data() + begin, size);
  }
  const auto checksums = whole.take();
  EXPECT_EQ(checksums.size(), 5U);
  EXPECT_EQ(checksums[4], ::crc32_z(0, data.data() + 4000, 321));
  EXPECT_EQ(parts.take(), checksums);
}

at::Tensor elements(std::vector<int64_t> shape, at::ScalarType dtype) {
  return (7 * at::arange(c10::multiply_integers(shape), at::kLong)).remainder(120).view(shape).to(dtype);
}

TEST(Safetensors, BEY05_files_of_the_python_package_are_read) {
  const CheckpointReader reader(PYTHON_FILES "/dtypes.safetensors");
  const std::map<std::string, at::ScalarType> dtypes{
      {"f64", at::kDouble}, {"f32", at::kFloat},  {"f16", at::kHalf}, {"i64", at::kLong},
      {"i32", at::kInt},    {"i16", at::kShort},  {"i8", at::kChar},  {"u64", at::kUInt64},
      {"u32", at::kUInt32}, {"u16", at::kUInt16}, {"u8", at::kByte},  {"c64", at::kComplexFloat}};
  for (const auto& [name, dtype] : dtypes) {
    EXPECT_TRUE(test::same_bytes(reader.read(name), elements({2, 3, 5}, dtype))) << name;
  }
  EXPECT_TRUE(test::same_bytes(reader.read("flags"), elements({9}, at::kLong).remainder(2) == 1));
  EXPECT_TRUE(test::same_bytes(reader.read("scalar"), elements({}, at::kFloat)));
  EXPECT_TRUE(test::same_bytes(reader.read("empty"), at::empty({0, 4})));
  EXPECT_TRUE(test::same_bytes(reader.read("name with \"quotes\", \u00fc and \n"), elements({3}, at::kFloat)));
  EXPECT_EQ(reader.index().tensors.size(), 16U);
  EXPECT_EQ(SafetensorsReader(PYTHON_FILES "/dtypes.safetensors").header().metadata.at("made by"),
            "safetensors \u00fc");
}

TEST(Safetensors, BEY05_a_sharded_folder_is_one_model) {
  for (const auto* path : {PYTHON_FILES "/sharded", PYTHON_FILES "/sharded/model.safetensors.index.json"}) {
    const CheckpointReader reader(path);
    EXPECT_TRUE(test::same_bytes(reader.read("a.weight"), elements({4, 4}, at::kFloat)));
    EXPECT_TRUE(test::same_bytes(reader.read("b.weight"), elements({2, 4}, at::kFloat)));
    EXPECT_TRUE(test::same_bytes(reader.read("b.bias"), elements({4}, at::kHalf)));
    auto part = at::zeros({2, 2}, at::kDouble);
    EXPECT_THROW(reader.read("a.weight", {3, 7}, part), UsageError) << "another dtype";
    reader.read("a.weight", {3, 7}, part.t(), {.convert = true});
    EXPECT_TRUE(at::equal(part.t().reshape({-1}), elements({4, 4}, at::kDouble).view({-1}).narrow(0, 3, 4)));
    EXPECT_EQ(reader.verify().unchecked, 104);
  }
}

TEST(Safetensors, BEY05_what_is_not_the_format_is_refused) {
  const test::TempFolder folder;
  const auto path = folder.file("x.safetensors");
  const auto open = [&](std::string header, const std::string& data, int64_t length = -1) {
    const auto size = static_cast<uint64_t>(length < 0 ? static_cast<int64_t>(header.size()) : length);
    std::string bytes(reinterpret_cast<const char*>(&size), sizeof size);
    write_file(path, bytes + header + data);
    return refusal<CheckpointError>([&] { CheckpointReader{path}; });
  };
  const auto entry = [](const char* dtype, const char* shape, const char* offsets) {
    return fmt::format(R"({{"dtype":"{}","shape":{},"data_offsets":{}}})", dtype, shape, offsets);
  };
  const auto good = R"({"a":)" + entry("F32", "[2]", "[0,8]") + "}";
  EXPECT_EQ(open(good, "12345678"), "nothing was refused");
  EXPECT_EQ(open(good + "   ", "12345678"), "nothing was refused");
  EXPECT_EQ(open(R"({"__metadata__":{"a":"b"}})", ""), "nothing was refused");
  EXPECT_EQ(open(R"({"__metadata__":null})", ""), "nothing was refused");
  const std::vector<std::tuple<std::string, std::string, std::string>> cases{
      {good, "1234567", "goes beyond the end"},
      {good, "123456789", "1 bytes behind the last tensor"},
      {" " + good, "12345678", "does not begin with {"},
      {"", "", "does not begin with {"},
      {"{}x", "", "not JSON"},
      {R"({"a":)", "", "not JSON"},
      {"{\"\xff\":1}", "", "not JSON"},
      {R"({"a":1})", "", "not a JSON object"},
      {R"({"a":)" + entry("F33", "[2]", "[0,8]") + "}", "12345678", "unknown dtype F33"},
      {R"({"a":)" + entry("F32", "[3]", "[0,8]") + "}", "12345678", "8 bytes cannot hold shape [3]"},
      {R"({"a":)" + entry("F4", "[3]", "[0,1]") + "}", "1", "1 bytes cannot hold shape [3]"},
      {R"({"a":)" + entry("F32", "[-2]", "[0,8]") + "}", "12345678", "whole numbers"},
      {R"({"a":)" + entry("F32", "[2.0]", "[0,8]") + "}", "12345678", "whole numbers"},
      {R"({"a":)" + entry("F32", "[2]", "[0,8,8]") + "}", "12345678", "two numbers"},
      {R"({"a":)" + entry("F32", "[2]", "[8,0]") + "}", "12345678", "ascending"},
      {R"({"a":)" + entry("F32", "[2]", "[4,12]") + "}", "123456789012", "the one before it ends at 0"},
      {R"({"a":)" + entry("F32", "[4294967296,4294967296]", "[0,0]") + "}", "", "cannot hold"},
      {R"({"a":)" + entry("F32", "[9223372036854775807]", "[0,36028797018963964]") + "}", "", "cannot hold"},
      {R"({"a":)" + entry("U8", "[9223372036854775807]", "[0,9223372036854775807]") + "}", "", "cannot hold"},
      {R"({"a":)" + entry("U8", "[72057594037927935]", "[0,72057594037927935]") + "}", "", "beyond the end"},
      {R"({"a":)" + entry("U8", "[18446744073709551615]", "[0,18446744073709551615]") + "}", "", "whole numbers"},
      {R"({"a":)" + entry("F32", "[2]", "[0,8]") + R"(,"a":)" + entry("F32", "[2]", "[8,16]") + "}", "1234567890123456",
       "two entries named a"},
      {R"({"a":)" + entry("F32", "[2]", "[0,8]") + R"(,"b":)" + entry("F32", "[2]", "[4,12]") + "}", "123456789012",
       "b begins at byte 4 of the data, the one before it ends at 8"},
      {R"({"a":)" + entry("F32", "[2]", "[0,8]") + R"(,"b":)" + entry("F32", "[2]", "[9,17]") + "}",
       "12345678901234567", "b begins at byte 9"},
      {R"({"a":{"dtype":"F32","shape":[2]}})", "12345678", "no data_offsets"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1}})", "12345678", "unknown entry x"},
      {R"({"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}})", "12345678", "two entries"},
      {R"({"__metadata__":{"a":1}})", "", "a is not text"},
      {R"({"__metadata__":[]})", "", "not a JSON object"},
      {R"({"a":)" + std::string(100000, '[') + std::string(100000, ']') + "}", "", "nested deeper than 32"},
  };
  for (const auto& [header, data, text] : cases) {
    const auto error = open(header, data);
    EXPECT_THAT(error, HasSubstr(text)) << header.substr(0, 100);
    EXPECT_THAT(error, HasSubstr(path));
  }
  EXPECT_THAT(open(good, "12345678", 1000), HasSubstr("truncated"));
  EXPECT_THAT(open(good, "12345678", 100'000'001), HasSubstr("the format allows 100000000"));
  EXPECT_THAT(open(good, "12345678", std::numeric_limits<int64_t>::max()), HasSubstr("the format allows"));
  write_file(path, "1234567");
  EXPECT_THAT(refusal<CheckpointError>([&] { CheckpointReader{path}; }), HasSubstr("7 bytes are no header"));
  EXPECT_THAT(refusal<CheckpointError>([&] { CheckpointReader{folder.file("missing")}; }), HasSubstr("no such file"));
  EXPECT_THAT(refusal<CheckpointError>([&] { CheckpointReader{folder.path()}; }), HasSubstr("has no index.json"));
  EXPECT_THAT(refusal<CheckpointError>([&] { CheckpointReader{"/dev/zero"}; }), HasSubstr("is not a regular file"));
}

TEST(Safetensors, BEY05_a_sharded_index_may_not_lead_out_of_its_folder) {
  const test::TempFolder folder;
  write_file(folder.file("outside.safetensors"), "");
  std::filesystem::create_directory(folder.path() / "model");
  for (const auto* name : {"../outside.safetensors", "/etc/passwd", "..", "", ".hidden", "a\\\\b", "a/b"}) {
    write_file(folder.file("model/model.safetensors.index.json"),
               fmt::format(R"({{"weight_map":{{"a":"{}"}}}})", name));
    EXPECT_THAT(refusal<CheckpointError>([&] { CheckpointReader(folder.path() / "model"); }),
                HasSubstr("is not a plain file name"));
  }
}

// A valid index as JSON with one change, and its checksum recomputed.
std::string changed_index(const std::function<void(nlohmann::json&)>& change) {
  CheckpointIndex index{.library = "1", .step = 3, .strategy = "ddp", .files = {{"f.safetensors", 100}}};
  index.rank_states.push_back(nlohmann::json::object());
  StoredTensor tensor{.name = "w", .part = "model", .dtype = at::kFloat, .shape = {2, 5}};
  tensor.slices.push_back({.file = "f.safetensors", .range = {0, 6}, .checksums = {1}});
  tensor.slices.push_back({.file = "f.safetensors", .range = {6, 10}, .checksums = {0xffffffff}});
  index.tensors["w"] = tensor;
  auto json = nlohmann::json::parse(index_text(index));
  json.erase("crc32");
  change(json);
  auto text = json.dump();
  text.pop_back();
  return text + fmt::format(",\"crc32\":\"{:08x}\"}}\n", crc32(text.data(), text.size()));
}

// Of ParameterLists and many small layers; it takes nine times its text.
TEST(Index, BEY05_an_index_of_many_tensors_is_read) {
  CheckpointIndex index{
      .library = "1", .step = 1, .strategy = "ddp", .world_size = 1, .files = {{"model.safetensors", 1 << 20}}};
  for (int number = 0; number < 60000; ++number) {
    const auto name = fmt::format("layers.{}.weight", number);
    index.tensors[name] = {.name = name,
                           .part = "model",
                           .dtype = at::kFloat,
                           .shape = {2},
                           .slices = {{.file = "model.safetensors", .range = {0, 2}, .checksums = {1}}}};
  }
  index.rank_states.push_back(nlohmann::json::object());
  const auto text = index_text(index);
  EXPECT_EQ(parse_index(text, index_limit(static_cast<int64_t>(text.size())), "index").tensors.size(), 60000U);
  EXPECT_THROW(parse_index(text, json_allowance, "index"), CheckpointError);
  const auto bytes = static_cast<int64_t>(text.size());
  EXPECT_EQ(refusal([&] { require_loadable(text, "its index", bytes); }), "nothing was refused");
  EXPECT_THAT(refusal<CheckpointError>([&] { require_loadable(text, "its index", bytes - 1); }),
              HasSubstr(fmt::format("its index has {} bytes, {} at most", bytes, bytes - 1)));
}

TEST(SavedFile, a_link_stays_and_its_target_is_written) {
  namespace fs = std::filesystem;
  const test::TempFolder folder;
  const auto ones = at::ones({3});
  fs::create_directory(folder.path() / "far");
  for (const std::string name : {"x.safetensors", "x.pt"}) {
    const auto link = folder.path() / name;
    fs::create_symlink("far/" + name, link);
    for (const auto& values : {ones, 2 * ones}) {  // of a target that does not exist yet, and of one that does
      name == "x.pt" ? save_pt(link, {{"a", values}}) : save_safetensors(link, {{"a", values}}, {});
      EXPECT_TRUE(fs::is_symlink(link)) << name;
      EXPECT_TRUE(test::same_bytes(CheckpointReader(folder.path() / "far" / name).read("a"), values)) << name;
    }
  }
  export_file(CheckpointReader(folder.path() / "x.pt"), folder.path() / "x.safetensors");
  EXPECT_TRUE(fs::is_symlink(folder.path() / "x.safetensors"));
  ASSERT_EQ(mkfifo(folder.file("pipe").c_str(), 0600), 0);
  fs::create_symlink("pipe", folder.path() / "to_pipe.pt");
  fs::create_symlink("round.pt", folder.path() / "round.pt");
  EXPECT_THAT(refusal<CheckpointError>([&] {
                save_pt(folder.path() / "to_pipe.pt", {{"a", ones}});
              }),
              HasSubstr("to_pipe.pt: it is no regular file"));
  EXPECT_THAT(refusal<CheckpointError>([&] {
                save_pt(folder.path() / "round.pt", {{"a", ones}});
              }),
              HasSubstr("Too many levels of symbolic links"));
}

TEST(SavedFile, the_permissions_of_the_file_that_is_replaced_stay) {
  namespace fs = std::filesystem;
  const test::TempFolder folder;
  for (const std::string name : {"x.safetensors", "x.pt"}) {
    const auto path = folder.path() / name;
    for (const int mode : {0600, 0666}) {  // of which the usual umask would add to the one and take from the other
      write_file(path, "");
      fs::permissions(path, fs::perms(mode));
      name == "x.pt" ? save_pt(path, {{"a", at::ones({3})}}) : save_safetensors(path, {{"a", at::ones({3})}}, {});
      EXPECT_EQ(fs::status(path).permissions(), fs::perms(mode)) << name;
    }
  }
}

TEST(SavedFile, the_formats_own_name_is_refused) {
  const test::TempFolder folder;
  EXPECT_THAT(refusal([&] {
                save_safetensors(folder.file("x.safetensors"), {{"__metadata__", at::ones({1})}}, {});
              }),
              HasSubstr("a tensor cannot be named __metadata__"));
}

TEST(SavedFile, a_name_is_as_long_as_the_system_allows) {
  const test::TempFolder folder;
  const std::string extension = ".safetensors";
  const auto path = folder.file(std::string(NAME_MAX - extension.size(), 'n') + extension);
  save_safetensors(path, {{"a", at::ones({3})}}, {});
  EXPECT_TRUE(test::same_bytes(CheckpointReader(path).read("a"), at::ones({3})));
}

TEST(Index, BEY05_what_is_not_the_format_is_refused) {
  using Json = nlohmann::json;
  const auto parse = [](const std::string& text) {
    return refusal<CheckpointError>([&] { parse_index(text, 64 << 20, "index"); });
  };
  EXPECT_EQ(parse(changed_index([](Json&) {})), "nothing was refused");
  const std::vector<std::pair<std::function<void(Json&)>, std::string>> cases{
      {[](Json& j) { j["format"] = "other"; }, "not the index"},
      {[](Json& j) { j["version"] = 2; }, "format version 2"},
      {[](Json& j) { j["more"] = 2; }, "unknown entry more"},
      {[](Json& j) { j.erase("step"); }, "no step"},
      {[](Json& j) { j["step"] = -1; }, "step is not a whole number"},
      {[](Json& j) { j["step"] = 18446744073709551615U; }, "step is too large"},
      {[](Json& j) { j["world_size"] = 2; }, "one entry per rank"},
      {[](Json& j) { j["files"]["../x"] = 2; }, "not a plain file name"},
      {[](Json& j) { j["files"]["/etc/passwd"] = 2; }, "not a plain file name"},
      {[](Json& j) { j["files"]["f.safetensors"] = "2"; }, "not a whole number"},
      {[](Json& j) { j["files"]["f.safetensors"] = 39; }, "f.safetensors is too small for its tensors"},
      {[](Json& j) { j["tensors"]["w"]["slices"][0]["file"] = "g.safetensors"; }, "not in the list of files"},
      {[](Json& j) { j["tensors"]["w"]["slices"][0]["end"] = 5; }, "does not continue at 5"},
      {[](Json& j) { j["tensors"]["w"]["slices"][1]["begin"] = 5; }, "does not continue at 6"},
      {[](Json& j) { j["tensors"]["w"]["slices"][1]["end"] = 11; }, "goes beyond its 10 elements"},
      {[](Json& j) { j["tensors"]["w"]["slices"][1]["end"] = 5; }, "goes beyond"},
      {[](Json& j) { j["tensors"]["w"]["slices"][1]["end"] = 9; }, "elements 9:10 are in no slice"},
      {[](Json& j) { j["tensors"]["w"]["slices"].erase(1); }, "elements 6:10 are in no slice"},
      {[](Json& j) { j["tensors"]["w"]["slices"].push_back(j["tensors"]["w"]["slices"][1]); }, "does not continue"},
      {[](Json& j) { j["tensors"]["w"]["slices"][0]["crc32"] = "0000000100000001"; }, "number of checksums"},
      {[](Json& j) { j["tensors"]["w"]["slices"][0]["crc32"] = "0000000X"; }, "hexadecimal"},
      {[](Json& j) { j["tensors"]["w"]["slices"][0]["crc32"] = ""; }, "number of checksums"},
      {[](Json& j) { j["tensors"]["w"]["dtype"] = "F99"; }, "unknown dtype"},
      {[](Json& j) {
         j["tensors"]["w"]["shape"] = {2, 6};
       },
       "elements 10:12 are in no slice"},
      {[](Json& j) {
         j["tensors"]["w"]["shape"] = {4294967296, 4294967296};
       },
       "too large"},
      {[](Json& j) {
         j["tensors"]["w"]["order"] = {0, 2};
       },
       "permutation"},
      {[](Json& j) { j["tensors"]["w"]["part"] = "../m"; }, "part"},
      {[](Json& j) { j["state"]["global"] = 1; }, "global is not a JSON object"},
  };
  for (const auto& [change, text] : cases) EXPECT_THAT(parse(changed_index(change)), HasSubstr(text));
  auto flipped = changed_index([](Json&) {});
  flipped[flipped.find("\"step\":3") + 7] = '4';
  EXPECT_THAT(parse(flipped), HasSubstr("the checksum does not match"));
  EXPECT_THAT(parse(""), HasSubstr("not JSON"));
  EXPECT_THAT(parse("{}"), HasSubstr("no format"));
  EXPECT_THAT(refusal<CheckpointError>([] { parse_index("[" + std::string(1000, ' ') + "]", 40, "index"); }),
              HasSubstr("memory"));
}

TEST(Pieces, any_layout_gives_the_elements_in_row_major_order) {
  const auto base = at::arange(4 * 6 * 5 * 7, at::kInt).view({4, 6, 5, 7});
  const std::vector<at::Tensor> tensors{base,
                                        base.permute({3, 1, 0, 2}),
                                        base.narrow(2, 1, 3),
                                        base.select(1, 2),
                                        base.slice(0, 0, 4, 2),
                                        base.expand({4, 6, 5, 7}).transpose(0, 3),
                                        at::ones({}, at::kInt).expand({3, 4}),
                                        at::empty({0, 3}, at::kInt),
                                        at::ones({}, at::kInt)};
  for (const auto& tensor : tensors) {
    for (const int64_t bytes : {4, 12, 64, 1 << 20}) {
      std::vector<int32_t> seen;
      for_each_piece(
          tensor,
          [&](const void* data, int64_t first, int64_t size) {
            ASSERT_EQ(first, static_cast<int64_t>(seen.size()));
            ASSERT_LE(size, bytes);
            const auto* begin = static_cast<const int32_t*>(data);
            seen.insert(seen.end(), begin, begin + size / 4);
          },
          bytes);
      const auto expected = tensor.contiguous();
      EXPECT_EQ(seen,
                std::vector<int32_t>(expected.data_ptr<int32_t>(), expected.data_ptr<int32_t>() + tensor.numel()));
    }
  }
}

}  // namespace
}  // namespace shoal::format_test
