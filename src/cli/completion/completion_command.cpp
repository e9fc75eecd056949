// `shoal completion`: what a shell needs to complete command lines of shoal.

#include <fmt/format.h>

#include <memory>

#include "cli/commands.h"
#include "cli/completion/completion.h"
#include "cli/train/report.h"

namespace shoal::cli {

void add_completion_command(CLI::App& app, Action& chosen) {
  auto* command = app.add_subcommand("completion", "print a script that completes command lines of shoal in a shell");
  command->footer(
      "bash: source <(shoal completion bash) in ~/.bashrc\nzsh: source <(shoal completion zsh) in ~/.zshrc, "
      "behind compinit");
  struct Options {
    std::string shell;
    std::string json;
  };
  const auto options = std::make_shared<Options>();
  command->add_option("shell", options->shell, "bash or zsh")->required()->check(CLI::IsMember({"bash", "zsh"}));
  command->add_option("--json", options->json,
                      "write commands, options and values as JSON to this file instead; - is standard output");
  command->callback([&app, options, &chosen] {
    chosen = [&app, options] {
      const auto commands = completed_commands(app);
      if (!options->json.empty()) {
        auto list = nlohmann::ordered_json::array();
        for (const auto& known : commands) {
          nlohmann::ordered_json json{{"command", known.path}, {"options", nlohmann::ordered_json::array()}};
          for (const auto& option : known.options) {
            json["options"].push_back({{"names", option.names},
                                       {"help", option.help},
                                       {"takes_value", option.takes_value},
                                       {"values", option.values}});
          }
          list.push_back(std::move(json));
        }
        write_json(options->json, list);
        return 0;
      }
      fmt::print("{}", options->shell == "bash" ? bash_completion(commands) : zsh_completion(commands));
      return 0;
    };
  });
}

}  // namespace shoal::cli
