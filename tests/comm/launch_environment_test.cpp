// Environment variables of launchers: which are used, and which sets are refused.

#include "comm/rendezvous/launch_environment.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <future>
#include <map>
#include <thread>

#include "comm/rendezvous/host.h"
#include "comm/rendezvous/rendezvous.h"
#include "shoal/error.h"
#include "tests/support/refusal.h"

namespace shoal::launch_environment_test {
namespace {

using Variables = std::map<std::string, std::string>;

Placement find(const Variables& variables, const WorldOptions& options = {}) {
  return find_placement(options, [&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

std::string refusal(const Variables& variables, const WorldOptions& options = {}) {
  try {
    find(variables, options);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

TEST(LaunchEnvironment, knows_what_the_launcher_calls_the_job) {
  const Variables by_hand{{"RANK", "0"}, {"WORLD_SIZE", "2"}};
  EXPECT_EQ(find(by_hand).job.name(), "");
  auto variables = by_hand;
  variables["TORCHELASTIC_RUN_ID"] = "night";
  EXPECT_EQ(find(variables).job.name(), "night");
  variables["SHOAL_JOB_ID"] = "day";
  EXPECT_EQ(find(variables).job.name(), "day");
  EXPECT_EQ(find({{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "2"}, {"PMIX_NAMESPACE", "77"}}).job.name(),
            "77");
  EXPECT_EQ(
      find({{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "2"}, {"SLURM_JOB_ID", "12"}, {"SLURM_STEP_ID", "3"}}).job.name(),
      "12.3");
}

// Two jobs of two ranks that were given the same port.
TEST(Rendezvous, a_rank_of_another_job_is_refused_and_disturbs_nobody) {
  for (const bool served : {false, true}) {
    auto launcher = std::make_unique<StoreServer>(StorePlace("127.0.0.1", 0), JobIdentity("night", ""));
    const int port = launcher->port();
    if (!served) launcher.reset();
    std::vector<Meeting> meetings(4);
    const auto come = [&, served](int rank, const std::string& job, Meeting& meeting) {
      return std::async(std::launch::async, [&meeting, rank, job, port, served]() -> std::string {
        Placement placement;
        placement.rank = rank;
        placement.size = 2;
        placement.address = "127.0.0.1";
        placement.port = port;
        placement.store_is_served = served;
        placement.job = JobIdentity(job, "");
        try {
          meeting = meet(placement, {}, "", {.rendezvous_timeout_seconds = 20});
        } catch (const Error& error) {
          return error.what();
        }
        return "met";
      });
    };
    auto first = come(0, "night", meetings[0]);
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    for (const auto* job : {"day", ""}) {
      const auto text = come(1, job, meetings[3]).get();
      EXPECT_NE(text.find("belongs to another job (job night)"), std::string::npos) << text;
      EXPECT_NE(text.find("MASTER_PORT"), std::string::npos) << text;
    }
    auto second = come(1, "night", meetings[1]);
    EXPECT_EQ(first.get(), "met");
    EXPECT_EQ(second.get(), "met");
  }
}

TEST(Rendezvous, the_program_is_asked_while_ranks_are_missing_and_may_end_the_wait) {
  struct Enough {};
  const StoreServer launcher(StorePlace("127.0.0.1", 0));
  Placement placement;
  placement.size = 2;
  placement.address = "127.0.0.1";
  placement.port = launcher.port();
  placement.store_is_served = true;
  WorldOptions options{.rendezvous_timeout_seconds = 20};
  options.while_waiting = [asked = 0]() mutable {
    if (++asked == 3) throw Enough();
  };
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THROW(meet(placement, {}, "", options), Enough);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(3));
  // Rank 1 comes then, and must not wait for one that has gone: both begin again together.
  placement.rank = 1;
  try {
    meet(placement, {}, "", {.rendezvous_timeout_seconds = 20});
    ADD_FAILURE() << "they have met";
  } catch (const CommError& error) {
    EXPECT_NE(std::string(error.what()).find("rank 0 has stopped waiting for rank(s) 1"), std::string::npos);
  }
}

// What two ranks of these options say, by rank: "met", or the kind of error and its text. absent: a third rank never
// comes.
std::vector<std::string> meeting_of(const WorldOptions& first, const WorldOptions& second, bool absent = false) {
  const StoreServer launcher(StorePlace("127.0.0.1", 0));
  const auto come = [&](int rank, const WorldOptions& options) {
    return std::async(std::launch::async, [&, rank, options]() -> std::string {
      Placement placement;
      placement.rank = rank;
      placement.size = absent ? 3 : 2;
      placement.address = "127.0.0.1";
      placement.port = launcher.port();
      placement.store_is_served = true;
      try {
        meet(placement, {.descriptor = 1}, "", options);
        return "met";
      } catch (const CommError& error) {
        return std::string("CommError ") + error.what();
      } catch (const DisagreeError& error) {
        return std::string("DisagreeError ") + error.what();
      }
    });
  };
  auto one = come(0, first), other = come(1, second);
  return {one.get(), other.get()};
}

TEST(Rendezvous, a_rank_that_never_comes_is_the_same_kind_of_error_on_all) {
  const WorldOptions impatient{.rendezvous_timeout_seconds = 1}, patient{.rendezvous_timeout_seconds = 20};
  for (const auto& said : meeting_of(impatient, patient, /*absent=*/true)) {
    EXPECT_EQ(said.rfind("CommError rank(s) 2 of 3 did not appear at ", 0), 0U) << said;
    EXPECT_NE(said.find("within 1 s"), std::string::npos) << said;
  }
}

TEST(Rendezvous, options_that_must_be_equal_and_differ_are_named_at_once) {
  const auto expect_both = [](const std::vector<std::string>& said, const std::string& expected) {
    for (const auto& text : said) EXPECT_EQ(text, expected);
  };
  const auto of = [](const char* transport, bool check = false) {
    return WorldOptions{.transport = transport, .check_agreement = check, .rendezvous_timeout_seconds = 20};
  };
  expect_both(meeting_of(of("host"), of("tcp")),
              "DisagreeError transport differs: host on rank 0, tcp on rank 1: give all ranks the same");
  expect_both(meeting_of(of("gloo"), of("auto")),
              "DisagreeError transport differs: gloo on rank 0, auto on rank 1: give all ranks the same");
  expect_both(meeting_of(of("gloo", true), of("gloo")),
              "DisagreeError check_agreement differs: on on rank 0, off on rank 1: give all ranks the same");
  // What fits.
  expect_both(meeting_of(of("auto", true), of("host")), "met");
  expect_both(meeting_of(of("tcp"), of("tcp", true)), "met");
}

TEST(LaunchEnvironment, nothing_set_means_alone) {
  const auto placement = find({});
  EXPECT_EQ(placement.size, 1);
  EXPECT_EQ(placement.source, "alone");
}

TEST(LaunchEnvironment, reads_torchrun) {
  const auto placement = find({{"RANK", "3"},
                               {"WORLD_SIZE", "4"},
                               {"MASTER_ADDR", "10.0.0.1"},
                               {"MASTER_PORT", "1234"},
                               {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                               {"TORCHELASTIC_RESTART_COUNT", "2"}});
  EXPECT_EQ(placement.rank, 3);
  EXPECT_EQ(placement.size, 4);
  EXPECT_EQ(placement.address, "10.0.0.1");
  EXPECT_EQ(placement.port, 1234);
  EXPECT_TRUE(placement.store_is_served);
  EXPECT_EQ(placement.generation, "2");
}

TEST(LaunchEnvironment, reads_open_mpi_and_derives_a_port) {
  const auto placement =
      find({{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "2"}, {"PMIX_NAMESPACE", "3735945217"}});
  EXPECT_EQ(placement.rank, 1);
  EXPECT_EQ(placement.address, "127.0.0.1");
  EXPECT_NE(placement.port, 29500);
  EXPECT_FALSE(placement.store_is_served);
}

TEST(LaunchEnvironment, reads_slurms_first_node) {
  const Variables slurm = {{"SLURM_PROCID", "5"}, {"SLURM_NTASKS", "8"},  {"SLURM_NNODES", "2"},
                           {"SLURM_JOB_ID", "7"}, {"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NODELIST", "node[03-04]"}};
  EXPECT_EQ(find(slurm).address, "node03");
  EXPECT_EQ(find(slurm).rank, 5);
  auto one_node = slurm;
  one_node["SLURM_NNODES"] = "1";
  EXPECT_EQ(find(one_node).address, "127.0.0.1");
}

TEST(LaunchEnvironment, tasks_of_srun_with_pmi_get_address_port_and_name_from_slurm) {
  const Variables task = {
      {"PMI_RANK", "3"},     {"PMI_SIZE", "4"},     {"SLURM_PROCID", "3"},  {"SLURM_NTASKS", "4"},
      {"SLURM_NNODES", "2"}, {"SLURM_JOB_ID", "7"}, {"SLURM_STEP_ID", "1"}, {"SLURM_STEP_NODELIST", "node[03-04]"}};
  const auto placement = find(task);
  EXPECT_EQ(placement.rank, 3);
  EXPECT_EQ(placement.source, "PMI_RANK and PMI_SIZE");
  EXPECT_EQ(placement.address, "node03");
  EXPECT_NE(placement.port, 29500);
  EXPECT_EQ(placement.job.name(), "7.1");
}

TEST(LaunchEnvironment, a_batch_script_is_no_task) {
  Variables script = {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}, {"SLURM_JOB_ID", "7"}};
  EXPECT_NE(test::refusal([&] { find(script); }).find("SLURM_NTASKS is 4: start the program with srun"),
            std::string::npos);
  const auto of_script = [&](const std::string& name) -> std::optional<std::string> {
    const auto found = script.find(name);
    return found == script.end() ? std::nullopt : std::optional(found->second);
  };
  EXPECT_TRUE(in_batch_script_of_one_node(of_script));
  script["SLURM_NNODES"] = "2";
  EXPECT_FALSE(in_batch_script_of_one_node(of_script));
  script.erase("SLURM_NNODES");
  script["SLURM_NTASKS"] = "1";
  EXPECT_EQ(find(script).source, "alone");
  script["SLURM_STEP_ID"] = "4294967290";  // of salloc's shell
  script["SLURM_NTASKS"] = "4";
  EXPECT_EQ(find(script).source, "alone");
  EXPECT_FALSE(in_batch_script_of_one_node(of_script));
  script.erase("SLURM_STEP_ID");
  script["RANK"] = "1", script["WORLD_SIZE"] = "2";  // of shoal launch or torchrun in the script
  EXPECT_FALSE(in_batch_script_of_one_node(of_script));
  EXPECT_EQ(find(script).rank, 1);
}

// As the shell that salloc opens on the first node with `srun --preserve-env`: Slurm's own number of its step counts.
TEST(LaunchEnvironment, a_shell_that_is_a_step_of_one_task_is_alone_in_any_allocation) {
  Variables shell{{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"},  {"SLURM_NNODES", "2"},
                  {"SLURM_JOB_ID", "7"}, {"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}};
  shell["SLURM_STEP_NODELIST"] = "node[03-04]";
  EXPECT_EQ(find(shell).size, 1);
  auto by_hand = shell;
  by_hand["RANK"] = "0", by_hand["WORLD_SIZE"] = "1";
  EXPECT_EQ(find(by_hand).source, "RANK and WORLD_SIZE");
  shell["SLURM_STEP_NUM_TASKS"] = "8";
  EXPECT_EQ(find(shell).size, 8);
}

TEST(LaunchEnvironment, takes_one_source_as_a_whole) {
  // sbatch's variables are inherited by processes that torchrun starts.
  const auto placement = find({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"SLURM_PROCID", "6"}, {"SLURM_NTASKS", "16"}});
  EXPECT_EQ(placement.size, 2);
  EXPECT_EQ(placement.source, "RANK and WORLD_SIZE");
}

TEST(LaunchEnvironment, one_rank_by_leftovers_and_several_by_the_launcher_are_refused) {
  const Variables left{{"RANK", "0"}, {"WORLD_SIZE", "1"}};
  const auto with = [](Variables all, const Variables& more) {
    all.insert(more.begin(), more.end());
    return all;
  };
  const Variables mpirun{{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "2"}};
  EXPECT_EQ(
      refusal(with(left, mpirun)),
      "RANK=0 and WORLD_SIZE=1 say that this rank is alone, but OMPI_COMM_WORLD_RANK=1 and OMPI_COMM_WORLD_SIZE=2 "
      "that it is one of several: unset RANK and WORLD_SIZE to train together, or OMPI_COMM_WORLD_RANK and "
      "OMPI_COMM_WORLD_SIZE to run alone");
  const Variables task{{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "2"}, {"SLURM_STEP_ID", "0"}};
  const Variables alone_by_mpi{{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}};
  EXPECT_NE(refusal(with(alone_by_mpi, task)).find("unset OMPI_COMM_WORLD_RANK"), std::string::npos);
  EXPECT_NE(refusal(with(left, task)).find("SLURM_PROCID=1 and SLURM_NTASKS=2"), std::string::npos);
  // Launchers of one rank inside of others say who they are; shells of Slurm are no tasks; and others agree.
  EXPECT_EQ(find(with(with(left, mpirun), {{"TORCHELASTIC_RUN_ID", "day"}})).size, 1);
  EXPECT_EQ(find(with(with(left, task), {{"TORCHELASTIC_RUN_ID", "night"}})).size, 1);
  const Variables local{{"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "1"}}, ray{{"RAY_RAYLET_PID", "4711"}};
  EXPECT_EQ(find(with(with(with(left, task), local), ray)).size, 1) << "a training of Ray";
  EXPECT_NE(refusal(with(with(left, task), local)), "") << "left over with the others";
  EXPECT_NE(refusal(with(with(left, task), ray)), "") << "left over within a task of Ray's";
  EXPECT_EQ(find(with(left, {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}})).size, 1);
  EXPECT_EQ(find(with(left, {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}, {"SLURM_STEP_ID", "4294967290"}})).size, 1);
  EXPECT_EQ(find(with(left, alone_by_mpi)).size, 1);
  EXPECT_NE(refusal(with(with(left, mpirun), {{"SHOAL_JOB_ID", "of all ranks"}})), "");
  EXPECT_EQ(find(with(left, {{"OMPI_COMM_WORLD_SIZE", "2"}})).size, 1);
}

TEST(LaunchEnvironment, options_come_first) {
  WorldOptions options;
  options.rank = 1;
  options.size = 2;
  options.port = 4000;
  const auto placement = find({{"RANK", "0"}, {"WORLD_SIZE", "8"}, {"TORCHELASTIC_USE_AGENT_STORE", "True"}}, options);
  EXPECT_EQ(placement.rank, 1);
  EXPECT_EQ(placement.size, 2);
  EXPECT_EQ(placement.port, 4000);
  EXPECT_FALSE(placement.store_is_served);
}

TEST(LaunchEnvironment, refuses_partial_sets) {
  EXPECT_NE(refusal({{"RANK", "0"}}).find("RANK is set but WORLD_SIZE is not"), std::string::npos);
  EXPECT_NE(refusal({{"WORLD_SIZE", "2"}}).find("WORLD_SIZE is set but RANK is not"), std::string::npos);
  EXPECT_NE(refusal({{"OMPI_COMM_WORLD_RANK", "0"}}).find("OMPI_COMM_WORLD_SIZE"), std::string::npos);
}

TEST(LaunchEnvironment, malformed_variables_are_refused) {
  EXPECT_NE(refusal({{"RANK", "two"}, {"WORLD_SIZE", "2"}}).find("RANK='two'"), std::string::npos);
  EXPECT_NE(refusal({{"RANK", "2"}, {"WORLD_SIZE", "2"}}).find("rank 2 of a world of 2"), std::string::npos);
  EXPECT_NE(refusal({{"RANK", "0"}, {"WORLD_SIZE", "0"}}).find("world size 0"), std::string::npos);
  EXPECT_NE(refusal({{"RANK", "0"}, {"WORLD_SIZE", "2147483647"}}).find("at most 100000"), std::string::npos);
  EXPECT_NE(refusal({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"MASTER_PORT", "99999"}}).find("MASTER_PORT"),
            std::string::npos);
}

// Without /proc nobody can see whether another process lives, or open its memory.
TEST(HostIdentity, without_proc_each_process_is_a_host_of_its_own) {
  const auto own = host_identity("/nowhere");
  EXPECT_EQ(host_identity("/nowhere"), own);
  EXPECT_EQ(own.find(' '), std::string::npos);
  const int child = fork();
  if (child == 0) std::_Exit(host_identity("/nowhere") != own && host_identity() != own ? 0 : 1);
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(WorldOptions, validate_lists_all_faults) {
  WorldOptions options;
  options.rank = 1;
  options.transport = "nccl";
  options.timeout_seconds = 0;
  try {
    options.validate();
    FAIL() << "no error";
  } catch (const UsageError& error) {
    const std::string text = error.what();
    for (const auto* part : {"rank and size", "transport 'nccl'", "timeout_seconds"}) {
      EXPECT_NE(text.find(part), std::string::npos) << text;
    }
  }
}

}  // namespace
}  // namespace shoal::launch_environment_test
