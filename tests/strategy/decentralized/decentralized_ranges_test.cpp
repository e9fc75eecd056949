// Profiler ranges of a decentralised step (row DEC20).

#include <ATen/record_function.h>

#include <map>

#include "tests/strategy/decentralized/decentralized_ring.h"

namespace shoal::decentralized_ranges_test {
namespace {

using namespace test;  // NOLINT(google-build-using-namespace): helpers of this folder's tests

TEST(Decentralized, DEC20_forward_mixing_updates_and_exchanges_are_named_ranges_in_the_profiler) {
  static std::map<std::string, int> begun;
  static int open = 0;
  auto callback = at::RecordFunctionCallback(
                      [](const at::RecordFunction& range) -> std::unique_ptr<at::ObserverContext> {
                        ++begun[range.name()];
                        ++open;
                        return nullptr;
                      },
                      [](const at::RecordFunction&, at::ObserverContext*) { --open; })
                      .scopes({at::RecordScope::USER_SCOPE});
  auto model = seeded(1);
  DecentralizedDataParallel parallel(model, plain(), group(), {.topology = ring(), .bucket_cap_mb = small_bucket});
  mean_loss(parallel.forward(batch(me(), 0))).backward();
  const auto handle = at::addGlobalCallback(callback);
  for (int64_t step = 1; step < 4; ++step) mean_loss(parallel.forward(batch(me(), step))).backward();
  EXPECT_THROW(parallel.forward(at::zeros({3, 3}, at::kDouble)), c10::Error);
  at::removeCallback(handle);
  const auto buckets = static_cast<int>(parallel.buckets().size());
  ASSERT_GT(buckets, 1);
  EXPECT_EQ(begun["shoal::forward"], 4) << "one of them failed";
  EXPECT_EQ(begun["shoal::update"], 3 * buckets);
  EXPECT_EQ(begun["shoal::show"], 3 * buckets);
  EXPECT_EQ(begun["shoal::mix"], 3 * buckets);
  EXPECT_EQ(open, 0) << "every range ends";
}

}  // namespace
}  // namespace shoal::decentralized_ranges_test
