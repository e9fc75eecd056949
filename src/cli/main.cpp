// The program `shoal`. Exit codes: 0 done, 1 the work failed, 2 the command line was wrong, 130 interrupted.

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "base/environment.h"
#include "cli/check_values.h"
#include "cli/commands.h"
#include "shoal/base/error.h"

namespace {

constexpr int failed = 1;
constexpr int wrong_command_line = 2;

void complain(const std::string& text) {
  const auto environment = shoal::process_environment();
  const auto rank = environment("RANK");
  const bool several = rank && environment("WORLD_SIZE").value_or("1") != "1";
  fmt::print(stderr, "{}error: {}\n", several ? "rank " + *rank + ": " : "", text.substr(0, text.find('\n')));
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // a file that may not grow is an error with a name, as it is in Python
  std::vector<std::string> line(argv, argv + argc);
  // Ranks are started as this very program, wherever it was found.
  std::error_code unreadable;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", unreadable);
  if (!unreadable) line[0] = self;

  CLI::App app("shoal: data-parallel training on libtorch");
  app.set_version_flag("--version", "shoal " SHOAL_VERSION);
  app.require_subcommand(1);
  shoal::cli::Action chosen;
  shoal::cli::add_train_command(app, line, chosen);
  shoal::cli::add_bench_command(app, line, chosen);
  shoal::cli::add_plan_command(app, chosen);
  shoal::cli::add_topology_command(app, chosen);
  shoal::cli::add_launch_command(app, chosen);
  shoal::cli::add_checkpoint_command(app, chosen);
  shoal::cli::add_flight_command(app, chosen);
  shoal::cli::add_trace_command(app, chosen);
  shoal::cli::add_doctor_command(app, chosen);
  shoal::cli::check_values(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::Error& error) {
    complain(std::string(error.what()) + " (shoal --help, shoal COMMAND --help)");
    return wrong_command_line;
  } catch (const shoal::UsageError& error) {
    complain(error.what());
    return wrong_command_line;
  }
  try {
    return chosen();
  } catch (const c10::Error& error) {
    complain(error.what_without_backtrace());
  } catch (const std::exception& error) {
    complain(error.what());
  }
  // Without destructors: a group that has failed would wait for operations that never finish.
  std::fflush(nullptr);
  std::_Exit(failed);
}
