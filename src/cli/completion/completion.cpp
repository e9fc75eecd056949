#include "cli/completion/completion.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>

#include "cli/bench/collectives.h"
#include "cli/bench/training.h"
#include "cli/strategies/optimizers.h"
#include "cli/strategies/schedules.h"
#include "comm/transport/transport.h"
#include "models/registry.h"
#include "shoal/plan.h"
#include "shoal/strategy.h"
#include "shoal/topology.h"

namespace shoal::cli {
namespace {

using Names = std::vector<std::string>;

Names topology_names() {
  Names names;
  for (const auto& [name, summary] : known_topologies()) names.push_back(name);
  return names;
}

Names model_size_names() {
  Names names;
  for (const auto& model : models::model_names()) {
    for (const auto& size : models::model_sizes(model)) {
      if (std::find(names.begin(), names.end(), size) == names.end()) names.push_back(size);
    }
  }
  return names;
}

// By command and name of the option.
using KnownValues = std::map<std::pair<std::string, std::string>, Names>;

KnownValues known_values() {
  KnownValues values{{{"train", "--strategy"}, strategy_names()},
                     {{"train", "--schedule"}, schedule_names()},
                     {{"train", "--topology"}, topology_names()},
                     {{"train", "--init"}, {"torch", "reference"}},
                     {{"train", "--device"}, {"cpu", "cuda"}},
                     {{"bench", "--strategies"}, measured_strategies()},
                     {{"bench", "--peer-impl"}, {"default", "foreach", "fused"}},
                     {{"plan", "--strategy"}, plannable_strategies()}};
  values[{"plan", "--strategy"}].emplace_back("all");
  for (const std::string command : {"train", "bench", "plan"}) {
    values[{command, "--model"}] = models::model_names();
    values[{command, "--size"}] = model_size_names();
    values[{command, "--optimizer"}] = optimizer_names();
  }
  for (const std::string command : {"train", "plan"}) {
    values[{command, "--transport"}] = transport_names();
    values[{command, "--dtype"}] = precision_names();
    values[{command, "--compress"}] = {"none", "fp16", "bf16", "int8"};  // others have a number
  }
  for (const auto* of_params : {"mixed", "mixed_fp32_grads"}) values[{"plan", "--dtype"}].emplace_back(of_params);
  for (const auto& [option, names] : known_collective_values()) values[{"bench", option}] = names;
  for (const auto& strategy : strategy_names()) {
    for (const auto& option : find_strategy(strategy).options) {
      auto name = "--" + option.name;
      std::replace(name.begin(), name.end(), '_', '-');
      if (!option.choices.empty()) values.try_emplace({"train", name}, option.choices);
    }
  }
  return values;
}

// Words for a shell's single quotes.
std::string shell_words(const std::string& text) {
  const auto end = std::min(text.find('\n'), text.find("; "));
  std::string result;
  for (const char c : text.substr(0, std::min<size_t>(end, 100))) {
    if (c != '\'' && c != '\\' && c != '`' && c != '"') result += c;
  }
  return result;
}

Completed::Option completed(const CLI::Option& option, const std::string& path, const KnownValues& values) {
  Completed::Option result{.names = {}, .help = option.get_description()};
  for (const auto& name : option.get_snames()) result.names.push_back("-" + name);
  for (const auto& name : option.get_lnames()) result.names.push_back("--" + name);
  result.takes_value = option.get_items_expected_max() > 0;
  for (const auto& name : result.names) {
    const auto found = values.find({path, name});
    if (result.takes_value && found != values.end()) result.values = found->second;
  }
  return result;
}

void add_completed(const CLI::App& app, const std::string& path, const KnownValues& values,
                   std::vector<Completed>& all) {
  Completed command{.path = path};
  for (const auto* option : app.get_options()) {
    if (!option->nonpositional()) continue;
    command.options.push_back(completed(*option, path, values));
  }
  if (path == "topology") command.values = topology_names();
  if (path == "completion") command.values = {"bash", "zsh"};
  const auto subcommands = app.get_subcommands([](const CLI::App*) { return true; });
  for (const auto* sub : subcommands) command.commands.emplace_back(sub->get_name(), sub->get_description());
  all.push_back(std::move(command));
  for (const auto* sub : subcommands)
    add_completed(*sub, path.empty() ? sub->get_name() : path + " " + sub->get_name(), values, all);
}

Names option_names(const Completed& command) {
  Names names;
  for (const auto& option : command.options) names.insert(names.end(), option.names.begin(), option.names.end());
  return names;
}

// Of the options of a command that take a value.
template <class Each>
void for_each_value_option(const Completed& command, const Each& each) {
  for (const auto& option : command.options) {
    if (option.takes_value) each(fmt::format("{}", fmt::join(option.names, "|")), option.values);
  }
}

// Walks along the words to the command; `place` is where it ends. Words behind -- belong to another program.
constexpr const char* walk_words = R"(
  local path="" place=1 word
  while [[ $place -lt $current ]]; do
    word="${words[$((place + first))]}"
    [[ "$word" == "--" ]] && %r
    case "$path|$word" in
%s      *) ;;
    esac
    place=$((place + 1))
  done
)";

std::string walking(const std::vector<Completed>& commands, const char* current, int first, const char* leave) {
  std::string cases;
  for (const auto& command : commands) {
    for (const auto& [name, help] : command.commands) {
      cases += fmt::format("      '{}|{}') path='{}' ;;\n", command.path, name,
                           command.path.empty() ? name : command.path + " " + name);
    }
  }
  std::string text = walk_words;
  text.replace(text.find("%r"), 2, leave);
  text.replace(text.find("%s"), 2, cases);
  for (auto at = text.find("$current"); at != std::string::npos; at = text.find("$current"))
    text.replace(at, 8, current);
  const std::string offset = " + first";
  text.replace(text.find(offset), offset.size(), first == 0 ? "" : fmt::format(" + {}", first));
  return text;
}

}  // namespace

std::vector<Completed> completed_commands(const CLI::App& app) {
  std::vector<Completed> all;
  add_completed(app, "", known_values(), all);
  return all;
}

std::string bash_completion(const std::vector<Completed>& commands) {
  std::string script =
      "# Completion of shoal for bash: source <(shoal completion bash)\n"
      "_shoal() {\n"
      "  local cur=\"${COMP_WORDS[COMP_CWORD]}\" prev=\"${COMP_WORDS[COMP_CWORD-1]}\"\n"
      "  local words=(\"${COMP_WORDS[@]}\")\n"
      "  COMPREPLY=()" +
      walking(commands, "$COMP_CWORD", 0, "return 0") +
      "  local values=\"\" options=\"\" commands=\"\"\n"
      "  case \"$path\" in\n";
  for (const auto& command : commands) {
    script += fmt::format("    '{}')\n      case \"$prev\" in\n", command.path);
    for_each_value_option(command, [&](const std::string& names, const Names& values) {
      script +=
          fmt::format("        {}) values='{}'; [[ -z \"$values\" ]] && return 0 ;;\n", names, fmt::join(values, " "));
    });
    Names subcommands;
    for (const auto& [name, help] : command.commands) subcommands.push_back(name);
    script +=
        fmt::format("      esac\n      options='{}'\n      commands='{}' ;;\n", fmt::join(option_names(command), " "),
                    fmt::join(subcommands.empty() ? command.values : subcommands, " "));
  }
  // An empty reply: bash offers files.
  return script +
         "  esac\n"
         "  if [[ -n \"$values\" ]]; then\n"
         "    COMPREPLY=($(compgen -W \"$values\" -- \"$cur\"))\n"
         "  elif [[ \"$cur\" == -* ]]; then\n"
         "    COMPREPLY=($(compgen -W \"$options\" -- \"$cur\"))\n"
         "  else\n"
         "    COMPREPLY=($(compgen -W \"$commands\" -- \"$cur\"))\n"
         "  fi\n"
         "}\n"
         "complete -o default -F _shoal shoal\n";
}

std::string zsh_completion(const std::vector<Completed>& commands) {
  const auto described = [](const std::string& name, const std::string& help) {
    std::string text = shell_words(help);
    for (auto at = text.find(':'); at != std::string::npos; at = text.find(':', at + 2)) text.insert(at, "\\");
    return fmt::format("'{}:{}' ", name, text);
  };
  std::string script =
      "#compdef shoal\n"
      "# Completion of shoal for zsh: source <(shoal completion zsh), or a file _shoal in a folder of $fpath.\n"
      "_shoal() {\n"
      "  local cur=\"${words[CURRENT]}\" prev=\"${words[CURRENT-1]}\"\n"
      "  local -a values options commands" +
      walking(commands, "$((CURRENT - 1))", 1, "{ _files; return; }") + "  case \"$path_of\" in\n";
  for (const auto& command : commands) {
    script += fmt::format("    '{}')\n      case \"$prev\" in\n", command.path);
    for_each_value_option(command, [&](const std::string& names, const Names& values) {
      script += values.empty() ? fmt::format("        {}) _files; return ;;\n", names)
                               : fmt::format("        {}) values=({}) ;;\n", names, fmt::join(values, " "));
    });
    script += "      esac\n      options=(";
    for (const auto& option : command.options) {
      for (const auto& name : option.names) script += described(name, option.help);
    }
    script += ")\n      commands=(";
    for (const auto& [name, help] : command.commands) script += described(name, help);
    if (command.commands.empty()) {
      for (const auto& value : command.values) script += fmt::format("'{}' ", value);
    }
    script += ") ;;\n";
  }
  script +=
      "  esac\n"
      "  if (( ${#values} )); then\n"
      "    compadd -a values\n"
      "  elif [[ \"$cur\" == -* ]]; then\n"
      "    _describe -o option options\n"
      "  elif (( ${#commands} )); then\n"
      "    _describe command commands\n"
      "  else\n"
      "    _files\n"
      "  fi\n"
      "}\n"
      "if [[ \"$funcstack[1]\" = _shoal ]]; then _shoal \"$@\"; else compdef _shoal shoal; fi\n";
  // In zsh `path` is the list of folders with programs.
  for (const char* before : {"local path=", "\"$path|", ") path="}) {
    const std::string word = before;
    auto with = word;
    with.replace(with.find("path"), 4, "path_of");
    for (auto at = script.find(word); at != std::string::npos; at = script.find(word, at + with.size())) {
      script.replace(at, word.size(), with);
    }
  }
  return script;
}

}  // namespace shoal::cli
