#include "cli/writable.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "shoal/error.h"

namespace shoal::cli {
namespace {

[[noreturn]] void refuse(const char* option, const std::string& path, const std::string& reason) {
  throw UsageError(fmt::format("{}: cannot write {}: {}", option, path, reason));
}

}  // namespace

void require_writable_file(const char* option, const std::string& path) {
  if (path.empty() || path == "-") return;
  struct stat status {};
  const bool existed = stat(path.c_str(), &status) == 0;
  if (existed && !S_ISREG(status.st_mode)) {  // opened, a named pipe would look finished to its reader
    if (S_ISDIR(status.st_mode)) refuse(option, path, std::strerror(EISDIR));
    if (access(path.c_str(), W_OK) != 0) refuse(option, path, std::strerror(errno));
    return;
  }
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666);
  if (file < 0) refuse(option, path, std::strerror(errno));
  close(file);
  std::error_code error;
  if (!existed) std::filesystem::remove(std::filesystem::canonical(path, error), error);  // not the link to it
}

void require_not_standard_output(const char* option, const std::string& path) {
  if (path == "-") throw UsageError(fmt::format("{} -: it does not go to standard output: give a file", option));
}

void require_writable_folder(const char* option, const std::string& path) {
  if (path.empty()) return;
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) refuse(option, path, error.message());
  if (!std::filesystem::is_directory(path, error)) refuse(option, path, "it is not a folder");
  auto file = path + "/.writable-XXXXXX";
  const int made = mkostemp(file.data(), O_CLOEXEC);
  if (made < 0) refuse(option, path, std::strerror(errno));
  close(made);
  unlink(file.c_str());
}

void require_not_read(const char* option, const std::string& output, const std::vector<std::filesystem::path>& read) {
  namespace fs = std::filesystem;
  if (output.empty() || output == "-") return;
  std::error_code error;
  const auto full = fs::weakly_canonical(fs::absolute(output), error);
  for (const auto& input : read) {
    const bool same = fs::equivalent(output, input, error);
    const bool inside = fs::is_directory(input, error) && fs::equivalent(full.parent_path(), input, error);
    if (same || inside) refuse(option, output, fmt::format("the command reads {}", input.string()));
  }
}

void require_no_rank_file(const char* option, const std::string& output, const std::filesystem::path& folder,
                          const std::string& extension) {
  namespace fs = std::filesystem;
  if (output.empty() || output == "-" || folder.empty()) return;
  std::error_code error;
  const auto full = fs::weakly_canonical(fs::absolute(output), error);
  const bool is_one = full.filename().string().starts_with("rank-") && full.extension() == extension;
  if (!is_one || !fs::equivalent(full.parent_path(), folder, error)) return;
  refuse(option, output, "files of ranks have such names there; give another name");
}

void require_two_files(const char* option, const std::string& path, const char* other_option,
                       const std::string& other) {
  if (path.empty() || path == "-" || other.empty() || other == "-") return;
  std::error_code error;
  const bool same = std::filesystem::weakly_canonical(std::filesystem::absolute(path), error) ==
                    std::filesystem::weakly_canonical(std::filesystem::absolute(other), error);
  if (same) throw UsageError(fmt::format("{} and {} are both {}: give two files", option, other_option, path));
}

}  // namespace shoal::cli
