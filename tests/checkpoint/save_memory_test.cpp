// Memory that saving and loading need beside the tensors themselves (BEY05).

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <limits>

#include "checkpoint/loading/reader.h"
#include "checkpoint/loading/reshard.h"
#include "checkpoint/saving/saver.h"
#include "comm/group/text.h"
#include "tests/checkpoint/heap_meter.h"
#include "tests/support/memory_meter.h"
#include "tests/support/temp_folder.h"
#include "tests/support/world.h"

namespace shoal::save_memory_test {
namespace {

constexpr double mebibyte = 1 << 20;
constexpr int64_t rows = 2400;
constexpr int64_t columns = 4000;  // 37 MiB of int32: a quarter is more than all bounds below

// MiB that `act` needs at its peak, beyond the present use.
template <class Act>
double extra(const Act& act) {
  auto& tensors = test::MemoryMeter::instance();
  tensors.reset_peak();
  test::heap_peak = test::heap_live.load();
  const auto before = tensors.live() + test::heap_live;
  act();
  return static_cast<double>(tensors.peak() + test::heap_peak - before) / mebibyte;
}

TEST(SaveMemory, BEY05_beside_its_own_part_a_rank_needs_pieces) {
  const auto& group = test::world().group();
  std::unique_ptr<test::TempFolder> folder;
  if (group.rank() == 0) folder = std::make_unique<test::TempFolder>();
  const std::filesystem::path root = broadcast_text(group, folder ? folder->file("run") : "", 0, {});

  // One tensor is cut into rows, the other has another order in memory.
  const auto first = rows * group.rank() / group.size();
  const auto last = rows * (group.rank() + 1) / group.size();
  const Range range{first * columns, last * columns};
  const auto own = at::arange(range.begin, range.end, at::kInt);
  const auto transposed =
      at::arange(range.begin, range.end, at::kInt).view({last - first, columns}).t().contiguous().t();
  const std::vector<NamedSlice> slices{
      {.name = "plain", .shape = {rows, columns}, .range = range, .values = own},
      {.name = "strided", .shape = {rows, columns}, .range = range, .values = transposed}};
  const double part = 2 * static_cast<double>(own.nbytes()) / mebibyte;
  const auto contents = [&](int64_t step) {
    return CheckpointContents{.step = step, .strategy = "test", .slices = slices};
  };
  CheckpointSaver saver(group, root, {.snapshot_mb = std::numeric_limits<int64_t>::max()});
  const auto saving = extra([&] { saver.save(contents(1)); });
  const auto copying = extra([&] {
    saver.save_async(contents(2));
    saver.wait();
  });
  CheckpointSaver bounded(group, root, {.snapshot_mb = 1});
  const auto in_bounds = extra([&] {
    bounded.save_async(contents(3));
    bounded.wait();
  });
  EXPECT_LT(saving, 4);
  EXPECT_LT(copying, part + 4);
  EXPECT_GT(copying, part) << "the meter measures";
  EXPECT_LT(in_bounds, 5);

  group.barrier().wait();
  const CheckpointReader reader(root);
  auto into = at::empty_like(own);
  auto strided = at::empty({columns, last - first}, at::kInt).t();
  auto converted = at::empty({range.size()}, at::kDouble);
  const auto loading = extra([&] {
    reader.read("strided", range, into);
    reader.read("plain", range, strided);
    reader.read("plain", range, converted, {.convert = true});
  });
  EXPECT_LT(loading, 6);
  EXPECT_TRUE(at::equal(into, own));
  EXPECT_TRUE(at::equal(strided, transposed));
  EXPECT_TRUE(at::equal(converted, own.to(at::kDouble)));
  if (group.rank() == 0) {
    const auto resharding = extra([&] { reshard(CheckpointReader(root), folder->path() / "other", 3); });
    EXPECT_LT(resharding, 6);
    fmt::print(
        "part {:.1f} MiB; extra: save {:.2f}, asynchronous {:.2f}, bounded to 1 MiB {:.2f}, load {:.2f}, reshard "
        "{:.2f} MiB\n",
        part, saving, copying, in_bounds, loading, resharding);
  }
  group.barrier().wait();
}

}  // namespace
}  // namespace shoal::save_memory_test
