#pragma once
// Processes that come to elastic trainings on several hosts.

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "comm/membership/store_table.h"
#include "tests/elastic/elastic_hosts.h"
#include "tests/elastic/elastic_join.h"

namespace shoal::test {

inline void expect_good(const std::vector<RankEnded>& ended, const std::vector<int>& members, const Record& record,
                        int epochs) {
  for (const int member : members) {
    const auto& one = ended[static_cast<size_t>(member)];
    EXPECT_TRUE(WIFEXITED(one.status)) << "member " << member << " hung or crashed: " << one.status;
    EXPECT_EQ(one.text, "") << "member " << member;
    EXPECT_EQ(record.evaluations[member].load(), epochs - record.first_epoch[member].load()) << "member " << member;
  }
}

// Lets these processes come, and waits until all have asked to join.
inline void bring(ForkedHosts& hosts, const std::vector<int>& numbers) {
  for (const int number : numbers) hosts.bring(number);
  auto connection = connect_store("127.0.0.1", hosts.port(), 10);
  connection->set_limit(store_limit);
  StoreTable table(std::make_shared<PatientStore>(std::move(connection)), "0",
                   {hosts.ranks(), hosts.ranks(), "127.0.0.1", hosts.port()});
  EXPECT_TRUE(JoinJob::comes_true([&] {
    table.refresh();
    const auto list = table.knocking();
    return std::all_of(numbers.begin(), numbers.end(), [&](int number) {
      return table.is_member(number) || std::count(list.begin(), list.end(), number) > 0;
    });
  }));
  usleep(500'000);  // members look every 50 ms
}

}  // namespace shoal::test
