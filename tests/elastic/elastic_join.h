#pragma once
// Jobs of a test that newcomers join: forked ranks, as of run_ranks(), and a table as a launcher holds it.

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "comm/membership/join_board.h"
#include "tests/elastic/elastic_run.h"

namespace shoal::test {

class JoinJob {
 public:
  using Body = std::function<std::string(const World&)>;

  // Starts the first ranks.
  JoinJob(int ranks, const Body& body, const WorldOptions& options = {})
      : board_("", ranks), port_(free_port()), next_(ranks) {
    setenv(join_variable, board_.address().c_str(), 1);
    for (int rank = 0; rank < ranks; ++rank) {
      auto own = options;
      own.rank = rank;
      own.size = ranks;
      own.address = "127.0.0.1";
      own.port = port_;
      start(rank, body, own);
    }
  }
  ~JoinJob() {
    for (auto& [number, process] : processes_) {
      if (process.pid > 0) ::kill(process.pid, SIGKILL);
      if (process.pid > 0) waitpid(process.pid, nullptr, 0);
    }
    unsetenv(join_variable);
  }
  JoinJob(const JoinJob&) = delete;
  JoinJob& operator=(const JoinJob&) = delete;

  JoinBoard& board() { return board_; }

  // Starts a newcomer; returns its number.
  int add(const Body& body, const WorldOptions& options = {}) {
    const int number = next_++;
    setenv(newcomer_variable, std::to_string(number).c_str(), 1);
    start(number, body, options);
    unsetenv(newcomer_variable);
    return number;
  }
  // A number for an entry that the test makes itself.
  int take_number() { return next_++; }
  pid_t pid(int number) const { return processes_.at(number).pid; }
  void signal(int number, int signal) const { ::kill(pid(number), signal); }

  // Whether the newcomer asks to join, or is a member; false after 20 s.
  bool comes_to_knock(int number) {
    return comes_true([&] {
      const auto list = board_.knocking();
      return std::count(list.begin(), list.end(), number) > 0 || board_.is_member(number);
    });
  }
  static bool comes_true(const std::function<bool()>& condition) {
    for (int i = 0; i < 40'000; ++i) {
      if (condition()) return true;
      usleep(500);
    }
    return false;
  }

  // Waits until the process has ended.
  RankEnded end_of(int number) {
    auto& process = processes_.at(number);
    RankEnded ended;
    waitpid(process.pid, &ended.status, 0);
    process.pid = -1;
    char buffer[4096];
    const auto length = read(process.pipe, buffer, sizeof buffer);
    ended.text.assign(buffer, std::max<ssize_t>(0, length));
    close(process.pipe);
    return ended;
  }

 private:
  struct Process {
    pid_t pid = -1;
    int pipe = -1;
  };

  void start(int number, const Body& body, WorldOptions options) {
    int ends[2];
    if (pipe(ends) != 0) std::abort();
    const pid_t pid = fork();
    if (pid == 0) {
      std::string text;
      try {
        at::set_num_threads(1);
        options.timeout_seconds = 60;
        options.rendezvous_timeout_seconds = 60;
        text = body(init(options));
      } catch (const std::exception& error) {
        text = fmt::format("error: {}", error.what());
      }
      // For a test that fails before it waits for this process.
      if (!text.empty()) fmt::print(stderr, "member {}: {}\n", number, text);
      [[maybe_unused]] const auto written = ::write(ends[1], text.data(), text.size());
      std::_Exit(0);
    }
    close(ends[1]);
    processes_[number] = {pid, ends[0]};
  }

  JoinBoard board_;
  int port_;
  int next_;
  std::map<int, Process> processes_;
};

// What is wrong with a training that `judge` repeats, in a process of its own, because one that has run backward must
// not fork.
inline std::string judged(const Record& record, int epochs, bool in_rank_order = true, const Trained& trained = {}) {
  const auto verdict =
      run_ranks(1, [&](const World&) { return judge(record, epochs, in_rank_order, trained); }).front();
  return WIFEXITED(verdict.status) ? verdict.text : "the judge has crashed";
}

// Numbers of ranks in the order of steps, without repetitions.
inline std::vector<int> sizes_of(const Record& record) {
  std::map<int64_t, int> by_step;
  for (const auto& list : record.complete) {
    for (const auto& entry : list) by_step[entry.step] = entry.ranks;
  }
  std::vector<int> sizes;
  for (const auto& [step, ranks] : by_step) {
    if (sizes.empty() || sizes.back() != ranks) sizes.push_back(ranks);
  }
  return sizes;
}

// Until all of these have seen step `step` complete.
inline bool reach(const Record& record, const std::vector<int>& members, int64_t step) {
  return JoinJob::comes_true([&] {
    return std::all_of(members.begin(), members.end(), [&](int member) {
      const auto& list = record.complete[member];
      return !list.empty() && (list.end() - 1)->step >= step;
    });
  });
}

inline void expect_good(JoinJob& job, const std::vector<int>& members, const Record& record, int epochs) {
  for (const int member : members) {
    const auto ended = job.end_of(member);
    EXPECT_TRUE(WIFEXITED(ended.status)) << "member " << member << " hung or crashed: " << ended.status;
    EXPECT_EQ(ended.text, "") << "member " << member;
    EXPECT_EQ(record.evaluations[member].load(), epochs - record.first_epoch[member].load()) << "member " << member;
  }
}

inline void change_from_4_to_3_to_4_to_2_to_6(const WorldOptions& options, const Trained& trained = {}) {
  constexpr int epochs = 4;
  const SharedRecord record;
  const auto body = [&](const World& world) { return train(world, *record, epochs, {}, {}, trained); };
  record->last_step = 5;
  JoinJob job(4, body, options);
  ASSERT_TRUE(reach(*record, {0, 1, 2, 3}, 5));
  job.signal(1, SIGKILL);
  record->last_step = 10;
  ASSERT_TRUE(reach(*record, {0, 2, 3}, 10));
  const int first = job.add(body, options);
  ASSERT_TRUE(job.comes_to_knock(first));
  record->last_step = 15;
  ASSERT_TRUE(reach(*record, {0, 2, 3, first}, 15));
  job.signal(0, SIGKILL);  // not next to each other, as each may own shards of the next one
  job.signal(3, SIGKILL);
  record->last_step = 20;
  ASSERT_TRUE(reach(*record, {2, first}, 20));
  std::vector<int> members{2, first};
  for (int i = 0; i < 4; ++i) members.push_back(job.add(body, options));
  for (const int member : members) ASSERT_TRUE(job.comes_to_knock(member));
  record->last_step = 0;
  expect_good(job, members, *record, epochs);
  EXPECT_EQ(sizes_of(*record), std::vector<int>({4, 3, 4, 2, 6}));
  EXPECT_EQ(judged(*record, epochs, options.transport != "gloo", trained), "");
}

// As in the job, but for what the arguments say.
struct JoinParts {
  explicit JoinParts(const World& world, int64_t width = 24, DistributedDataParallelOptions options = {})
      : net(std::make_shared<Net>(width)), parallel(net, world.group(), small(options)) {}
  static DistributedDataParallelOptions small(DistributedDataParallelOptions& options) {
    options.first_bucket_mb = options.bucket_cap_mb = 1e-3;
    return options;
  }
  std::shared_ptr<Net> net;
  DistributedDataParallel<Net> parallel;
};

}  // namespace shoal::test
