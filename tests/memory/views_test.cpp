// Parameter-shaped views of flat buffers.

#include "memory/views.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace shoal {
namespace {

TEST(Views, lie_in_the_flat_memory_with_the_parameters_shape) {
  const auto flat = at::arange(100, at::kFloat);
  const auto view = view_like(flat, 10, at::empty({3, 4}));
  EXPECT_TRUE(at::equal(view, flat.narrow(0, 10, 12).view({3, 4})));
  view.fill_(7);
  EXPECT_EQ(flat[21].item<float>(), 7);
  EXPECT_EQ(flat[22].item<float>(), 22);
}

TEST(Views, keep_dense_layouts_and_make_others_row_major) {
  const auto flat = at::zeros({400});
  const auto channels_last = at::empty({2, 3, 4, 4}).contiguous(at::MemoryFormat::ChannelsLast);
  EXPECT_EQ(view_like(flat, 0, channels_last).strides(), channels_last.strides());
  const auto gaps = at::empty({6, 8}).narrow(1, 0, 4);
  EXPECT_TRUE(view_like(flat, 0, gaps).is_contiguous());
  EXPECT_EQ(view_like(flat, 5, at::empty({})).dim(), 0);
  EXPECT_EQ(view_like(flat, 5, at::empty({0, 3})).numel(), 0);
}

TEST(Views, may_be_detached_in_place_as_optimizers_do) {
  auto view = view_like(at::zeros({10}), 2, at::empty({4}));
  EXPECT_NO_THROW(view.detach_().zero_());
}

TEST(Views, same_view_means_same_memory_and_layout) {
  const auto flat = at::zeros({64});
  const auto parameter = at::empty({4, 4});
  const auto view = view_like(flat, 0, parameter);
  EXPECT_TRUE(same_view(view, view_like(flat, 0, parameter)));
  EXPECT_FALSE(same_view(view, view_like(flat, 16, parameter)));
  EXPECT_FALSE(same_view(view, view.t()));
  EXPECT_FALSE(same_view(view, view.clone()));
  EXPECT_FALSE(same_view(at::Tensor(), view));
}

TEST(Views, lists_share_memory_if_any_bytes_are_in_both) {
  const auto flat = at::zeros({64});
  const auto part = [&](int64_t begin, int64_t numel) { return flat.narrow(0, begin, numel); };
  EXPECT_FALSE(share_memory({part(0, 8), part(16, 8)}, {part(8, 8), part(24, 40)}));
  EXPECT_FALSE(share_memory({part(0, 16), part(4, 2)}, {part(16, 8), part(16, 8)}));
  EXPECT_FALSE(share_memory({part(0, 16)}, {part(4, 0), at::zeros({16})}));
  EXPECT_FALSE(share_memory({}, {part(0, 16)}));
  EXPECT_TRUE(share_memory({part(0, 8)}, {part(0, 8)}));
  EXPECT_TRUE(share_memory({part(0, 8)}, {part(32, 8), part(7, 8)}));
  EXPECT_TRUE(share_memory({part(40, 2), part(8, 32), part(10, 2)}, {part(30, 1)}));
}

}  // namespace
}  // namespace shoal
