// Other users of the machine, who can connect to a job's ports and write into its store.

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "comm/rendezvous/socket.h"
#include "comm/store/authenticated_store.h"
#include "comm/store/store.h"
#include "tests/cli/shoal_program.h"

namespace shoal::test::strangers_test {
namespace {

using namespace std::chrono_literals;

// Connects `calls` times and sends data that are not a message of c10d's store, or only the beginning of one. A quarter
// of the connections stay open, and some of those send a byte now and then.
class Strangers {
 public:
  Strangers(int port, int calls) : port_(port), calls_(calls) {
    thread_ = std::thread([this] { call_all(); });
  }
  ~Strangers() {
    ended_ = true;
    thread_.join();
  }
  int called() const { return called_; }

 private:
  void call_all() {
    std::mt19937 random(1);
    const auto place = resolve("127.0.0.1", port_);
    std::vector<Descriptor> open;
    while (called_ < calls_ && !ended_) {
      auto caller = make_socket(place, SOCK_STREAM);
      if (!connect_to(caller, place)) {  // the launcher is not there yet
        std::this_thread::sleep_for(5ms);
        continue;
      }
      say(caller, message(random));
      if (called_++ % 4 == 0) open.push_back(std::move(caller));
      std::this_thread::sleep_for(1ms);
    }
    while (!ended_) {
      for (size_t slow = 0; slow < open.size(); slow += 8) say(open[slow], std::string(1, static_cast<char>(random())));
      std::this_thread::sleep_for(50ms);
    }
  }

  static void say(const Descriptor& socket, const std::string& text) {
    [[maybe_unused]] const auto sent = send(socket.number(), text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }

  // Half of them begin like c10d's clients, so that the server reads on.
  std::string message(std::mt19937& random) const {
    std::string text;
    if (called_ % 5 == 4) return text;
    if (called_ % 2 == 0) text = std::string("\x00\xce\xf7\x85\x3c", 5) + static_cast<char>(random() % 20);
    for (auto length = random() % 200; length > 0; --length) text += static_cast<char>(random());
    return text;
  }

  const int port_;
  const int calls_;
  std::atomic<int> called_ = 0;
  std::atomic<bool> ended_ = false;
  std::thread thread_;
};

c10::intrusive_ptr<c10d::Store> stranger_in_store(int port) {
  const auto deadline = std::chrono::steady_clock::now() + 20s;
  const auto place = resolve("127.0.0.1", port);
  while (!connect_to(make_socket(place, SOCK_STREAM), place) && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(5ms);
  }
  quiet_c10d();
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(port);
  options.waitWorkers = false;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

// Plants a value as a process of another run would leave it, with the right key and form.
void plant(const c10::intrusive_ptr<c10d::Store>& store, const std::string& key, const std::string& value) {
  store_set(*authenticated(store, JobIdentity("former run", "the secret of a former run")), key, value);
}

int64_t lines(const std::string& text) {
  return std::count(text.begin(), text.end(), '\n');
}

TEST(Strangers, messages_that_mean_nothing_are_not_worth_a_line) {
  const int port = free_port();
  const Strangers strangers(port, 1000);
  const auto ended = shoal({"launch", "-n", "1", "--port", std::to_string(port), "--", "sleep", "6"});
  EXPECT_EQ(ended.code, 0);
  EXPECT_EQ(strangers.called(), 1000);
  EXPECT_LE(lines(ended.output), 3) << ended.output.substr(0, 2000);
}

// Opens connections that send nothing, or half a request, as many as common limits of open files allow.
class Silent {
 public:
  explicit Silent(int port) {
    const auto place = resolve("127.0.0.1", port);
    while (sockets_.size() < many) {
      auto caller = make_socket(place, SOCK_STREAM);
      if (!connect_to(caller, place)) {  // the launcher is not there yet
        std::this_thread::sleep_for(5ms);
        continue;
      }
      if (sockets_.size() % 2 == 0) send(caller.number(), "\x00\xce", 2, MSG_NOSIGNAL | MSG_DONTWAIT);
      sockets_.push_back(std::move(caller));
    }
  }
  // Number of connections that the other end has closed.
  int64_t ended() const {
    return std::count_if(sockets_.begin(), sockets_.end(), [](const Descriptor& socket) {
      char byte = 0;
      const auto got = recv(socket.number(), &byte, 1, MSG_DONTWAIT);
      return got == 0 || (got < 0 && !came_too_early());
    });
  }

  static constexpr size_t many = 1100;

 private:
  std::vector<Descriptor> sockets_;
};

// Runs `shell`'s command with a soft limit of open files; the hard limit stays.
Ended with_few_files(const std::string& shell) {
  return run({"sh", "-c", "ulimit -S -n 1024; " + shell}, 100);
}

// Scope in which this process may have many files open.
class ManyFiles {
 public:
  ManyFiles() {
    getrlimit(RLIMIT_NOFILE, &before_);
    auto more = before_;
    more.rlim_cur = std::min<rlim_t>(more.rlim_max, 4096);
    setrlimit(RLIMIT_NOFILE, &more);
  }
  ~ManyFiles() { setrlimit(RLIMIT_NOFILE, &before_); }
  rlim_t hard() const { return before_.rlim_max; }

 private:
  rlimit before_{};
};

TEST(Strangers, more_of_them_than_a_program_often_may_have_files_open_keep_nobody_out) {
  const ManyFiles files;
  if (files.hard() < 4096) GTEST_SKIP() << "the system allows no more";
  const int port = free_port();
  std::optional<Silent> silent;
  std::thread strangers([&] { silent.emplace(port); });
  const auto ended = with_few_files(SHOAL " launch -n 2 --port " + std::to_string(port) +
                                    " -- sh -c 'sleep 3; exec " SHOAL " train --data reference --model mlp --steps 2'");
  strangers.join();
  EXPECT_EQ(ended.code, 0) << ended.output.substr(0, 4000);
}

TEST(Strangers, whoever_asks_nothing_is_shown_out_and_a_rank_is_not) {
  const ManyFiles files;
  if (files.hard() < 4096) GTEST_SKIP() << "the system allows no more";
  const int port = free_port();
  std::optional<Silent> silent;
  int64_t still_there = 0, shown_out = 0;
  std::thread strangers([&] {
    silent.emplace(port);
    const auto rank = stranger_in_store(port);  // asks, and then says nothing for as long
    std::this_thread::sleep_for(5s);
    still_there = static_cast<int64_t>(Silent::many) - silent->ended();
    std::this_thread::sleep_for(9s);
    shown_out = silent->ended();
    EXPECT_NO_THROW(rank->check({"shoal/job"}));
  });
  const auto ended = with_few_files(SHOAL " launch -n 1 --port " + std::to_string(port) + " -- sleep 20");
  strangers.join();
  EXPECT_EQ(ended.code, 0) << ended.output.substr(0, 4000);
  EXPECT_EQ(still_there, Silent::many) << "a rank may take a moment";
  EXPECT_EQ(shown_out, Silent::many);
}

// Report of a training on two ranks that start a second after their store.
nlohmann::json train_at(int port, const std::string& strategy) {
  const TempFolder folder;
  const auto ended = shoal({"launch", "-n", "2", "--port", std::to_string(port), "--", "sh", "-c",
                            "sleep 1; exec " SHOAL " train --data reference --model mlp --steps 1000 --transport gloo "
                            "--strategy " +
                                strategy + " --json " + folder.file("report.json")});
  EXPECT_EQ(ended.code, 0) << ended.output;
  EXPECT_LE(lines(ended.output), 60) << ended.output.substr(0, 4000);
  return ended.code == 0 ? read(folder.file("report.json")) : nlohmann::json();
}

// Replays values before the ranks come, and as long as they are there under keys that nobody overwrites.
void replay_former_run(int port) {
  try {
    const auto store = stranger_in_store(port);
    for (const std::string rank : {"0", "1"}) {
      plant(store, "shoal/0/visits/" + rank, "3 1 1 host");
      plant(store, "shoal/0/1/rank/" + rank, "2 1 1 -1 0 host");
      plant(store, "shoal/0/1/exchange/world/spanning/" + rank, "yes");
    }
    plant(store, "shoal/0/1/size", "7 1");
    while (true) {
      plant(store, "shoal/0/1/error", "the world's size differs");
      plant(store, "shoal/0/first_failure", "rank 1 is gone");
      std::this_thread::sleep_for(20ms);
    }
  } catch (const c10::Error&) {  // NOLINT(bugprone-empty-catch): the job has ended
  }
}

TEST(Strangers, a_training_among_a_thousand_of_them_is_equal_to_the_bit) {
  for (const auto* strategy : {"ddp", "decentralized"}) {
    SCOPED_TRACE(strategy);
    const auto alone = train_at(free_port(), strategy);
    const int port = free_port();
    const Strangers strangers(port, 1000);
    std::thread former(replay_former_run, port);
    const auto among = train_at(port, strategy);
    EXPECT_EQ(alone["loss"], among["loss"]);
    EXPECT_EQ(alone["params"], among["params"]);
    EXPECT_GE(strangers.called(), 500);
    former.join();
  }
}

TEST(Strangers, a_record_that_a_stranger_overwrites_is_refused_by_name) {
  const int port = free_port();
  std::thread stranger([port] {
    const auto store = stranger_in_store(port);
    store->setTimeout(20s);
    store->wait({"shoal/0/1/rank/0"});
    try {
      for (int time = 0; time < 60; ++time) {
        store_set(*store, "shoal/0/1/rank/0", "2 1 1 -1 0 \x1b[2Jhost");
        std::this_thread::sleep_for(100ms);
      }
    } catch (const std::exception&) {  // the job has ended, and its store with it
    }
  });
  const auto ended = shoal({"launch", "-n", "2", "--port", std::to_string(port), "--", "sh", "-c",
                            "[ $RANK = 1 ] && sleep 2; exec " SHOAL " train --data reference --model mlp --steps 2"});
  stranger.join();
  EXPECT_NE(ended.code, 0);
  EXPECT_NE(
      ended.output.find("the value of 'shoal/0/1/rank/0' in the job's store was not written by a process of this"),
      std::string::npos)
      << ended.output;
  EXPECT_EQ(ended.output.find('\x1b'), std::string::npos) << ended.output;
}

TEST(Strangers, ranks_without_the_secret_are_told) {
  const auto port = std::to_string(free_port());
  const auto rank = [&](const std::string& number, const std::string& secret) -> Command {
    return {{SHOAL, "train", "--data", "reference", "--model", "mlp", "--steps", "2"},
            variables_of("WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=" + port + " RANK=" + number + secret)};
  };
  const std::string one = " SHOAL_SECRET=one-secret-of-many", other = " SHOAL_SECRET=other-secret-of-many";
  const std::vector<std::tuple<std::string, std::string, std::string>> cases{
      {one, "", "a job with a secret, but rank 1 has none"},
      {one, other, "all ranks of a job the same SHOAL_SECRET"},
      {"", one, "all ranks of a job the same SHOAL_SECRET"}};
  for (const auto& [first, second, said] : cases) {
    const auto ended = run_together({rank("0", first), rank("1", second)}, 12);
    EXPECT_EQ(ended[1].code, 1);
    EXPECT_NE(ended[1].output.find(said), std::string::npos) << ended[1].output;
  }
  for (const auto& rank : run_together({rank("0", one), rank("1", one)}, 60)) EXPECT_EQ(rank.code, 0) << rank.output;
}

TEST(Strangers, the_doctor_says_whether_there_is_a_secret) {
  const auto with = run_together({{{SHOAL, "doctor"}, {{"SHOAL_SECRET", "one-secret-of-many"}}}}, 60).front();
  EXPECT_NE(with.output.find("given (SHOAL_SECRET)"), std::string::npos) << with.output;
  EXPECT_EQ(with.output.find("one-secret"), std::string::npos) << "nobody else's business";
  EXPECT_NE(shoal({"doctor"}).output.find("SECURITY.md"), std::string::npos);
}

}  // namespace
}  // namespace shoal::test::strangers_test
