// Updates of a parameter in pieces that start at multiples of 32 elements, which equal the whole update bit for bit;
// strategies that cut parameters rely on it (BEY12, BEY18).

#include "shoal/optim.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/optim/lbfgs.h>
#include <torch/types.h>
#include <torch/utils.h>

namespace shoal::element_wise_test {
namespace {

using namespace torch::optim;

static_assert(element_wise<SGD> && element_wise<Adam> && element_wise<AdamW> && element_wise<RMSprop>);
static_assert(element_wise<Adagrad> && element_wise<FusedSGD> && element_wise<FusedAdam>);
static_assert(element_wise<FusedAdamW> && element_wise<FusedAdagrad> && !element_wise<LBFGS>);
static_assert(element_wise<AccumAdam> && element_wise<AccumAdamW>);
static_assert(!element_wise<Lamb> && !element_wise<Adafactor> && !element_wise<Muon>);

// Long enough for several threads in libtorch's kernels, and not a multiple of anything.
constexpr int64_t elements = 70'003;
const std::vector<int64_t> cuts{0, 32, 64, 4'096, 33'344, 33'376, 66'688, 69'952, elements};

std::vector<at::Tensor> pieces_of(const at::Tensor& whole) {
  std::vector<at::Tensor> pieces;
  for (size_t i = 0; i + 1 < cuts.size(); ++i) pieces.push_back(whole.slice(0, cuts[i], cuts[i + 1]));
  return pieces;
}

// Number of elements that differ after some steps.
template <class Optimizer, class Options>
int64_t different(const Options& options, at::ScalarType dtype, int threads_whole, int threads_pieces) {
  torch::manual_seed(7);
  const auto whole = at::randn({elements}).to(dtype), flat = whole.clone();
  auto pieces = pieces_of(flat);
  Optimizer of_whole({whole}, options), of_pieces(pieces, options);
  for (int step = 0; step < 3; ++step) {
    whole.mutable_grad() = at::randn({elements}).to(dtype);
    const auto parts = pieces_of(whole.grad());
    for (size_t i = 0; i < pieces.size(); ++i) pieces[i].mutable_grad() = parts[i];
    at::set_num_threads(threads_whole);
    of_whole.step();
    at::set_num_threads(threads_pieces);
    of_pieces.step();
  }
  return whole.ne(flat).sum().template item<int64_t>();
}

template <class Optimizer, class Options>
void expect_equal(const Options& options) {
  static_assert(element_wise<Optimizer>);
  const auto threads = at::get_num_threads();
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    for (const auto& [whole, pieces] : {std::pair(1, 1), std::pair(2, 2), std::pair(2, 1)}) {
      EXPECT_EQ((different<Optimizer>(options, dtype, whole, pieces)), 0)
          << "elements of " << c10::toString(dtype) << ", " << whole << " threads on the whole, " << pieces
          << " on the pieces";
    }
  }
  at::set_num_threads(threads);
}

TEST(ElementWise, BEY12_pieces_equal_the_whole_fused) {
  expect_equal<FusedSGD>(SGDOptions(0.1).weight_decay(0.1));
  expect_equal<FusedSGD>(SGDOptions(0.1).momentum(0.9).dampening(0.1).weight_decay(0.1));
  expect_equal<FusedSGD>(SGDOptions(0.1).momentum(0.9).nesterov(true));
  expect_equal<FusedAdam>(AdamOptions(0.1).weight_decay(0.1));
  expect_equal<FusedAdam>(AdamOptions(0.1).amsgrad(true));
  expect_equal<FusedAdamW>(AdamWOptions(0.1));
  expect_equal<FusedAdamW>(AdamWOptions(0.1).amsgrad(true));
  expect_equal<FusedAdagrad>(AdagradOptions(0.1).lr_decay(0.1).weight_decay(0.1));
}

TEST(ElementWise, BEY12_pieces_equal_the_whole_libtorch) {
  expect_equal<SGD>(SGDOptions(0.1).weight_decay(0.1));
  expect_equal<SGD>(SGDOptions(0.1).momentum(0.9).dampening(0.1).weight_decay(0.1));
  expect_equal<SGD>(SGDOptions(0.1).momentum(0.9).nesterov(true));
  expect_equal<Adam>(AdamOptions(0.1).weight_decay(0.1));
  expect_equal<Adam>(AdamOptions(0.1).amsgrad(true));
  expect_equal<AdamW>(AdamWOptions(0.1));
  expect_equal<AdamW>(AdamWOptions(0.1).amsgrad(true));
  expect_equal<RMSprop>(RMSpropOptions(0.1).weight_decay(0.1));
  expect_equal<RMSprop>(RMSpropOptions(0.1).momentum(0.9).centered(true));
  expect_equal<Adagrad>(AdagradOptions(0.1).lr_decay(0.1).weight_decay(0.1));
}

// The second step completes a round, and the third starts from its result.
TEST(ElementWise, DEC15_pieces_equal_the_whole_accumulating) {
  expect_equal<AccumAdam>(AccumAdamOptions(0.1).weight_decay(0.1).accum_iter(2));
  expect_equal<AccumAdamW>(AccumAdamOptions(0.1).weight_decay(0.1).accum_iter(2));
}

}  // namespace
}  // namespace shoal::element_wise_test
