// What is left of a training after a rank has ended, and after the elastic job: checkpoints, plain steps, whole
// parameters.

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <random>

#include "shoal/checkpoint.h"
#include "tests/elastic/elastic_run.h"
#include "tests/support/forked_hosts.h"
#include "tests/support/temp_folder.h"

namespace shoal::elastic_end_test {
namespace {

using test::Sharding;
using test::Trained;

struct Model {
  Model(const Trained& trained, const Group& group, uint64_t seed, bool freezes = true)
      : net(std::make_shared<test::Net>()) {
    torch::manual_seed(seed);
    const torch::NoGradGuard no_grad;
    for (auto& parameter : net->parameters()) parameter.uniform_(-0.3, 0.3);
    if (freezes) net->second->weight.set_requires_grad(false);  // large enough for every rank to own a part
    net->to_dtype(trained.module_dtype());
    wrapped = test::wrap_as(trained, net, group);
  }
  void backward(int64_t step, int rank) const {
    torch::manual_seed(static_cast<uint64_t>(step));
    const auto x = test::inputs_of({static_cast<size_t>(step), static_cast<size_t>(rank)});
    wrapped.backward(test::loss_of(wrapped.forward(x), x));
  }
  // Without Elastic.
  std::string train(int64_t from, int64_t to, int rank) const {
    for (auto step = from; step < to; ++step) {
      backward(step, rank);
      wrapped.step();
      wrapped.optimizer->zero_grad();
    }
    return fmt::format("{}", test::hash_of(wrapped.state(*net), *net));
  }
  TrainingState training() const {
    if (wrapped.megatron() != nullptr) return TrainingState(*wrapped.megatron());
    if (auto* fsdp = dynamic_cast<FullyShardedCore*>(wrapped.parallel.get())) {
      return TrainingState(*fsdp, dynamic_cast<FullyShardedOptimizerCore&>(*wrapped.optimizer));
    }
    if (wrapped.oss() != nullptr) return TrainingState(*wrapped.parallel, *wrapped.oss());
    return TrainingState(dynamic_cast<DistributedDataParallelCore&>(*wrapped.parallel), *wrapped.optimizer);
  }

  std::shared_ptr<test::Net> net;
  test::Wrapped wrapped;
};

// From here on, this process is killed when it writes behind these bytes of a file.
void end_when_writing(rlim_t bytes) {
  std::signal(SIGXFSZ, [](int) { kill(getpid(), SIGKILL); });
  const rlimit limit{bytes, RLIM_INFINITY};
  setrlimit(RLIMIT_FSIZE, &limit);
}

// A rank that ends in the save, and not in a step.
struct EndInSave {
  std::function<void()> before = [] {};                 // called before each attempt to save
  std::function<bool()> is_over = [] { return true; };  // after which the elastic job ends
};

// Rank 1 ends in step 3 of 5, if none ends in the save. The checkpoint of step 5 goes on as the training itself does
// after Elastic.
std::string train(const World& world, const Trained& trained, const std::filesystem::path& folder,
                  const std::optional<EndInSave>& end = std::nullopt) {
  alarm(60);
  const bool freezes = trained.sharding != Sharding::fsdp || world.group().transport() == "host";  // else refused
  const Model model(trained, world.group(), 1, freezes);
  auto training = model.training();
  {
    const auto elastic = model.wrapped.elastic(world, ElasticOptions{.on_change = [](const ElasticChange&) {}});
    const int self = world.rank();
    while (elastic->steps() < 5) {
      const auto step = elastic->steps();
      const auto compute = [&] {
        if (self == 1 && step == 3 && !end) std::raise(SIGKILL);
        model.backward(step, world.rank());
      };
      if (!elastic->step(2, compute, [&] { model.wrapped.step(); })) continue;
      model.wrapped.optimizer->zero_grad();
    }
    if (end) elastic->together([&] { save(folder, training, {.step = 4}); });  // the same state, which stays
    elastic->together([&] {
      if (end) end->before();
      save(folder, training, {.step = 5});
    });
    const auto is_over = [&] { return world.all_reduce(!end || end->is_over() ? 1 : 0, ReduceOp::min) == 1; };
    while (!elastic->together(is_over)) {
    }
  }
  const auto plain = model.train(5, 8, world.rank());
  std::vector<std::string> saved{"latest"};
  if (end) saved.emplace_back("step-4");
  for (const auto& name : saved) {
    const Model loaded(trained, world.group(), 2, freezes);
    auto past = loaded.training();
    load(folder / name, past);
    if (loaded.train(5, 8, world.rank()) != plain) return name + ": the checkpoint goes on otherwise";
  }
  saved.insert(saved.end(), {".lock", "step-5"});
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const auto name = entry.path().filename().string();
    if (std::count(saved.begin(), saved.end(), name) == 0) return name + " is left";
  }
  if (auto* fsdp = dynamic_cast<FullyShardedCore*>(model.wrapped.parallel.get())) {
    const auto whole = fsdp->full_state_dict();
    fsdp->unwrap();
    for (const auto& entry : model.net->named_parameters()) {
      if (!at::equal(entry.value(), whole.at(entry.key()).to(entry.value().scalar_type()))) return entry.key();
      if (entry.value().scalar_type() != at::kFloat) return entry.key() + " has another dtype";
    }
  }
  return "same " + plain;
}

WorldOptions over(const std::string& transport) {
  WorldOptions options;
  options.transport = transport;
  return options;
}

TEST(ElasticEnd, ELA02_checkpoints_and_plain_steps_after_the_loss_of_a_rank) {
  struct Case {
    Trained trained;
    std::string transport = "auto";  // over others with second owners
  };
  for (const auto& [trained, transport] : {Case{},
                                           {{Sharding::zero1}},
                                           {{Sharding::zero2}},
                                           {{Sharding::megatron}},
                                           {{.sharding = Sharding::megatron, .dtype = at::kBFloat16}},
                                           {{Sharding::fsdp}},
                                           {{.sharding = Sharding::fsdp, .dtype = at::kBFloat16}},
                                           {{Sharding::zero1}, "tcp"},
                                           {{.sharding = Sharding::megatron, .dtype = at::kBFloat16}, "tcp"},
                                           {{Sharding::fsdp}, "tcp"}}) {
    for (const int ranks : {2, 3}) {
      SCOPED_TRACE(fmt::format("{} over {}, {} ranks", name_of(trained), transport, ranks));
      const test::TempFolder folder;
      const auto ended = test::run_ranks(
          ranks, [&, trained = trained](const World& world) { return train(world, trained, folder.path()); }, {},
          over(transport));
      for (int rank = 0; rank < ranks; ++rank) {
        if (rank == 1) continue;
        EXPECT_TRUE(WIFEXITED(ended[rank].status)) << WTERMSIG(ended[rank].status);
        EXPECT_EQ(ended[rank].text.find("same "), 0U) << ended[rank].text;
        EXPECT_EQ(ended[rank].text, ended[0].text);
      }
    }
  }
}

// All ranks write a sharded checkpoint, and rank 0 that of DDP.
TEST(ElasticEnd, ELA01_ELA02_a_rank_ends_while_it_writes_a_checkpoint) {
  for (const auto& trained : {Trained(), Trained{Sharding::zero1}, Trained{Sharding::zero2},
                              Trained{Sharding::megatron}, Trained{Sharding::fsdp}}) {
    for (const rlim_t bytes : {0, 1500, 1501}) {
      const bool over_sockets = bytes == 1501;  // sharded: with second owners
      const std::string transport = !over_sockets ? "auto" : trained.sharding == Sharding::zero2 ? "gloo" : "tcp";
      SCOPED_TRACE(fmt::format("{} over {}, {} bytes", name_of(trained), transport, bytes));
      const int victim = trained.sharding == Sharding::none || bytes == 0 ? 0 : 2;
      const test::TempFolder folder;
      const auto ended = test::run_ranks(
          3,
          [&](const World& world) {
            const bool ends = world.rank() == victim;
            const auto before = [&] {
              if (ends) end_when_writing(bytes);
            };
            return train(world, trained, folder.path(), EndInSave{.before = before});
          },
          {}, over(transport));
      for (int rank = 0; rank < 3; ++rank) {
        if (rank == victim) {
          EXPECT_TRUE(WIFSIGNALED(ended[rank].status)) << ended[rank].text;
          continue;
        }
        EXPECT_TRUE(WIFEXITED(ended[rank].status)) << WTERMSIG(ended[rank].status);
        EXPECT_EQ(ended[rank].text.find("same "), 0U) << ended[rank].text;
        EXPECT_EQ(ended[rank].text, ended[victim == 0 ? 1 : 0].text);
      }
    }
  }
}

// A rank ends while it writes in the background, which the others notice in their next steps. The checkpoint is lost,
// and the next ones are not.
TEST(ElasticEnd, ELA01_a_rank_ends_in_a_save_in_the_background_and_the_next_one_is_complete) {
  for (const auto& trained : {Trained(), Trained{Sharding::zero2}, Trained{Sharding::fsdp}}) {
    SCOPED_TRACE(name_of(trained));
    const int victim = trained.sharding == Sharding::none ? 0 : 2;
    const test::TempFolder folder;
    const auto ended = test::run_ranks(3, [&](const World& world) -> std::string {
      alarm(60);
      const bool ends = world.rank() == victim;
      testing::internal::CaptureStderr();
      const Model model(trained, world.group(), 1);
      auto training = model.training();
      const auto elastic = model.wrapped.elastic(world, ElasticOptions{.on_change = [](const ElasticChange&) {}});
      while (elastic->steps() < 6 || world.size() == 3) {
        const auto compute = [&] { model.backward(elastic->steps(), world.rank()); };
        if (!elastic->step(2, compute, [&] { model.wrapped.step(); })) continue;
        model.wrapped.optimizer->zero_grad();
        if (ends && elastic->steps() == 3) end_when_writing(1500);
        elastic->together([&] { save_async(folder.path(), training, {.step = elastic->steps()}); });
      }
      elastic->together([&] { training.wait(); });
      const auto said = testing::internal::GetCapturedStderr();
      const auto lost = fmt::format("shoal: checkpoint {}/step-", folder.path().string());
      if (said.starts_with(lost) != (world.rank() == 0)) return "it says: " + said;
      const Model loaded(trained, world.group(), 2);
      auto past = loaded.training();
      const auto step = load(folder.path(), past).step;
      const auto state = [&](const Model& of) { return test::hash_of(of.wrapped.state(*of.net), *of.net); };
      return step == elastic->steps() && state(loaded) == state(model) ? "" : fmt::format("step {}", step);
    });
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(WIFSIGNALED(ended[rank].status), rank == victim) << ended[rank].text;
      EXPECT_EQ(ended[rank].text, "");
    }
  }
}

TEST(ElasticEnd, ELA01_saves_go_on_after_a_recovery_in_which_nobody_has_ended) {
  const test::TempFolder folder;
  const auto ended = test::run_ranks(2, [&](const World& world) -> std::string {
    alarm(30);
    const Model model(Trained(), world.group(), 1);
    auto training = model.training();
    const auto elastic = model.wrapped.elastic(world, ElasticOptions{.on_change = [](const ElasticChange&) {}});
    while (elastic->steps() < 2) {
      const auto compute = [&] { model.backward(elastic->steps(), world.rank()); };
      if (!elastic->step(2, compute, [&] { model.wrapped.step(); })) continue;
      model.wrapped.optimizer->zero_grad();
      elastic->together([&] { save(folder.path(), training, {.step = elastic->steps()}); });
      if (elastic->steps() == 1) elastic->recover();
    }
    return "";
  });
  for (const auto& rank : ended) EXPECT_EQ(rank.text, "");
  EXPECT_TRUE(std::filesystem::exists(folder.path() / "step-2"));
}

size_t entries_in(const char* folder) {
  const std::filesystem::directory_iterator entries(folder);
  return static_cast<size_t>(std::distance(begin(entries), end(entries)));
}

// Nor does the end of a rank, in which operations fail that are on their way.
TEST(ElasticEnd, ELA01_changes_of_the_ranks_leave_no_threads_and_no_open_files) {
  struct Case {
    Trained trained;
    std::string transport;
  };
  for (const auto& [trained, transport] :
       {Case{Trained(), "gloo"}, {{Sharding::fsdp}, "gloo"}, {{Sharding::fsdp}, "tcp"}, {{Sharding::fsdp}, "auto"}}) {
    SCOPED_TRACE(fmt::format("{} over {}", name_of(trained), transport));
    const auto ended = test::run_ranks(
        3,
        [&, trained = trained](const World& world) -> std::string {
          alarm(60);
          const Model model(trained, world.group(), 1, /*freezes=*/false);
          const bool ends = world.rank() == 2;
          const auto elastic = model.wrapped.elastic(world, ElasticOptions{.on_change = [](const ElasticChange&) {}});
          const auto step_to = [&](int64_t last) {
            while (elastic->steps() < last) {
              const auto compute = [&] {
                if (ends && elastic->steps() == 6) std::raise(SIGKILL);
                model.backward(elastic->steps(), world.rank());
              };
              elastic->step(2, compute, [&] { model.wrapped.step(); });
              model.wrapped.optimizer->zero_grad();
            }
          };
          const auto open = [] { return std::pair(entries_in("/proc/self/task"), entries_in("/proc/self/fd")); };
          const auto is_more = [](auto now, auto then) { return now.first > then.first || now.second > then.second; };
          std::pair<size_t, size_t> first;
          for (int64_t step = 1; step < 8; ++step) {
            step_to(step);
            elastic->recover();
            if (step == 2) first = open();
          }
          auto last = open();
          for (int i = 0; i < 500 && is_more(last, first); ++i) {  // threads end a moment later
            usleep(10'000);
            last = open();
          }
          if (!is_more(last, first)) return "";
          return fmt::format("{} threads and {} files, and {} and {} before", last.first, last.second, first.first,
                             first.second);
        },
        {}, over(transport));
    for (const int rank : {0, 1}) EXPECT_EQ(ended[static_cast<size_t>(rank)].text, "");
  }
}

// By the clock, once the first file of the checkpoint is there.
TEST(ElasticEnd, ELA01_ELA02_ranks_end_at_random_moments_of_a_save) {
  std::mt19937 random(static_cast<unsigned>(test::number_of("SHOAL_SEED", 1)));
  const std::vector<Trained> all{Trained(), Trained{Sharding::zero2}, Trained{Sharding::fsdp}};
  for (int trial = 0; trial < test::number_of("SHOAL_KILLS", 12); ++trial) {
    const int victim = static_cast<int>(random() % 3);
    const auto pause = static_cast<useconds_t>(random() % 4000);
    const auto& trained = all[static_cast<size_t>(trial) % all.size()];
    SCOPED_TRACE(fmt::format("trial {}: {}, rank {} after {} us", trial, name_of(trained), victim, pause));
    const test::TempFolder folder;
    const test::InSharedMemory<std::atomic<bool>> killed;
    const EndInSave end{.is_over = [&] { return killed->load(); }};
    const auto ended = test::run_ranks(
        3, [&](const World& world) { return train(world, trained, folder.path(), end); },
        [&](const std::vector<pid_t>& pids) {
          for (int i = 0; i < 200'000 && std::filesystem::is_empty(folder.path()); ++i) usleep(100);
          usleep(pause);
          kill(pids[victim], SIGKILL);
          killed->store(true);
        });
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == victim && WIFSIGNALED(ended[rank].status)) continue;
      EXPECT_TRUE(WIFEXITED(ended[rank].status)) << WTERMSIG(ended[rank].status);
      EXPECT_EQ(ended[rank].text.find("same "), 0U) << ended[rank].text;
    }
  }
}

// The same where each host has all shards; hosts are left with different numbers of ranks, or a host is lost.
TEST(ElasticEnd, ELA02_ELA04_checkpoints_and_plain_steps_after_the_loss_of_a_rank_of_two_hosts) {
  if (!test::ForkedHosts::possible()) GTEST_SKIP() << "this system does not let a process make namespaces";
  for (const auto& trained :
       {Trained{Sharding::hybrid}, Trained{.sharding = Sharding::hybrid, .dtype = at::kBFloat16},
        Trained{Sharding::zero1_by_host}, Trained{Sharding::zero2_by_host}, Trained{Sharding::megatron_by_host},
        Trained{.sharding = Sharding::megatron_by_host, .dtype = at::kBFloat16}}) {
    for (const auto& hosts : {std::vector<int>{2, 2}, {1, 1, 1}}) {
      SCOPED_TRACE(fmt::format("{}, {} hosts", name_of(trained), hosts.size()));
      const test::TempFolder folder;
      test::ForkedHosts job(hosts, [&](const World& world) { return train(world, trained, folder.path()); });
      const auto ended = job.wait(40);
      for (int rank = 0; rank < job.ranks(); ++rank) {
        if (rank == 1) continue;
        EXPECT_EQ(ended[rank].text.find("same "), 0U) << ended[rank].text;
        EXPECT_EQ(ended[rank].text, ended[0].text);
      }
    }
  }
}

// A job of one rank has nobody to go on without, and may still ask for a new world.
TEST(ElasticEnd, ELA01_one_rank_recovers_and_goes_on) {
  for (const auto& trained : {Trained(), Trained{Sharding::zero2}, Trained{Sharding::megatron},
                              Trained{.sharding = Sharding::megatron, .dtype = at::kBFloat16},
                              Trained{.sharding = Sharding::fsdp, .dtype = at::kBFloat16}}) {
    SCOPED_TRACE(fmt::format("{}, {}", static_cast<int>(trained.sharding), c10::toString(trained.dtype)));
    const auto ended = test::run_ranks(1, [&](const World& world) -> std::string {
      alarm(30);
      const Model plain(trained, world.group(), 1);
      const auto expected = plain.train(0, 4, 0);
      const Model model(trained, world.group(), 1);
      const auto elastic = model.wrapped.elastic(world, ElasticOptions{.on_change = [](const ElasticChange&) {}});
      while (elastic->steps() < 4) {
        elastic->step(
            2, [&] { model.backward(elastic->steps(), 0); }, [&] { model.wrapped.step(); });
        model.wrapped.optimizer->zero_grad();
        if (elastic->steps() == 2) elastic->recover();
      }
      return fmt::format("{}", test::hash_of(model.wrapped.state(*model.net), *model.net)) == expected ? "same"
                                                                                                       : "differs";
    });
    EXPECT_EQ(ended.front().text, "same");
  }
}

}  // namespace
}  // namespace shoal::elastic_end_test
