// Damaged and hostile files: each is refused with a CheckpointError or read unchanged, within bounded memory (BEY05).
//
// SHOAL_MUTATIONS (default 10000) sets their number.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <random>

#include "base/environment.h"
#include "checkpoint/format/crc32.h"
#include "checkpoint/loading/export.h"
#include "checkpoint/loading/reader.h"
#include "checkpoint/saving/saver.h"
#include "shoal/error.h"
#include "shoal/world.h"
#include "tests/checkpoint/heap_meter.h"
#include "tests/checkpoint/tensors.h"
#include "tests/support/memory_meter.h"
#include "tests/support/temp_folder.h"

namespace shoal::mutation_test {
namespace {

namespace fs = std::filesystem;
using Random = std::mt19937;

std::string bytes_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_file(const fs::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

size_t below(Random& random, size_t limit) {
  return limit == 0 ? 0 : random() % limit;
}

// Contents as a reader sees them; nothing: refused. Exceptions other than CheckpointError fail the test.
std::optional<std::string> contents(const fs::path& path) {
  try {
    const CheckpointReader reader(path);
    const auto& index = reader.index();
    std::string seen = fmt::format("{} {} {} {} {}\n", index.step, index.strategy, index.library,
                                   index.global_state.dump(), nlohmann::json(index.rank_states).dump());
    for (const auto& [name, about] : index.tensors) {
      if (about.dtype == at::ScalarType::Undefined) continue;
      const auto tensor = reader.read(name);
      seen += fmt::format("{} {} {} ", name, about.part, nlohmann::json(about.shape).dump());
      seen.append(static_cast<const char*>(tensor.data_ptr()), tensor.nbytes());
    }
    return seen;
  } catch (const CheckpointError&) {
    return std::nullopt;
  }
}

const char* const odd_values[] = {"-1",
                                  "1e300",
                                  "0.5",
                                  "18446744073709551615",
                                  "9223372036854775807",
                                  "4611686018427387904",
                                  "null",
                                  "[]",
                                  "{}",
                                  "\"x\"",
                                  "\"../../etc/passwd\"",
                                  "\"/etc/passwd\"",
                                  "4294967296",
                                  "99999999999999999999999",
                                  "00",
                                  "true"};

// Changes JSON by its structure: values, repeated entries, nesting, keys and file names.
std::string mutate_json(std::string text, Random& random) {
  const auto pick = [&](char c) {
    const auto found = text.find(c, below(random, text.size()));
    return found == std::string::npos ? text.find(c) : found;
  };
  switch (random() % 5) {
    case 0: {  // another value
      const auto begin = text.find_first_of("0123456789", pick(':'));
      if (begin == std::string::npos) return text;
      const auto end = text.find_first_not_of("0123456789", begin);
      return text.replace(begin, end - begin, odd_values[random() % std::size(odd_values)]);
    }
    case 1: {  // something twice
      const auto begin = pick('"');
      const auto end = text.find(',', begin);
      if (end == std::string::npos) return text;
      return text.insert(begin, text.substr(begin, end + 1 - begin));
    }
    case 2: {  // deep
      const auto place = pick(':');
      const auto depth = size_t{1} << (random() % 18);
      return text.insert(place + 1, std::string(depth, random() % 2 == 0 ? '[' : '{'));
    }
    case 3: {  // another name
      const auto begin = pick('"') + 1;
      const auto end = text.find('"', begin);
      if (end == std::string::npos) return text;
      return text.replace(begin, end - begin, random() % 2 == 0 ? "../../../etc/passwd" : "model.safetensors");
    }
    default: {  // another string
      const auto begin = pick('"');
      return text.replace(begin, 1 + below(random, 6), odd_values[random() % std::size(odd_values)]);
    }
  }
}

std::string with_checksum(std::string text) {
  const auto end = text.rfind(",\"crc32\":\"");
  if (end == std::string::npos) return text;
  text.resize(end);
  return text + fmt::format(",\"crc32\":\"{:08x}\"}}\n", crc32(text.data(), text.size()));
}

uint64_t length_of(const std::string& bytes) {
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof length);
  return length;
}

std::string with_header(const std::string& bytes, const std::string& header) {
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof length) + header +
         bytes.substr(8 + length_of(bytes));
}

// Changes bytes, whatever they mean.
std::string mutate_bytes(std::string bytes, Random& random) {
  const auto place = below(random, bytes.size());
  switch (random() % 6) {
    case 0:
      bytes[place] = static_cast<char>(bytes[place] ^ (1 << (random() % 8)));
      return bytes;
    case 1:
      return bytes.substr(0, random() % 2 == 0 ? place : place / 8 * 8);
    case 2:
      return bytes.insert(place, std::string(1 + below(random, 20), static_cast<char>(random())));
    case 3:
      return bytes.erase(place, 1 + below(random, 20));
    case 4:
      return bytes + std::string(1 + below(random, 20), '\0');
    default:
      for (size_t i = place; i < std::min(place + 16, bytes.size()); ++i) bytes[i] = static_cast<char>(random());
      return bytes;
  }
}

std::string mutate_length(std::string bytes, Random& random) {
  const uint64_t lengths[] = {0,
                              1,
                              length_of(bytes) - 1,
                              length_of(bytes) + 1,
                              bytes.size() - 8,
                              bytes.size() - 7,
                              100'000'000,
                              100'000'001,
                              uint64_t{1} << 32,
                              uint64_t{1} << 63,
                              ~uint64_t{0},
                              random() * uint64_t{random()}};
  const auto length = lengths[random() % std::size(lengths)];
  std::memcpy(bytes.data(), &length, sizeof length);
  return bytes;
}

struct Mutation {
  std::string bytes;
  bool exact = false;    // whatever is read afterwards must equal the original
  bool payload = false;  // flips one bit of a tensor
};

Mutation mutate(const std::string& name, const std::string& bytes, bool checksums, Random& random) {
  if (name.ends_with(".json")) {
    if (random() % 3 == 0) return {mutate_bytes(bytes, random), checksums};
    const auto text = mutate_json(bytes, random);
    return random() % 2 == 0 ? Mutation{with_checksum(text)} : Mutation{text, checksums};
  }
  const auto data = 8 + length_of(bytes);
  switch (random() % 4) {
    case 0: {
      auto changed = bytes;
      const auto place = data + below(random, bytes.size() - data);
      changed[place] = static_cast<char>(changed[place] ^ (1 << (random() % 8)));
      return {changed, checksums, true};
    }
    case 1:
      return {with_header(bytes, mutate_json(bytes.substr(8, data - 8), random)), checksums};
    case 2:
      return {mutate_length(bytes, random), checksums};
    default:
      return {mutate_bytes(bytes, random), checksums};
  }
}

int mutations() {
  return std::stoi(process_environment()("SHOAL_MUTATIONS").value_or("10000"));
}

int64_t bytes_below(const fs::path& folder) {
  int64_t sum = 0;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file()) sum += static_cast<int64_t>(entry.file_size());
  }
  return sum;
}

// Peak memory of `act` beyond the present use.
template <class Act>
int64_t memory_of(const Act& act) {
  auto& tensors = test::MemoryMeter::instance();
  tensors.reset_peak();
  test::heap_peak = test::heap_live.load();
  const auto before = tensors.live() + test::heap_live;
  act();
  return tensors.peak() + test::heap_peak - before;
}

TEST(Mutations, BEY05_every_damaged_file_is_refused_or_read_as_it_was) {
  const test::TempFolder folder;
  const auto world = init();
  auto wholes = test::random_wholes(1);
  std::erase_if(wholes, [](const auto& whole) { return whole.name == "large"; });
  CheckpointSaver(world.group(), folder.path() / "run")
      .save({.step = 5,
             .strategy = "ddp",
             .slices = test::random_slices(wholes, 0, 1, 2),
             .rank_state = {{"position", 7}},
             .global_state = {{"scale", 2.5}}});
  {
    const CheckpointReader reader(folder.path() / "run");
    export_folder(reader, folder.path() / "plain");
    export_folder(reader, folder.path() / "sharded", 4000);
  }
  struct Target {
    fs::path open;
    fs::path file;
    std::string bytes;
    std::string contents;
    bool checksums;
  };
  std::vector<Target> targets;
  for (const auto* name : {"run/step-5", "plain", "sharded"}) {
    const auto open = folder.path() / name;
    for (const auto& entry : fs::directory_iterator(open)) {
      targets.push_back(
          {open, entry.path(), bytes_of(entry.path()), contents(open).value(), name == std::string("run/step-5")});
    }
  }
  Random random(5);
  int refused = 0, flips = 0;
  int64_t most = 0;
  for (int i = 0; i < mutations(); ++i) {
    const auto& target = targets[random() % targets.size()];
    const auto mutation = mutate(target.file.filename(), target.bytes, target.checksums, random);
    SCOPED_TRACE(fmt::format("mutation {} of {}", i, target.file.string()));
    write_file(target.file, mutation.bytes);
    std::optional<std::string> seen;
    const auto limit = 11 * bytes_below(target.open) + (64LL << 20);  // see index_limit()
    const auto memory = memory_of([&] { ASSERT_NO_THROW(seen = contents(target.open)); });
    ASSERT_LT(memory, limit);
    most = std::max(most, memory);
    ASSERT_TRUE(!mutation.exact || !seen || *seen == target.contents) << "read, but not as it was";
    if (mutation.exact && mutation.payload) {
      ASSERT_FALSE(seen) << "a flipped bit of a tensor was not noticed";
      ++flips;
    }
    refused += seen ? 0 : 1;
    write_file(target.file, target.bytes);
  }
  for (const auto& target : targets) EXPECT_EQ(contents(target.open), target.contents) << "the originals are good";
  EXPECT_GT(refused, mutations() / 2);
  EXPECT_GT(flips, mutations() / 50);
  fmt::print("{} mutations, {} refused; {} of {} payload flips noticed; at most {:.1f} MiB taken\n", mutations(),
             refused, flips, flips, static_cast<double>(most) / (1 << 20));
}

TEST(Mutations, BEY05_headers_of100_megabytes_take_no_more_than_the_file) {
  const test::TempFolder folder;
  const auto path = folder.file("x.safetensors");
  constexpr int64_t length = 100'000'000;
  const std::vector<std::pair<std::string, std::string>> headers{
      {R"({"a":)", "["},                                            // deep
      {R"({"a":)", "[],"},                                          // many small values
      {R"({"a":{"dtype":"F32","shape":[)", "1,"},                   // a shape without end
      {"{\"", "x"},                                                 // a name without end
      {R"({"__metadata__":{"a":")", "\\u0001"},                     // text that grows when it is quoted
      {"{", " "},                                                   // nothing
      {"{", R"("":{"dtype":"U8","shape":[],"data_offsets":[]},)"},  // the same name again and again
  };
  for (const auto& [begin, repeated] : headers) {
    SCOPED_TRACE(begin + repeated);
    {
      std::ofstream file(path, std::ios::binary | std::ios::trunc);
      file.write(reinterpret_cast<const char*>(&length), sizeof length);
      std::string block;
      while (block.size() < 1 << 20) block += repeated;
      file << begin;
      auto left = length - static_cast<int64_t>(begin.size());
      for (; left > 0; left -= static_cast<int64_t>(block.size())) {
        file.write(block.data(), std::min<int64_t>(left, static_cast<int64_t>(block.size())));
      }
    }
    std::string error;
    const auto memory = memory_of([&] {
      try {
        CheckpointReader{path};
      } catch (const CheckpointError& refusal) {
        error = refusal.what();
      }
    });
    EXPECT_NE(error, "");
    EXPECT_LT(error.size(), 1000U);
    EXPECT_LT(memory, length + (64LL << 20));
  }
}

}  // namespace
}  // namespace shoal::mutation_test
