#pragma once
// Commands of the program. Each function adds a command to the application; its work runs after the line is parsed.

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <vector>

namespace shoal::cli {

// Work of the chosen command; returns the exit code.
using Action = std::function<int()>;

// line: the whole command line, used to start further ranks.
void add_train_command(CLI::App& app, const std::vector<std::string>& line, Action& chosen);
void add_bench_command(CLI::App& app, const std::vector<std::string>& line, Action& chosen);
void add_plan_command(CLI::App& app, Action& chosen);
void add_topology_command(CLI::App& app, Action& chosen);
void add_launch_command(CLI::App& app, Action& chosen);
void add_checkpoint_command(CLI::App& app, Action& chosen);
void add_doctor_command(CLI::App& app, Action& chosen);
void add_flight_command(CLI::App& app, Action& chosen);
void add_trace_command(CLI::App& app, Action& chosen);
void add_top_command(CLI::App& app, Action& chosen);
void add_report_command(CLI::App& app, Action& chosen);
// After all others: it completes what the application has then.
void add_completion_command(CLI::App& app, Action& chosen);

}  // namespace shoal::cli
