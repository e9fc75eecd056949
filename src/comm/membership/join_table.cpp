#include "comm/membership/join_table.h"

#include <fmt/format.h>

#include <sstream>
#include <stdexcept>

#include "base/printable.h"
#include "comm/membership/join_board.h"
#include "shoal/error.h"

namespace shoal {
namespace {

constexpr const char* job_of_process = "SHOAL_JOB";
constexpr const char* in_the_store = "store";

// Nothing: the text is the address of a table in memory.
std::optional<OpenJob> open_job_in(const std::string& text, std::string& job) {
  std::istringstream in(text);
  std::string where;
  OpenJob open;
  if (!(in >> where) || where != in_the_store) return std::nullopt;
  const bool read = static_cast<bool>(in >> open.first_ranks >> open.most_ranks >> open.address >> open.port);
  const bool ranks = open.first_ranks >= 1 && open.most_ranks >= 1 && open.most_ranks <= JoinTable::most_members;
  if (!read || !ranks || open.port < 1 || open.port > 65535) {
    throw UsageError(
        fmt::format("{}='{:.100}' is not what shoal launch --elastic sets: unset it", join_variable, printable(text)));
  }
  std::getline(in >> std::ws, job);
  return open;
}

// Of "NUMBER JOB". Nothing: the variable is not set, or is another job's.
std::optional<int> number_for_job(const Environment& environment, const char* variable, const std::string& own_job) {
  const auto text = environment(variable);
  if (!text) return std::nullopt;
  std::istringstream in(*text);
  int number = -1;
  if (!(in >> number) || number < 0) {
    throw UsageError(fmt::format("{}='{:.100}' is not what shoal launch --elastic sets, a number and a job: unset it",
                                 variable, printable(*text)));
  }
  std::string job;
  std::getline(in >> std::ws, job);
  return job == own_job ? std::optional(number) : std::nullopt;
}

}  // namespace

std::string join_over_hosts(const OpenJob& open, const std::string& job) {
  return fmt::format("{} {} {} {} {} {}", in_the_store, open.first_ranks, open.most_ranks, open.address, open.port,
                     job);
}

JoinPlace find_join(const Environment& environment) {
  JoinPlace place;
  const auto own_job = environment(job_of_process).value_or("");
  const auto address = environment(join_variable);
  place.number = number_for_job(environment, newcomer_variable, own_job);
  // A world that a rank starts has a store of its own.
  const auto own_store = environment("MASTER_PORT").value_or("");
  place.min_ranks = number_for_job(environment, least_variable, own_store + " " + own_job).value_or(0);
  std::string why = fmt::format("{} is not set", join_variable);
  if (address) {
    why = fmt::format("{} is another job's", join_variable);
    std::string job;
    if (const auto open = open_job_in(*address, job)) {
      if (job == own_job) place.over_hosts = open;
    } else {
      try {
        auto board = std::make_shared<JoinBoard>(*address);
        if (board->job() == own_job) place.table = std::move(board);
      } catch (const std::runtime_error& error) {  // also of an enclosing job, whose launcher may have ended
        why = error.what();
      }
    }
  }
  if (!place.number) return place;
  if (!place.table && !place.over_hosts) {
    throw UsageError(fmt::format("this process is to join an elastic job ({}), whose table it cannot open: {}",
                                 newcomer_variable, why));
  }
  const int first = place.table ? place.table->first_ranks() : place.over_hosts->first_ranks;
  if (*place.number < first || *place.number >= JoinTable::most_members) {
    throw UsageError(fmt::format("{} has number {}: those of newcomers to this job are {} to {}", newcomer_variable,
                                 *place.number, first, JoinTable::most_members - 1));
  }
  return place;
}

}  // namespace shoal
