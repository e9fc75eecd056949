// What ranks decide in a recovery from how far each of them is.

#include <gtest/gtest.h>

#include "elastic/rank_progress.h"

namespace shoal::rank_progress_test {
namespace {

TEST(ElasticPass, ELA02_a_rank_reads_the_progress_that_another_one_has_sent) {
  const RankProgress sent{.changes = 1,
                          .ready = Ready::if_another_has,
                          .newcomer = true,
                          .proven = false,
                          .together_calls = 2,
                          .longest_wait = std::chrono::milliseconds(3),
                          .passes = 4,
                          .place = 5,
                          .step_places = 6};
  const auto read = RankProgress::from_row(sent.to_row());
  EXPECT_EQ(read.to_row(), sent.to_row());
  EXPECT_EQ(read.ready, sent.ready);
  EXPECT_EQ(read.longest_wait, sent.longest_wait);
  EXPECT_EQ(read.step_places, sent.step_places);
}

TEST(ElasticPass, ELA02_a_step_is_finished_by_all_ranks_or_by_none) {
  const RankProgress before{.changes = 7}, can{.changes = 7, .ready = Ready::yes}, has{.changes = 8},
      may{.changes = 7, .ready = Ready::if_another_has};
  EXPECT_TRUE(decide({can, can}, true).finishes(can));
  EXPECT_FALSE(decide({can, can}, false).finishes(can));  // between steps
  EXPECT_FALSE(decide({can, before}, true).finishes(can));
  EXPECT_FALSE(decide({may, may}, true).finishes(may));
  const auto one_has = decide({has, may}, true);
  EXPECT_TRUE(one_has.finishes(may));
  EXPECT_FALSE(one_has.finishes(has));
  EXPECT_FALSE(one_has.loses(may, true) || one_has.loses(has, false));
  EXPECT_TRUE(one_has.loses(before, true));
  EXPECT_TRUE(one_has.loses(may, false));
  EXPECT_TRUE(decide({RankProgress{.changes = 9}, can}, true).loses(can, true));  // by two
}

TEST(ElasticPass, ELA06_a_newcomer_is_on_trial_until_it_has_completed_a_step_with_others) {
  const RankProgress comes{.newcomer = true}, unproven{.ready = Ready::yes, .proven = false}, old{.ready = Ready::yes};
  const auto undone = decide({unproven, old}, false);
  EXPECT_FALSE(undone.proves(comes) || undone.proves(unproven));
  EXPECT_TRUE(undone.proves(old));
  EXPECT_TRUE(decide({unproven, old}, true).proves(unproven));
}

}  // namespace
}  // namespace shoal::rank_progress_test
