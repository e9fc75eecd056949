// Saving and reading on real ranks.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <torch/types.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <random>

#include "checkpoint/folder.h"
#include "checkpoint/loading/match.h"
#include "checkpoint/loading/reader.h"
#include "checkpoint/on_all_ranks.h"
#include "checkpoint/saving/saver.h"
#include "shoal/error.h"
#include "tests/checkpoint/tensors.h"
#include "tests/support/refusal.h"
#include "tests/support/shared_folder.h"
#include "tests/support/world.h"

namespace shoal::saver_test {
namespace {

namespace fs = std::filesystem;
using test::SharedFolder;
using test::Whole;
using ::testing::EndsWith;
using ::testing::HasSubstr;

const Group& group() {
  return test::world().group();
}

CheckpointContents contents_of(int64_t step, std::vector<NamedSlice> slices) {
  return {.step = step,
          .strategy = "test",
          .slices = std::move(slices),
          .rank_state = {{"position", 10 * group().rank()}},
          .global_state = {{"scale", 1024.5}, {"schedule", {{"steps", step}}}}};
}

void expect_equal(const CheckpointReader& reader, const std::vector<Whole>& wholes) {
  EXPECT_EQ(reader.index().tensors.size(), wholes.size());
  for (const auto& whole : wholes) {
    EXPECT_TRUE(test::same_bytes(reader.read(whole.name), whole.tensor)) << whole.name;
    EXPECT_EQ(reader.tensor(whole.name).part, whole.part);
  }
}

// Expects any range in any order, read into tensors of any layout, to equal a slice of the whole tensor.
void expect_any_range(const CheckpointReader& reader, const std::vector<Whole>& wholes, uint32_t seed) {
  std::mt19937 random(seed);
  for (int i = 0; i < 100; ++i) {
    const auto& whole = wholes[random() % wholes.size()];
    const auto numel = whole.tensor.numel();
    std::vector<int64_t> order(whole.tensor.dim());
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    if (random() % 3 == 0) order = whole.order;
    auto begin = static_cast<int64_t>(random() % (numel + 1));
    auto end = static_cast<int64_t>(random() % (numel + 1));
    if (begin > end) std::swap(begin, end);
    const auto expected = test::in_order({whole.name, whole.tensor, order}).narrow(0, begin, end - begin);
    auto destination =
        at::empty({end - begin, 2}, whole.tensor.scalar_type()).select(1, static_cast<int64_t>(random() % 2));
    reader.read(whole.name, {begin, end}, destination, {.order = order});
    ASSERT_TRUE(test::same_bytes(destination, expected)) << whole.name << " " << begin << ":" << end;
  }
}

TEST(Saver, BEY05_what_ranks_hold_comes_back_for_any_other_division) {
  const SharedFolder folder;
  CheckpointSaver saver(group(), folder / "run");
  for (uint32_t seed = 1; seed <= 3; ++seed) {
    SCOPED_TRACE(seed);
    const auto wholes = test::random_wholes(seed);
    saver.save(contents_of(seed, test::random_slices(wholes, group().rank(), group().size(), seed + 100)));
    const auto reader = open_checkpoint(group(), folder / "run");
    expect_equal(reader, wholes);
    expect_any_range(reader, wholes, seed + 1000 * group().rank());
    const auto& index = reader.index();
    EXPECT_EQ(index.step, seed);
    EXPECT_EQ(index.strategy, "test");
    EXPECT_EQ(index.world_size, group().size());
    EXPECT_EQ(index.global_state["scale"], 1024.5);
    for (int rank = 0; rank < group().size(); ++rank) EXPECT_EQ(index.rank_states[rank]["position"], 10 * rank);
    EXPECT_GT(reader.verify().bytes, 3'600'000);
    EXPECT_EQ(reader.verify().unchecked, 0);
  }
}

TEST(Saver, BEY05_what_all_ranks_have_is_written_once_and_in_equal_parts) {
  const SharedFolder folder;
  std::vector<Whole> wholes;
  std::mt19937 random(3);
  int64_t bytes = 0;
  for (int i = 0; i < 24; ++i) {
    wholes.push_back({fmt::format("layer{}", i), test::random_tensor(random, {1000 + i}, at::kFloat)});
    bytes += 4 * (1000 + i);
  }
  CheckpointSaver(group(), folder / "run").save(contents_of(1, test::whole_slices(wholes)));
  const CheckpointReader reader(folder / "run");
  expect_equal(reader, wholes);
  EXPECT_EQ(reader.index().files.size(), static_cast<size_t>(group().size()));
  for (const auto& [name, size] : reader.index().files) EXPECT_LT(size, bytes / group().size() + 4100 + 4000) << name;
}

TEST(Saver, BEY05_one_ranks_model_is_a_plain_file) {
  if (group().size() > 1) GTEST_SKIP() << "for one rank";
  const SharedFolder folder;
  const auto wholes = test::random_wholes(4);
  CheckpointSaver(group(), folder / "run").save(contents_of(7, test::whole_slices(wholes)));
  const CheckpointReader plain(folder / "run/step-7/model.safetensors");
  EXPECT_EQ(plain.index().tensors.size(), wholes.size() - 1) << "the optimizer is in a file of its own";
  for (const auto& whole : wholes) {
    if (whole.part != "model") continue;
    EXPECT_TRUE(test::same_bytes(plain.read(whole.name), whole.tensor)) << whole.name;
  }
  EXPECT_TRUE(fs::exists(folder / "run/step-7/optimizer.safetensors"));
}

TEST(Saver, BEY06_a_snapshot_holds_what_was_there_when_the_call_returned) {
  const SharedFolder folder;
  for (const int64_t snapshot_mb : {4096, 2, 0}) {  // all of it copied, a part, nothing
    SCOPED_TRACE(snapshot_mb);
    CheckpointSaver saver(group(), folder / "run", {.snapshot_mb = snapshot_mb});
    for (uint32_t seed = 1; seed <= 2; ++seed) {
      const auto wholes = test::random_wholes(seed);
      auto slices = test::random_slices(wholes, group().rank(), group().size(), seed);
      for (auto& slice : slices) slice.values = slice.values.clone();
      saver.save_async(contents_of(seed, slices));
      for (auto& slice : slices) slice.values.zero_();
      slices.clear();
      // Training continues meanwhile, on the group that the saver was made from.
      auto sum = at::ones({1000});
      for (int i = 0; i < 20; ++i) group().all_reduce(sum, ReduceOp::avg).wait();
      EXPECT_EQ(sum[0].item<float>(), 1);
      saver.wait();
      EXPECT_FALSE(saver.busy());
      group().barrier().wait();
      expect_equal(CheckpointReader(folder / "run"), wholes);
      group().barrier().wait();
    }
  }
}

TEST(Saver, BEY06_what_is_no_checkpoint_is_never_replaced_by_one) {
  const SharedFolder folder;
  const auto wholes = test::random_wholes(1);
  if (group().rank() == 0) {
    fs::create_directories(folder / "run/step-7");
    std::ofstream(folder / "run/step-7/mine.txt") << "mine";
    std::ofstream(folder / "run/step-8") << "mine";
    fs::create_directories(folder / "run/step-9");  // empty
  }
  group().barrier().wait();
  CheckpointSaver saver(group(), folder / "run");
  for (const int64_t step : {7, 8}) {
    const auto name = fmt::format("step-{}", step);
    EXPECT_THAT(test::refusal<CheckpointError>([&] { saver.save(contents_of(step, test::whole_slices(wholes))); }),
                HasSubstr(name + " is there already and is no checkpoint"));
  }
  group().barrier().wait();
  EXPECT_TRUE(fs::exists(folder / "run/step-7/mine.txt"));
  EXPECT_EQ(fs::file_size(folder / "run/step-8"), 4U);
  saver.save(contents_of(9, test::whole_slices(wholes)));
  expect_equal(CheckpointReader(folder / "run"), wholes);
}

TEST(Saver, BEY06_old_checkpoints_go_and_latest_follows) {
  const SharedFolder folder;
  CheckpointSaver saver(group(), folder / "run", {.keep_last = 2});
  const auto wholes = test::random_wholes(1);
  const auto steps = [&] {
    saver.wait();
    group().barrier().wait();
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder / "run")) names.push_back(entry.path().filename());
    std::sort(names.begin(), names.end());
    group().barrier().wait();
    return names;
  };
  for (const int64_t step : {10, 20, 100}) saver.save(contents_of(step, test::whole_slices(wholes)));
  EXPECT_EQ(steps(), (std::vector<std::string>{".lock", "latest", "step-100", "step-20"}));
  EXPECT_EQ(find_checkpoint(folder / "run"), folder / "run/step-100");
  // The run goes back to step 20 and continues from there; the next save keeps checkpoints of later steps.
  saver.save(contents_of(30, test::whole_slices(wholes)));
  EXPECT_EQ(steps(), (std::vector<std::string>{".lock", "latest", "step-100", "step-20", "step-30"}));
  EXPECT_EQ(find_checkpoint(folder / "run"), folder / "run/step-30");
  EXPECT_EQ(find_checkpoint(folder / "run/latest"), folder / "run/step-30");
  // Saving the same step again replaces it.
  const auto other = test::random_wholes(2);
  saver.save(contents_of(30, test::whole_slices(other)));
  EXPECT_EQ(steps(), (std::vector<std::string>{".lock", "latest", "step-100", "step-20", "step-30"}));
  expect_equal(CheckpointReader(folder / "run"), other);
}

// Expects the same kind of error on every rank, with all of `parts` in its text, and the old checkpoint to remain.
template <class Error, class Act>
void expect_on_all_ranks(const Act& act, const std::vector<std::string>& parts) {
  std::string text = "no error";
  try {
    act();
  } catch (const Error& error) {
    text = error.what();
  }
  for (const auto& part : parts) EXPECT_THAT(text, HasSubstr(part));
  for (const auto& other : all_gather_text(group(), text, {})) EXPECT_EQ(other, text);
}

TEST(Saver, BEY05_slices_that_do_not_fit_are_named_on_all_ranks) {
  const SharedFolder folder;
  CheckpointSaver saver(group(), folder / "run");
  const auto last = group().size() - 1;
  const auto save = [&](const std::function<void(NamedSlice&)>& change, std::vector<NamedSlice> more = {}) {
    auto slice = whole_slice("w", at::ones({4, 5}));
    if (group().rank() == last) change(slice);
    std::vector<NamedSlice> slices{slice};
    if (group().rank() == last) slices.insert(slices.end(), more.begin(), more.end());
    saver.save(contents_of(1, slices));
  };
  const auto wrong = [&](const std::function<void(NamedSlice&)>& change, const std::string& text) {
    expect_on_all_ranks<UsageError>([&] { save(change); }, {"w", text});
  };
  wrong([](auto& slice) { slice.values = at::ones({3}); }, "3 values for range 0:20");
  wrong([](auto& slice) { slice.range = {0, 21}; }, "range 0:21 of 20 elements");
  wrong([](auto& slice) { slice.values = at::Tensor(); }, "undefined");
  wrong([](auto& slice) { slice.values = at::ones({4, 5}, at::kComplexDouble); }, "no dtype ComplexDouble");
  wrong([](auto& slice) { slice.part = "../x"; }, "part");
  wrong([](auto& slice) { slice.order = {0, 0}; }, "permutation");
  const auto no_change = [](NamedSlice&) {};
  NamedSlice half{.name = "v", .shape = {10}, .range = {5, 10}, .values = at::ones({5})};
  expect_on_all_ranks<UsageError>([&] { save(no_change, {half}); }, {"v: no rank has elements 0:5"});
  half.range = {0, 5};
  expect_on_all_ranks<UsageError>([&] { save(no_change, {half}); }, {"v: no rank has elements 5:10"});
  auto overlap = half;
  overlap.range = {3, 8};
  expect_on_all_ranks<UsageError>([&] { save(no_change, {half, overlap}); }, {"v", "slice 3:8 overlaps"});
  if (group().size() > 1) {
    const auto shape = fmt::format("rank {} Float [2, 10]", last);
    wrong([](auto& slice) { slice = whole_slice("w", at::ones({2, 10})); }, shape);
    expect_on_all_ranks<DisagreeError>(
        [&] { saver.save(contents_of(group().rank() == last ? 2 : 1, {whole_slice("w", at::ones({4}))})); }, {});
  }
  EXPECT_FALSE(fs::exists(folder / "run/latest"));
  saver.save(contents_of(1, {whole_slice("w", at::ones({4}))}));
  EXPECT_TRUE(fs::exists(folder / "run/step-1"));
}

// Its names take more memory than any reader of a file of this size allows.
TEST(Saver, BEY05_a_file_that_no_load_would_accept_is_not_published) {
  if (group().size() > 1) GTEST_SKIP() << "ranks divide the tensors among files";
  const SharedFolder folder;
  std::vector<test::Whole> wholes;
  for (int number = 0; number < 8000; ++number) {
    wholes.push_back({std::to_string(number) + std::string(8000, 'n'), at::full({1}, number)});
  }
  expect_on_all_ranks<CheckpointError>(
      [&] { CheckpointSaver(group(), folder / "run").save(contents_of(1, test::whole_slices(wholes))); },
      {"was not saved", "model.safetensors", "its JSON takes more than"});
  EXPECT_FALSE(fs::exists(folder / "run/step-1"));
}

TEST(Saver, BEY05_a_damaged_file_is_named_on_all_ranks_when_it_is_read) {
  const SharedFolder folder;
  const auto wholes = test::random_wholes(1);
  CheckpointSaver(group(), folder / "run").save(contents_of(1, test::whole_slices(wholes)));
  const CheckpointReader before(folder / "run");
  const auto file = before.tensor("large").slices[0].file;
  if (group().rank() == 0) {
    FILE* stream = std::fopen((folder / "run/step-1" / file).c_str(), "r+");
    std::fseek(stream, -20, SEEK_END);
    const int byte = std::fgetc(stream);
    std::fseek(stream, -20, SEEK_END);
    std::fputc(byte ^ 4, stream);
    std::fclose(stream);
  }
  group().barrier().wait();
  const auto reader = open_checkpoint(group(), folder / "run");
  expect_on_all_ranks<CheckpointError>([&] { on_all_ranks(group(), "read", [&] { reader.verify(); }); },
                                       {file, "damaged", "checksum"});
  EXPECT_NO_THROW(open_checkpoint(group(), folder / "run", /*verify=*/false).read("large"));
  group().barrier().wait();
  if (group().rank() == 0) {
    std::fstream(folder / "run/step-1" / file, std::ios::in | std::ios::out | std::ios::binary) << "no header";
  }
  group().barrier().wait();
  EXPECT_NO_THROW(open_checkpoint(group(), folder / "run")) << "files are opened when they are read";
  expect_on_all_ranks<CheckpointError>([&] { open_checkpoint(group(), folder / "nothing"); },
                                       {"no such file or folder; load_latest()", "begin anew"});
}

// As one on NFS, or in a folder that may not be entered: a link to itself, which nobody can follow.
TEST(Saver, BEY06_what_the_file_system_cannot_tell_is_an_error_and_no_empty_run) {
  const SharedFolder folder;
  CheckpointSaver(group(), folder / "run").save(contents_of(5, test::whole_slices(test::random_wholes(1))));
  for (const auto* name : {"run/step-5/index.json", "run/latest"}) {
    const auto path = folder / name;
    group().barrier().wait();
    if (group().rank() == 0) {
      fs::rename(path, folder / "aside");
      fs::remove(folder / "run/latest");  // or the steps would not be looked at
      fs::create_symlink(path.filename(), path);
    }
    group().barrier().wait();
    const auto reason = fmt::format("cannot look at {}: Too many levels of symbolic links", path.string());
    EXPECT_THAT(test::refusal<CheckpointError>([&] { has_checkpoint(folder / "run"); }), HasSubstr(reason));
    EXPECT_THAT(test::refusal<CheckpointError>([&] { find_checkpoint(folder / "run"); }), HasSubstr(reason));
    expect_on_all_ranks<CheckpointError>([&] { open_checkpoint(group(), folder / "run"); }, {reason});
    group().barrier().wait();
    if (group().rank() == 0) {
      fs::rename(folder / "aside", path);
      std::ofstream(folder / "run/latest") << "step-5\n";
    }
    group().barrier().wait();
    EXPECT_TRUE(has_checkpoint(folder / "run"));
  }
}

TEST(Saver, BEY06_a_folder_that_not_all_ranks_see_is_named_on_all) {
  if (group().size() == 1) GTEST_SKIP() << "one rank";
  const SharedFolder folder;
  const auto last = group().size() - 1;
  const auto own = folder / (group().rank() == last ? "another" : "run");  // as on a host that does not share it
  CheckpointSaver saver(group(), own);
  const auto name = fmt::format("own of rank {}", group().rank());
  expect_on_all_ranks<CheckpointError>(
      [&] {
        try {
          saver.save(contents_of(1, {whole_slice(name, at::ones({4}))}));
        } catch (const CheckpointError& error) {  // each names its own folder
          const std::string text = error.what();
          throw CheckpointError(text.substr(text.find(" was not saved")));
        }
      },
      {fmt::format("rank {}: ", last), "/another/.step-1.tmp-", "all ranks need the same folder"});
}

TEST(Saver, BEY05_match_lists_what_differs) {
  const SharedFolder folder;
  CheckpointSaver(group(), folder / "run").save(contents_of(1, test::whole_slices(test::random_wholes(1))));
  const CheckpointReader reader(folder / "run");
  std::vector<WantedTensor> wanted;
  for (const auto& [name, tensor] : reader.index().tensors) {
    if (tensor.part == "model") wanted.push_back({name, tensor.shape});
  }
  EXPECT_TRUE(require_match(reader, wanted, /*partial=*/false).exact());
  wanted.pop_back();
  wanted.push_back({"head.weight", {3}});
  wanted.front().shape = {123};
  const auto found = match(reader, wanted);
  EXPECT_EQ(
      found.describe(),
      fmt::format("missing: head.weight; extra: scalar; of another shape or kind: {} is [5, 7, 3], wanted is [123]",
                  wanted.front().name));
  EXPECT_THROW(require_match(reader, wanted, /*partial=*/true), UsageError);
  wanted.front().shape = {5, 7, 3};
  EXPECT_THROW(require_match(reader, wanted, /*partial=*/false), UsageError);
  EXPECT_EQ(require_match(reader, wanted, /*partial=*/true).missing, std::vector<std::string>{"head.weight"});
  EXPECT_THROW(require_match(reader, {{"other", {1}}}, /*partial=*/true), UsageError) << "nothing of it fits";
}

TEST(Saver, BEY05_a_model_whose_names_lack_a_prefix_is_told_of_it) {
  const SharedFolder folder;
  std::vector<Whole> wholes;
  for (const std::string name :
       {"module.a.weight", "module.a.bias", "module.b.weight", "module.b.bias", "module.c.bias"}) {
    wholes.push_back({name, at::ones({2})});
  }
  CheckpointSaver(group(), folder / "run").save(contents_of(1, test::whole_slices(wholes)));
  const CheckpointReader reader(folder / "run");
  const auto said = [&](const std::vector<std::string>& names, bool partial) {
    std::vector<WantedTensor> wanted;
    for (const auto& name : names) wanted.push_back({name, {2}});
    return test::refusal([&] { require_match(reader, wanted, partial); });
  };
  for (const bool partial : {false, true}) {
    EXPECT_THAT(said({"a.weight", "a.bias", "b.weight"}, partial),
                EndsWith("; it has them with the prefix module., which load_module() takes as its option prefix"));
    EXPECT_THAT(said({"c.bias", "c.weight"}, partial), EndsWith("module.c.bias")) << "not all of them are there";
    EXPECT_THAT(said({"weight", "bias"}, partial), EndsWith("module.c.bias")) << "there are two of them";
  }
  const auto behind = [&] { require_match(reader, {{"module.weight", {2}}}, false, "model", "module."); };
  EXPECT_THAT(test::refusal(behind), EndsWith("module.c.bias")) << "there are two of them";
  EXPECT_THAT(said({"module.a.weight", "bias"}, false), EndsWith("; set partial to load what matches"));
}

}  // namespace
}  // namespace shoal::saver_test
