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
// program: what take_program() returns, filled before the line is parsed; must outlive the app.
void add_launch_command(CLI::App& app, const std::vector<std::string>& program, Action& chosen);
// The words of the program that `shoal launch` starts, which begin behind `--` or with the first word that is no
// option; one word stands for them in `line` afterwards. Nothing for other commands. UsageError for an option without
// its value.
std::vector<std::string> take_program(const CLI::App& app, std::vector<std::string>& line);
void add_checkpoint_command(CLI::App& app, Action& chosen);
void add_doctor_command(CLI::App& app, Action& chosen);
void add_flight_command(CLI::App& app, Action& chosen);
void add_trace_command(CLI::App& app, Action& chosen);
void add_top_command(CLI::App& app, Action& chosen);
void add_report_command(CLI::App& app, Action& chosen);
// After all others: it completes what the application has then.
void add_completion_command(CLI::App& app, Action& chosen);

}  // namespace shoal::cli
