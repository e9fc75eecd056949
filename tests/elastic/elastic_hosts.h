#pragma once
// Elastic trainings on several hosts.

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "tests/elastic/elastic_deaths.h"
#include "tests/support/forked_hosts.h"

namespace shoal::test {

// A busy machine may keep all ranks of a host waiting for a second.
inline const ElasticOptions quick{.silent_host_seconds = 1.5};

inline WorldOptions over(const std::string& transport) {
  WorldOptions options;
  options.transport = transport;
  options.timeout_seconds = 4;
  return options;
}

class OnHosts : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!ForkedHosts::possible()) GTEST_SKIP() << "this system does not let a process make namespaces";
  }
};

// Ranks of each host. Sockets add in the order of ranks, so that the bits can be compared with one process's.
struct Kind {
  std::vector<int> hosts;
  std::string transport;

  int ranks() const { return std::accumulate(hosts.begin(), hosts.end(), 0); }
  // By their numbers at the start.
  std::vector<int> ranks_of(size_t host) const {
    std::vector<int> list(static_cast<size_t>(hosts[host]));
    std::iota(list.begin(), list.end(), std::accumulate(hosts.begin(), hosts.begin() + static_cast<int64_t>(host), 0));
    return list;
  }
};

// Waits until all ranks train.
inline bool all_train(const Record& record, int ranks) {
  const double deadline = now() + 20;
  while (record.started < ranks && now() < deadline) usleep(200);
  return record.started == ranks;
}

}  // namespace shoal::test
