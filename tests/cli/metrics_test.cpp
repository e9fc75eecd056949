// `shoal train --metrics`, its TensorBoard form, and the wrapper's logging data (DDP17) in the report.

#include <gmock/gmock.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <sstream>

#include "tests/cli/shoal_program.h"

namespace shoal::test::metrics_test {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

std::vector<json> lines_of(const std::string& path) {
  std::vector<json> lines;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) lines.push_back(json::parse(line));
  return lines;
}

TEST(Metrics, every_step_and_evaluation_is_a_line) {
  const TempFolder folder;
  std::ofstream(folder.file("text.txt")) << std::string(6000, 'a') + std::string(6000, 'b');
  const auto report = train({"--data", "text:" + folder.file("text.txt"), "--model", "gpt", "--steps", "12", "--ranks",
                             "2", "--batch", "2", "--eval", "--metrics", folder.file("metrics.jsonl"), "--save",
                             folder.file("run"), "--save-every", "1"});
  ASSERT_FALSE(report.is_null());
  const auto& communication = report["communication"];
  const auto sent = communication["step_bytes"].get<std::vector<int64_t>>();
  EXPECT_EQ(std::llround(12 * communication["bytes_per_step"].get<double>()),
            std::accumulate(sent.begin(), sent.end(), int64_t{0}))
      << "without evaluations and saves";
  EXPECT_EQ(communication["wire_bytes_per_step"], 0) << "over shared memory, though saves ask the store";
  const auto lines = lines_of(folder.file("metrics.jsonl"));
  ASSERT_EQ(lines.size(), 13U) << "12 steps and the evaluation at the end";
  double seconds = 0;
  for (int64_t step = 0; step < 12; ++step) {
    const auto& line = lines[step];
    EXPECT_EQ(line["step"], step);
    EXPECT_EQ(line["samples"], (step + 1) * 2 * 2) << "of all ranks";
    EXPECT_GT(line["seconds"], seconds);
    seconds = line["seconds"];
    EXPECT_NEAR(line["lr"].get<double>(), report["lr"][step].get<double>(), 1e-12);
    EXPECT_GT(line["step_ms"], line["wait_ms"]);
    EXPECT_GE(line["step_ms"], line["update_ms"]);
    // Times of the parts are measured in the first ten steps, and then in every hundredth.
    for (const auto* part : {"forward_ms", "backward_ms", "communication_ms", "overlap_ms"}) {
      ASSERT_EQ(line.contains(part), step < 10) << part << " in step " << step;
    }
    if (step >= 10) continue;
    EXPECT_LT(line["forward_ms"].get<double>() + line["backward_ms"].get<double>(), line["step_ms"]);
    EXPECT_LE(line["overlap_ms"], line["communication_ms"]);
  }
  EXPECT_EQ(lines.back()["step"], 11);
  EXPECT_NEAR(lines.back()["eval_loss"].get<double>(), report["eval"][0]["loss"].get<double>(), 1e-6);
  EXPECT_EQ(lines.back()["eval_count"], report["eval"][0]["count"]);
}

// Epochs need not end with whole batches, nor have one.
TEST(Metrics, samples_are_those_that_were_trained) {
  constexpr int64_t windows = 81;  // of the training part, which 3 ranks share evenly
  const TempFolder folder;
  std::ofstream(folder.file("text.txt")) << std::string(2900, 'a');
  const auto samples = [&](const std::vector<std::string>& more) {
    std::vector<std::string> options{
        "--data",    "text:" + folder.file("text.txt"), "--model", "gpt", "--ranks", "3", "--epochs", "2",
        "--metrics", folder.file("metrics.jsonl")};
    options.insert(options.end(), more.begin(), more.end());
    const auto report = train(options);
    if (report.is_null()) return json();
    const auto last = lines_of(folder.file("metrics.jsonl")).back();
    const auto rate = last["samples"].get<double>() / last["seconds"].get<double>();
    // The report's time is that of the slowest rank.
    EXPECT_LT(report["timing"]["samples_per_second"].get<double>(), rate + 1);
    return last["samples"];
  };
  EXPECT_EQ(samples({"--batch", "7"}), 2 * windows);
  EXPECT_EQ(samples({"--batch", "1000"}), 2 * windows);
  EXPECT_EQ(samples({"--batch", "7", "--elastic", "1"}), 2 * windows);
  EXPECT_EQ(samples({"--batch", "7", "--elastic", "1", "--keep-global-batch"}), 2 * windows);
  // Batches that do not fill a step are left out.
  EXPECT_EQ(samples({"--batch", "7", "--accumulate", "3"}), 2 * 3 * 3 * 7);
}

TEST(Metrics, loss_is_rank0s) {
  const TempFolder folder;
  const auto report = train({"--data", "reference", "--model", "mlp", "--steps", "3", "--ranks", "1", "--metrics",
                             folder.file("metrics.jsonl")});
  ASSERT_FALSE(report.is_null());
  const auto lines = lines_of(folder.file("metrics.jsonl"));
  for (size_t step = 0; step < 3; ++step) {
    EXPECT_DOUBLE_EQ(lines.at(step)["loss"].get<double>(), report["loss"][step].get<double>());
  }
}

// CRC computed bit by bit from the polynomial.
uint32_t crc32c(const std::string& data) {
  uint32_t crc = ~0U;
  for (const char byte : data) {
    crc ^= static_cast<unsigned char>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc & 1U) != 0 ? crc >> 1U ^ 0x82F63B78U : crc >> 1U;
  }
  return ~crc;
}

template <class T>
T number_at(const std::string& bytes, size_t place) {
  T value{};
  std::memcpy(&value, bytes.substr(place, sizeof value).data(), sizeof value);
  return value;
}

// Reader of protocol buffers: fields by number, each as bytes.
std::vector<std::pair<int, std::string>> fields_of(const std::string& message) {
  std::vector<std::pair<int, std::string>> fields;
  size_t place = 0;
  const auto varint = [&] {
    uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
      const auto byte = static_cast<unsigned char>(message.at(place++));
      value |= static_cast<uint64_t>(byte & 127U) << shift;
      if (byte < 128) return value;
    }
  };
  while (place < message.size()) {
    const auto key = varint();
    const auto type = key & 7U;
    uint64_t size = type == 1 ? 8 : type == 5 ? 4 : 0;
    if (type == 2) size = varint();
    if (type == 0) {
      const auto value = varint();
      fields.emplace_back(key >> 3U, std::string(reinterpret_cast<const char*>(&value), sizeof value));
      continue;
    }
    fields.emplace_back(key >> 3U, message.substr(place, size));
    place += size;
  }
  return fields;
}

struct Scalar {
  int64_t step;
  std::string tag;
  float value;
};

// Reads TFRecord framing, including checksums; the file's version comes first.
std::vector<Scalar> read_events(const std::string& bytes) {
  const auto expect_sum = [&](const std::string& data, size_t place) {
    const auto masked = std::rotr(crc32c(data), 15) + 0xA282EAD8U;
    EXPECT_EQ(number_at<uint32_t>(bytes, place), masked) << "checksum at byte " << place;
  };
  std::vector<Scalar> scalars;
  for (size_t place = 0; place < bytes.size();) {
    const auto length = number_at<uint64_t>(bytes, place);
    expect_sum(bytes.substr(place, 8), place + 8);
    const auto event = bytes.substr(place + 12, length);
    expect_sum(event, place + 12 + length);
    const bool first = place == 0;
    place += length + 16;
    int64_t step = 0;
    for (const auto& [field, data] : fields_of(event)) {
      if (field == 2) step = number_at<int64_t>(data, 0);
      if (field == 3) {
        EXPECT_TRUE(first && data == "brain.Event:2") << data;
      }
      if (field != 5) continue;
      for (const auto& [unused, value] : fields_of(data)) {
        Scalar scalar{step, "", 0};
        for (const auto& [part, content] : fields_of(value)) {
          if (part == 1) scalar.tag = content;
          if (part == 2) scalar.value = number_at<float>(content, 0);
        }
        scalars.push_back(scalar);
      }
    }
  }
  return scalars;
}

TEST(Metrics, become_an_event_file_for_tensor_board) {
  ASSERT_EQ(crc32c("123456789"), 0xE3069283U) << "the published check value";
  const TempFolder folder;
  std::ofstream(folder.file("metrics.jsonl"))
      << R"({"step":0,"seconds":0.5,"loss":2.25,"samples":8,"note":"text"})" << '\n'
      << "torn {\n[1]\n\n"
      << R"({"step":300,"seconds":1.5,"loss":-0.125,"nested":{"a":1}})" << '\n'
      << R"({"step":300,"eval_loss":1e-30})" << '\n'
      << R"({"step":300,"seconds":null,"loss":null,"a":"NaN","b":-Infinity,"c":1e300})" << '\n'
      << R"({"step":301,"loss":)";  // being written
  const std::vector<std::string> line{PYTHON, SCRIPTS "/metrics_to_tensorboard.py", folder.file("metrics.jsonl"),
                                      folder.file("runs")};
  auto ended = run(line, 60);
  ASSERT_EQ(ended.code, 0) << ended.output;
  EXPECT_THAT(ended.output, HasSubstr("8 scalars"));
  EXPECT_THAT(ended.output, HasSubstr("metrics.jsonl: line 2: not JSON; it and 1 more are left out"));
  std::stringstream bytes;
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder.file("runs"))) {
    EXPECT_THAT(entry.path().filename().string(), ::testing::StartsWith("events.out.tfevents."));
    bytes << std::ifstream(entry.path(), std::ios::binary).rdbuf();
    ++files;
  }
  EXPECT_EQ(files, 1);
  constexpr float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<Scalar> expected{{0, "loss", 2.25F},         {0, "samples", 8},   {300, "loss", -0.125F},
                                     {300, "eval_loss", 1e-30F}, {300, "loss", nan},  {300, "a", nan},
                                     {300, "b", -infinity},      {300, "c", infinity}};
  const auto scalars = read_events(bytes.str());
  ASSERT_EQ(scalars.size(), expected.size());
  for (size_t i = 0; i < scalars.size(); ++i) {
    EXPECT_EQ(scalars[i].step, expected[i].step);
    EXPECT_EQ(scalars[i].tag, expected[i].tag);
    EXPECT_TRUE(scalars[i].value == expected[i].value || std::isnan(scalars[i].value)) << scalars[i].tag;
    EXPECT_EQ(std::isnan(scalars[i].value), std::isnan(expected[i].value)) << scalars[i].tag;
  }

  ended = run(line, 60);
  EXPECT_NE(ended.code, 0);
  EXPECT_THAT(ended.output, HasSubstr("is not empty"));
  std::ofstream(folder.file("metrics.jsonl")) << "{\"loss\":1}\n";
  ended = run({PYTHON, SCRIPTS "/metrics_to_tensorboard.py", folder.file("metrics.jsonl"), folder.file("other")}, 60);
  EXPECT_NE(ended.code, 0);
  EXPECT_THAT(ended.output, HasSubstr("line 1: no step"));
  std::ofstream(folder.file("metrics.jsonl")) << R"({"step":1,"loss":1})";  // whole, without its line end
  ended = run({PYTHON, SCRIPTS "/metrics_to_tensorboard.py", folder.file("metrics.jsonl"), folder.file("other")}, 60);
  EXPECT_EQ(ended.code, 0) << ended.output;
  EXPECT_THAT(ended.output, HasSubstr("1 scalars"));
}

json report_of(const std::string& metrics) {
  const TempFolder folder;
  std::ofstream(folder.file("m.jsonl")) << metrics;
  const auto ended = shoal({"report", folder.file("m.jsonl"), "-o", folder.file("r.html"), "--json", "-"});
  EXPECT_EQ(ended.code, 0) << ended.output;
  return json::parse(ended.output)["runs"][0]["metrics"];
}

// Another program need not end it; of a run that still writes there may be a part.
TEST(Report, a_last_line_without_its_end_is_read_if_it_is_whole) {
  const std::string text = "{\"step\":1,\"loss\":1}\n{\"step\":2,\"loss\":0.5}";
  EXPECT_EQ(report_of(text)["loss"]["count"], 2);
  EXPECT_EQ(report_of(text + "\n{\"step\":3,\"loss\":0.2")["loss"]["count"], 2);
}

TEST(Report, a_metric_without_numbers_has_no_least_and_no_most) {
  const auto metrics = report_of("{\"step\":1,\"loss\":NaN,\"lr\":0.5}\n");
  for (const auto* figure : {"least", "most", "last"}) {
    EXPECT_TRUE(metrics["loss"][figure].is_null()) << figure;
    EXPECT_EQ(metrics["lr"][figure], 0.5) << figure;
  }
}

// The wrappers' own test checks the details.
TEST(Report, DDP17_logging_data_of_every_strategy) {
  const std::vector<std::pair<std::string, std::string>> strategies{
      {"ddp", "DistributedDataParallel"},   {"zero1", "DistributedDataParallel"},
      {"zero2", "ShardedDataParallel"},     {"megatron", "DistributedOptimizer"},
      {"fsdp", "FullyShardedDataParallel"}, {"decentralized", "DecentralizedDataParallel"}};
  for (const auto& [strategy, name] : strategies) {
    const auto report =
        train({"--data", "reference", "--model", "mlp", "--steps", "4", "--ranks", "2", "--strategy", strategy});
    ASSERT_FALSE(report.is_null()) << strategy;
    const auto& logging = report["logging"];
    EXPECT_EQ(logging["strategy"], name);
    EXPECT_EQ(logging["world_size"], 2);
    EXPECT_EQ(logging["rank"], 0);
    EXPECT_EQ(logging["steps"], 4);
    EXPECT_EQ(logging["sampled_steps"], 4);
    EXPECT_EQ(logging["environment"]["WORLD_SIZE"], "2");
    int64_t bytes = 0;
    for (const auto& parameter : report["params"]) {
      int64_t numel = 1;
      for (const auto& side : parameter["shape"]) numel *= side.get<int64_t>();
      bytes += 4 * numel;
    }
    EXPECT_EQ(logging["trainable_bytes"], bytes) << strategy;
    int64_t travelling = 0;
    for (const auto& bucket : logging["bucket_bytes"]) travelling += bucket.get<int64_t>();
    EXPECT_GE(travelling, bytes) << strategy;
    EXPECT_GT(logging["mean"]["backward_ms"], 0) << strategy;
  }
  const auto alone = train({"--data", "reference", "--model", "mlp", "--steps", "2", "--strategy", "none"});
  EXPECT_FALSE(alone.contains("logging")) << "there is no wrapper";
  const auto table =
      shoal({"train", "--data", "reference", "--model", "mlp", "--steps", "2", "--ranks", "1", "--logging-data"});
  EXPECT_THAT(table.output, HasSubstr("settings.find_unused_parameters      no\n"));
}

}  // namespace
}  // namespace shoal::test::metrics_test
