// Program `shoal`. Exit codes: 0 done, 1 the work failed, 2 the command line was wrong, 130 interrupted; where ranks
// are started, that of the first rank to fail, 128 + number for a signal.

#include <fcntl.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>

#include "base/end_process.h"
#include "cli/commands.h"
#include "cli/exit_code.h"
#include "cli/train/check_values.h"
#include "shoal/error.h"

namespace {

constexpr int wrong_command_line = 2;

// Opens closed standard streams: otherwise the next opened file would get their number, and output would go to it.
void open_standard_streams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(stream, F_GETFD) < 0) open("/dev/null", O_RDWR);
  }
}

int run(int argc, char** argv) {
  open_standard_streams();
  std::signal(SIGXFSZ, SIG_IGN);  // a file that exceeds a limit is an error with a name, as in Python
  std::vector<std::string> line(argv, argv + argc);
  // Ranks are started with this very program, wherever it was found.
  std::error_code unreadable;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", unreadable);
  if (!unreadable) line[0] = self;

  CLI::App app("shoal: data-parallel training on libtorch", "shoal");
  app.set_version_flag("--version", "shoal " SHOAL_VERSION);
  app.require_subcommand(1);
  shoal::cli::Action chosen;
  std::vector<std::string> program;
  shoal::cli::add_train_command(app, line, chosen);
  shoal::cli::add_bench_command(app, line, chosen);
  shoal::cli::add_plan_command(app, chosen);
  shoal::cli::add_topology_command(app, chosen);
  shoal::cli::add_launch_command(app, program, chosen);
  shoal::cli::add_checkpoint_command(app, chosen);
  shoal::cli::add_top_command(app, chosen);
  shoal::cli::add_report_command(app, chosen);
  shoal::cli::add_flight_command(app, chosen);
  shoal::cli::add_trace_command(app, chosen);
  shoal::cli::add_doctor_command(app, chosen);
  shoal::cli::add_completion_command(app, chosen);
  shoal::cli::check_values(app);
  try {
    program = shoal::cli::take_program(app, line);
    shoal::cli::refuse_values_left_out(line);
    app.parse(std::vector<std::string>(line.rbegin(), line.rend() - 1));
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::Error& error) {
    const auto unknown = shoal::cli::unknown_word(app, line);
    shoal::cli::complain((unknown.empty() ? error.what() : unknown) + " (shoal --help, shoal COMMAND --help)");
    return wrong_command_line;
  } catch (const shoal::UsageError& error) {
    shoal::cli::complain(error.what());
    return wrong_command_line;
  }
  return shoal::cli::exit_code_of(chosen);
}

}  // namespace

int main(int argc, char** argv) {
  shoal::end_process(run(argc, argv));
}
