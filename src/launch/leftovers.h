#pragma once
// Processes of a job, including all descendants of its ranks.

#include <string>

namespace shoal {

// Environment variable that marks a job's processes: the ids of the enclosing jobs and of the job itself, with "/"
// between them.
inline constexpr const char* job_variable = "SHOAL_JOB";

// Kills (SIGKILL) every process of this user that was started with `job`, or a job within it, in its environment. Does
// not find processes that clear their environment or belong to another user. Takes a few milliseconds; returns their
// number.
int end_processes_of(const std::string& job);

}  // namespace shoal
