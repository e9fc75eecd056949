// JSON from outside takes bounded memory and bounded time.

#include "base/strict_json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ctime>
#include <fstream>

#include "tests/support/refusal.h"
#include "tests/support/temp_folder.h"

namespace shoal::test {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t plenty = int64_t{1} << 32;

json parse(std::string_view text, const JsonLimits& limits = {.bytes = plenty}) {
  return parse_strict(text, limits, "it", refuse_as<UsageError>);
}

std::string said_of(std::string_view text, const JsonLimits& limits = {.bytes = plenty}) {
  return refusal([&] { parse(text, limits); });
}

TEST(StrictJson, reads_what_the_library_reads) {
  for (const auto* text :
       {R"({"a": [1, -2, 0.5, true, false, null, "b\n\u00e4\"\\"], "c": {"d": {}, "e": []}})", "[]", "3", "\"x\"",
        " [ 1 ,\n\t2 ] ", R"({"":"  two  spaces  "})", "[18446744073709551615, -9223372036854775808, 1e300]"}) {
    EXPECT_EQ(parse(text), json::parse(text)) << text;
  }
}

TEST(StrictJson, one_sentence_says_what_is_wrong) {
  EXPECT_THAT(said_of("{\"a\":]"),
              AllOf(HasSubstr("it: not JSON: near byte 6: syntax error"), ::testing::Not(HasSubstr("json.exception"))));
  EXPECT_THAT(said_of(""), HasSubstr("it: not JSON: near byte 0"));
  EXPECT_THAT(said_of("[1e999]"), HasSubstr("it: not JSON: near byte 7: number overflow"));
  EXPECT_THAT(said_of("[1] 2"), HasSubstr("not JSON"));
  EXPECT_THAT(said_of("\"\xff\""), HasSubstr("not JSON"));
  EXPECT_EQ(said_of(R"({"a":{"b":1,"b":2}})"), "it: two entries named b");
}

TEST(StrictJson, depth_memory_and_tokens_have_limits) {
  EXPECT_EQ(said_of(std::string(1'000'000, '['), {.depth = 5, .bytes = plenty}), "it: JSON nested deeper than 5");
  EXPECT_EQ(said_of("[[[[[1]]]]]", {.depth = 5, .bytes = plenty}), "nothing was refused");
  std::string many = "[";
  for (int i = 0; i < 100'000; ++i) many += "[],";
  EXPECT_EQ(said_of(many, {.bytes = 1 << 20}),
            "it: its JSON takes more than 1048576 bytes of memory, the most that is expected");
  const auto name = "{\"" + std::string(2000, 'x') + "\":1}";
  EXPECT_EQ(said_of(name, {.bytes = plenty, .text_bytes = 1000}), "it: a name or text of more than 1000 bytes");
  EXPECT_EQ(said_of(name, {.bytes = plenty, .text_bytes = 3000}), "nothing was refused");
  EXPECT_THAT(said_of(std::string(5000, '1')), HasSubstr("a number or word of more than 1000 bytes"));
  EXPECT_EQ(parse("[" + std::string(10'000'000, ' ') + "1]"), json({1}));
}

TEST(StrictJson, three_hundred_thousand_entries_take_seconds) {
  std::string text = "{";
  constexpr int entries = 300'000;
  for (int i = 0; i < entries; ++i) {
    if (i > 0) text += ',';
    text += "\"" + std::to_string(i) + R"(":{"dtype":"U8","shape":[1],"data_offsets":[0,1]})";
  }
  text += '}';
  const auto begin = std::clock();  // processor time
  EXPECT_EQ(parse(text).size(), entries);
  EXPECT_LT(std::clock() - begin, 6 * CLOCKS_PER_SEC);
}

TEST(StrictJson, a_list_is_handed_out_element_by_element) {
  const TempFolder folder;
  std::string text = R"({"before": [1, 2], "events": [)";
  for (int i = 0; i < 100'000; ++i) text += R"({"ts": )" + std::to_string(i) + R"(, "events": [[1]]}, )";
  text += R"(7], "after": {"events": [8]}})";
  std::ofstream(folder.file("x.json")) << text;
  int64_t sum = 0;
  size_t count = 0;
  const auto each = [&](const json& element) {
    sum += element.is_object() ? element["ts"].get<int64_t>() : element.get<int64_t>();
    ++count;
  };
  const auto rest = parse_strict(InputFile(folder.file("x.json"), refuse_as<UsageError>), {.bytes = 2000}, "it",
                                 refuse_as<UsageError>, {.name = "events", .each = each});
  EXPECT_EQ(count, 100'001U);
  EXPECT_EQ(sum, int64_t{99'999} * 50'000 + 7);
  EXPECT_EQ(rest, json::parse(R"({"before": [1, 2], "events": [], "after": {"events": [8]}})"));
}

}  // namespace
}  // namespace shoal::test
