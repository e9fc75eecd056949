#pragma once
// The processes of a job, also those that its ranks have started, and theirs.

#include <string>

namespace shoal {

// Environment variable by which a job's processes are known: the ids of the job and, before it, of the jobs within which its
// launcher runs, with "/" between them.
inline constexpr const char* job_variable = "SHOAL_JOB";

// Ends (SIGKILL) every process of this user that was started with `job`, or a job within it, in its environment. What
// clears its environment, or belongs to another user, is not found. Takes a few milliseconds; returns how many there were.
int end_processes_of(const std::string& job);

}  // namespace shoal
