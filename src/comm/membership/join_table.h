#pragma once
// Table of the processes of an elastic job that newcomers may join.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/environment.h"

namespace shoal {

struct Peer;

// Outlives every rank. Each process has an entry under its number of member, which no other process gets: 0 to
// first_ranks - 1 for the first ranks, then one for each newcomer. A newcomer's entry is its knock. Members look at it
// between two steps. What the first ranks say of their job lies here, too, so that a newcomer which does not fit finds
// out by itself, and disturbs nobody.
//
// Thread-safe. An entry is written by its own process; whether it is admitted, by the lowest member, of which there is
// one.
class JoinTable {
 public:
  static constexpr int most_members = 1024;
  static constexpr size_t most_text = size_t{256} << 10;

  JoinTable() = default;
  virtual ~JoinTable() = default;
  JoinTable(const JoinTable&) = delete;
  JoinTable& operator=(const JoinTable&) = delete;

  virtual int first_ranks() const = 0;
  // How many ranks the job may have at once.
  virtual int most_ranks() const { return most_members; }
  // Looks whether other processes have changed something; where all see changes at once, it does nothing.
  virtual void refresh() {}

  // A newcomer asks to join. UsageError for a number that was used before.
  virtual void knock(int number, const Peer& peer) = 0;
  // The newcomer does not ask any more. False: members have begun to admit it.
  virtual bool withdraw(int number) = 0;
  // For members: whether the newcomer still asks; then it is being admitted.
  virtual bool claim(int number) = 0;
  virtual void release(int number) = 0;
  virtual void refuse(int number, const std::string& why) = 0;
  // The newcomer has the job's state.
  virtual void admitted(int number) = 0;

  // Whether somebody asks, as far as it is known without looking whether they live.
  virtual bool anyone_knocks() const = 0;
  virtual std::vector<int> knocking() const = 0;
  // Whether members go on without it, also after it has had the job's state.
  virtual bool is_refused(int number) const = 0;
  // Why a newcomer was refused; empty: it was not.
  virtual std::string refusal(int number) const = 0;
  // Whether the process is a member, or was one.
  virtual bool is_member(int number) const = 0;
  // All processes so far by number, without those that have not come (pid 0).
  virtual std::vector<Peer> peers() const = 0;
  // Another number after every change of them.
  virtual uint64_t changes() const = 0;

  // What a newcomer must have in common with the members, for the lowest one of them.
  virtual void publish(const std::string& description) = 0;
  // Newcomers cannot join this job. The first call counts.
  virtual void close(const std::string& why) = 0;
  // Nothing: not published yet.
  virtual std::optional<std::string> description() const = 0;
  virtual std::string why_closed() const = 0;  // empty: it is not
};

// A job on several hosts, and its launcher's store.
struct OpenJob {
  int first_ranks = 0;
  int most_ranks = 0;
  std::string address{};
  int port = 0;
};

// What the launcher of an elastic job says of it.
struct JoinPlace {
  std::shared_ptr<JoinTable> table{};   // nullptr: nobody can join, or `over_hosts`
  std::optional<int> number{};          // of a newcomer
  std::optional<OpenJob> over_hosts{};  // the table lies in the job's store
  int min_ranks = 0;                    // it ends the job if fewer are left; 0: this is not its job
};
// Environment variables, which launchers set: how all ranks find the table; "NUMBER JOB" for a newcomer; "NUMBER
// PORT JOB", with the port of the job's store, of the least ranks.
constexpr const char* join_variable = "SHOAL_ELASTIC";
constexpr const char* newcomer_variable = "SHOAL_JOIN";
constexpr const char* least_variable = "SHOAL_ELASTIC_MIN";
// Value of join_variable for a table in the job's store.
std::string join_over_hosts(const OpenJob& open, const std::string& job);
// What launchers of enclosing jobs have set does not count. UsageError for a newcomer that cannot join.
JoinPlace find_join(const Environment& environment);

}  // namespace shoal
