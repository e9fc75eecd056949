// Benchmark of saving and loading on as many ranks as the launcher starts. bench/checkpoints.py compares it with the
// disk's own speed.
//
//   shoal launch --ranks N -- bench_checkpoint FOLDER MIB ROUNDS    MIB of float32 in 16 tensors, sharded over ranks
//
// Prints, as JSON, the seconds of each round: save; load, with checksums, after the files have left the page cache;
// stall, until save_async returns; copy, of the rank's part.

#include <fcntl.h>
#include <fmt/format.h>
#include <torch/types.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint/loading/reader.h"
#include "checkpoint/saving/saver.h"
#include "shoal/world.h"

namespace {

using namespace shoal;

// Seconds until all ranks have finished.
template <class Act>
double seconds(const Group& group, const Act& act) {
  group.barrier().wait();
  const auto begin = std::chrono::steady_clock::now();
  act();
  group.barrier().wait();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Drops synced files from the page cache.
void forget(const std::filesystem::path& folder) {
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const int fd = open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) continue;
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    close(fd);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "bench_checkpoint FOLDER MIB ROUNDS\n");
    return 2;
  }
  const std::filesystem::path root = argv[1];
  const auto world = init();
  const auto& group = world.group();
  constexpr int64_t tensors = 16;
  const auto numel = (std::stoll(argv[2]) << 20) / 4 / tensors;
  std::vector<NamedSlice> slices;
  std::vector<at::Tensor> copies;
  for (int64_t i = 0; i < tensors; ++i) {
    const Range range{numel * group.rank() / group.size(), numel * (group.rank() + 1) / group.size()};
    slices.push_back(
        {.name = fmt::format("tensor{}", i), .shape = {numel}, .range = range, .values = at::rand({range.size()})});
    copies.push_back(at::zeros({range.size()}));  // touched pages, as save_async has from its second call on
  }
  CheckpointSaver saver(group, root);  // keeps all: removing an old one would keep the disk busy during another's read
  nlohmann::json result;
  int64_t step = 0;
  const auto contents = [&] { return CheckpointContents{.step = ++step, .strategy = "bench", .slices = slices}; };
  const int rounds = std::stoi(argv[3]);
  for (int round = 0; round < rounds; ++round) {
    result["save"].push_back(seconds(group, [&] { saver.save(contents()); }));
    if (group.rank() == 0) forget(root / fmt::format("step-{}", step));
    result["load"].push_back(seconds(group, [&] {
      const auto reader = open_checkpoint(group, root);
      for (size_t i = 0; i < slices.size(); ++i) reader.read(slices[i].name, slices[i].range, copies[i]);
    }));
    for (size_t i = 0; i < slices.size(); ++i) {
      if (!at::equal(copies[i], slices[i].values)) throw std::runtime_error("what was loaded is not what was saved");
    }
    if (round == 0) saver.save_async(contents());  // allocates its buffer
    saver.wait();
    result["stall"].push_back(seconds(group, [&] { saver.save_async(contents()); }));
    saver.wait();
    result["copy"].push_back(seconds(group, [&] {
      for (size_t i = 0; i < slices.size(); ++i) {
        std::memcpy(copies[i].data_ptr(), slices[i].values.data_ptr(), copies[i].nbytes());
      }
    }));
  }
  if (group.rank() == 0) fmt::print("{}\n", result.dump());
  return 0;
}
