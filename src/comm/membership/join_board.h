#pragma once
// Table of the processes of an elastic job that newcomers may join, in memory that the job's launcher holds.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/environment.h"
#include "comm/shm/memory_file.h"

namespace shoal {

struct JoinPage;
struct Peer;

// Outlives every rank, because the launcher does. Each process has an entry under its number of member, which no other
// process gets: 0 to first_ranks - 1 for the first ranks, then one for each newcomer. A newcomer's entry is its knock.
// Members look at it between two steps. What the first ranks say of their job lies here, too, so that a newcomer which
// does not fit finds out by itself, and disturbs nobody.
//
// Thread-safe. An entry is written by its own process; whether it is admitted, by the lowest member, of which there is
// one.
class JoinBoard {
 public:
  static constexpr int most_members = 1024;
  static constexpr size_t most_text = size_t{256} << 10;
  // Environment variables: address() for all ranks, and for a newcomer "NUMBER JOB".
  static constexpr const char* variable = "SHOAL_ELASTIC";
  static constexpr const char* newcomer_variable = "SHOAL_JOIN";

  // For a launcher. job: its name, which nested jobs do not have. std::runtime_error without shared memory.
  JoinBoard(std::string job, int first_ranks);
  // Opens a launcher's. UsageError for an address that is none, std::runtime_error for memory that is not a board of this
  // version.
  explicit JoinBoard(const std::string& address);

  std::string address() const;
  const std::string& job() const { return job_; }
  int first_ranks() const;

  // A rank of the first generation.
  void enter(int number, const Peer& peer);
  // A newcomer asks to join. UsageError for a number that was used before.
  void knock(int number, const Peer& peer);
  // The newcomer does not ask any more. False: members have begun to admit it.
  bool withdraw(int number);
  // For members: whether the newcomer still asks; then it is being admitted.
  bool claim(int number);
  void release(int number);
  void refuse(int number, const std::string& why);
  // The newcomer has the job's state.
  void admitted(int number);

  // Whether somebody asks, as far as it is known without looking whether they live.
  bool anyone_knocks() const;
  std::vector<int> knocking() const;
  // Whether members go on without it, also after it has had the job's state.
  bool is_refused(int number) const;
  // Why a newcomer was refused; empty: it was not.
  std::string refusal(int number) const;
  // Whether the process is a member, or was one.
  bool is_member(int number) const;
  // All processes so far by number, without those that have not come (pid 0).
  std::vector<Peer> peers() const;
  // Counts up with every entry.
  uint32_t changes() const;

  // What a newcomer must have in common with the members, for the lowest one of them.
  void publish(const std::string& description);
  // Newcomers cannot join this job. The first call counts.
  void close(const std::string& why);
  // Nothing: not published yet.
  std::optional<std::string> description() const;
  std::string why_closed() const;  // empty: it is not

 private:
  std::string job_;
  MemoryFile file_;
  int pid_;
  int descriptor_;
  JoinPage* page_;
};

// How this process can take part in a job that newcomers may join.
struct JoinPlace {
  std::shared_ptr<JoinBoard> board{};  // nullptr: nobody can join
  std::optional<int> number{};         // of a newcomer
};
// What launchers of enclosing jobs have set does not count. UsageError for a newcomer that cannot join.
JoinPlace find_join(const Environment& environment);

}  // namespace shoal
