// Properties of layouts over random shapes and world sizes.

#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "layout/flat_layout.h"
#include "shoal/error.h"

namespace shoal {
namespace {

struct Case {
  std::vector<int64_t> numels;
  size_t element_bytes;
  int world;
};

// Sizes from empty to large, mostly small and odd.
std::vector<Case> random_cases(int count) {
  std::mt19937 random(7);
  std::vector<Case> cases;
  for (int i = 0; i < count; ++i) {
    Case one;
    const auto pieces = random() % 20;
    for (size_t piece = 0; piece < pieces; ++piece) {
      const int64_t limit = random() % 4 == 0 ? 5000 : 70;
      one.numels.push_back(static_cast<int64_t>(random() % limit));
    }
    one.element_bytes = size_t{1} << (random() % 4);
    one.world = 1 + static_cast<int>(random() % 9);
    cases.push_back(one);
  }
  return cases;
}

// Each element of each piece is in exactly one slice.
void expect_tiled(const FlatLayout& layout, const std::vector<std::vector<Slice>>& parts) {
  std::vector<std::vector<int>> count;
  for (size_t piece = 0; piece < layout.pieces(); ++piece) count.emplace_back(layout.range(piece).size());
  for (const auto& slices : parts) {
    for (const auto& slice : slices) {
      ASSERT_EQ(slice.in_piece.size(), slice.in_flat.size());
      ASSERT_GT(slice.in_piece.size(), 0);
      ASSERT_EQ(slice.in_flat.begin, layout.range(slice.piece).begin + slice.in_piece.begin);
      for (auto i = slice.in_piece.begin; i < slice.in_piece.end; ++i) ++count[slice.piece].at(i);
    }
  }
  for (const auto& piece : count) {
    for (const int seen : piece) ASSERT_EQ(seen, 1);
  }
}

TEST(FlatLayout, pieces_are_aligned_ordered_and_disjoint) {
  for (const auto& one : random_cases(600)) {
    const FlatLayout layout(one.numels, one.element_bytes, 128, one.world);
    int64_t end = 0;
    for (size_t piece = 0; piece < layout.pieces(); ++piece) {
      const auto& range = layout.range(piece);
      EXPECT_EQ(range.size(), one.numels[piece]);
      EXPECT_EQ(range.begin * static_cast<int64_t>(one.element_bytes) % 128, 0);
      EXPECT_GE(range.begin, end);
      EXPECT_LT((range.begin - end) * static_cast<int64_t>(one.element_bytes), 128);
      end = range.end;
    }
    EXPECT_EQ(layout.numel(), std::accumulate(one.numels.begin(), one.numels.end(), int64_t{0}));
    EXPECT_LT((layout.size() - end) * static_cast<int64_t>(one.element_bytes), 128 * one.world);
    EXPECT_EQ(layout.size() % one.world, 0);
    EXPECT_EQ(layout.bytes() / one.world % 128, 0);
  }
}

TEST(FlatLayout, overlapping_finds_exactly_what_lies_in_a_range) {
  std::mt19937 random(3);
  for (const auto& one : random_cases(300)) {
    const FlatLayout layout(one.numels, one.element_bytes);
    const auto size = static_cast<uint64_t>(layout.size()) + 1;
    Range range{static_cast<int64_t>(random() % size), static_cast<int64_t>(random() % size)};
    if (range.begin > range.end) std::swap(range.begin, range.end);
    int64_t expected = 0;
    for (size_t piece = 0; piece < layout.pieces(); ++piece) expected += layout.range(piece).intersect(range).size();
    int64_t found = 0;
    for (const auto& slice : layout.overlapping(range)) {
      EXPECT_EQ(slice.in_flat.intersect(range), slice.in_flat);
      found += slice.in_flat.size();
    }
    EXPECT_EQ(found, expected);
  }
}

TEST(FlatLayout, parts_tile_the_buffer_evenly) {
  for (const auto& one : random_cases(300)) {
    const FlatLayout layout(one.numels, one.element_bytes, 128, one.world);
    std::vector<std::vector<Slice>> parts;
    for (int part = 0; part < layout.parts(); ++part) {
      EXPECT_EQ(layout.part(part).size(), layout.size() / one.world);
      parts.push_back(layout.overlapping(layout.part(part)));
    }
    expect_tiled(layout, parts);
  }
}

TEST(Layout, impossible_sizes_and_parts_are_refused) {
  const std::vector<int64_t> negative = {-1};
  const std::vector<int64_t> one = {1};
  EXPECT_THROW(FlatLayout(negative, 4), UsageError);
  EXPECT_THROW(FlatLayout(one, 0), UsageError);
  EXPECT_THROW(FlatLayout(one, 4, 6), UsageError);
  EXPECT_THROW(FlatLayout(one, 4, 128, 0), UsageError);
  const FlatLayout layout(one, 4);
  EXPECT_THROW(layout.part(1), UsageError);
}

}  // namespace
}  // namespace shoal
