#pragma once
// Completion of command lines in shells.

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace shoal::cli {

// A command, or a command of a command.
struct Completed {
  struct Option {
    std::vector<std::string> names;  // with their dashes
    std::string help;
    bool takes_value = false;
    std::vector<std::string> values{};  // empty: any; shells offer files
  };
  std::string path;                                             // "", "train", "trace merge"
  std::vector<std::pair<std::string, std::string>> commands{};  // names and help
  std::vector<Option> options{};
  std::vector<std::string> values{};  // of what is no option; empty: any; shells offer files
};

// All commands of the application, itself first. Values are those that the registries of the library know.
std::vector<Completed> completed_commands(const CLI::App& app);

// Scripts that shells read: `source <(shoal completion bash)`; zsh's may also be a file _shoal in its $fpath.
std::string bash_completion(const std::vector<Completed>& commands);
std::string zsh_completion(const std::vector<Completed>& commands);

}  // namespace shoal::cli
