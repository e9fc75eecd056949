#include "cli/exit_code.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>

#include "base/environment.h"
#include "base/print_to_stderr.h"
#include "base/printable.h"

namespace shoal::cli {

namespace {

int output_error = EIO;  // of standard output, if it has failed

// Flushes standard output, which may still be buffered.
int require_printed(int code) {
  const int error = std::fflush(stdout) != 0 ? errno : std::ferror(stdout) != 0 ? output_error : 0;
  if (error == 0) return code;
  complain(fmt::format("cannot write to standard output: {}", std::strerror(error)));
  return code == 0 ? failed : code;
}

}  // namespace

void complain(const std::string& text) {
  const auto environment = process_environment();
  const auto rank = environment("RANK");
  const bool several = rank && environment("WORLD_SIZE").value_or("1") != "1";
  print_to_stderr("{}error: {}\n", several ? "rank " + *rank + ": " : "", printable(text.substr(0, text.find('\n'))));
}

bool is_printed() {
  return std::fflush(stdout) == 0 && std::ferror(stdout) == 0;
}

bool write_to_stdout(const std::string& text) {
  const bool written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
  if (std::fflush(stdout) == 0 && written) return true;
  output_error = errno;
  return false;
}

int exit_code_of(const std::function<int()>& work) {
  try {
    return require_printed(work());
  } catch (const c10::Error& error) {
    complain(error.what_without_backtrace());
  } catch (const std::exception& error) {
    complain(error.what());
  }
  return failed;
}

}  // namespace shoal::cli
