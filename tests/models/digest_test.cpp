// Digests compared with numbers of the Python definition.

#include "models/digest.h"

#include <gtest/gtest.h>
#include <torch/types.h>

#include "models/registry.h"

namespace shoal::models {
namespace {

void expect_digest(const Digest& got, const Digest& expected) {
  constexpr double tolerance = 1e-12;
  EXPECT_NEAR(got.sum, expected.sum, tolerance * expected.abs_sum);
  EXPECT_NEAR(got.abs_sum, expected.abs_sum, tolerance * expected.abs_sum);
  EXPECT_NEAR(got.l2, expected.l2, tolerance * expected.l2);
  EXPECT_NEAR(got.probe, expected.probe, tolerance * expected.abs_sum);
}

TEST(Digest, matches_the_definition_on_parameters) {
  const auto parameters = make_model("gpt", "tiny", Init::reference, 1)->named_parameters();
  expect_digest(digest(0, parameters["wte.weight"]), {.sum = 7.6992674767971039,
                                                      .abs_sum = 1027.7190071642399,
                                                      .l2 = 9.2661264630944871,
                                                      .probe = -7.2648909525697931});
  expect_digest(digest(12, parameters["blocks.0.out.bias"]), {.sum = 0.059565767645835876,
                                                              .abs_sum = 2.0547375679016113,
                                                              .l2 = 0.29189218759083541,
                                                              .probe = -0.12616041204849804});
}

constexpr Digest of_counting{.sum = 276, .abs_sum = 276, .l2 = 65.757128891094382, .probe = -70.31955623626709};

TEST(Digest, takes_integers) {
  expect_digest(digest(7, at::arange(24, at::kLong).view({2, 3, 4})), of_counting);
}

TEST(Digest, follows_the_logical_order) {
  const auto counting = at::arange(24, at::kDouble).view({1, 4, 3, 2});
  expect_digest(digest(7, counting.contiguous(at::MemoryFormat::ChannelsLast)), of_counting);
}

TEST(Digest, probe_notices_a_wrong_order) {
  const auto x = at::arange(24, at::kDouble);
  EXPECT_NE(digest(7, x.flip(0)).probe, digest(7, x).probe);
  EXPECT_NE(digest(8, x).probe, digest(7, x).probe);
}

}  // namespace
}  // namespace shoal::models
