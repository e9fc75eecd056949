// Command `shoal checkpoint`: lists, verifies, exports and reshards checkpoints.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>

#include "base/limits.h"
#include "base/printable.h"
#include "checkpoint/loading/export.h"
#include "checkpoint/loading/reader.h"
#include "checkpoint/loading/reshard.h"
#include "cli/commands.h"
#include "cli/train/report.h"
#include "cli/writable.h"
#include "shoal/error.h"

namespace shoal::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr double mebibyte = 1 << 20;
constexpr double default_shard_gb = 5;

struct CheckpointOptions {
  std::string path;
  std::string json;
  std::string output;
  std::string part = "model";
  std::optional<double> shard_gb{};
  int ranks = 0;
};

int64_t bytes_of(const StoredTensor& tensor) {
  const bool known = tensor.dtype != at::ScalarType::Undefined;
  return known ? tensor.numel() * static_cast<int64_t>(c10::elementSize(tensor.dtype)) : tensor.foreign_bytes;
}

Json to_json(const CheckpointReader& reader) {
  const auto& index = reader.index();
  Json tensors = Json::array();
  for (const auto& [name, tensor] : index.tensors) {
    tensors.push_back({{"name", name},
                       {"part", tensor.part},
                       {"dtype", c10::toString(tensor.dtype)},
                       {"shape", tensor.shape},
                       {"bytes", bytes_of(tensor)},
                       {"slices", tensor.slices.size()}});
  }
  return {{"path", reader.path().string()},
          {"library", index.library},
          {"step", index.step},
          {"strategy", index.strategy},
          {"world_size", index.world_size},
          {"files", index.files},
          {"tensors", tensors},
          {"state", {{"global", index.global_state}, {"ranks", index.rank_states}}}};
}

// Nothing may be written into a checkpoint, or over the name of the latest one.
void require_outputs(const CheckpointOptions& options, const CheckpointReader& reader) {
  namespace fs = std::filesystem;
  std::vector<fs::path> read{reader.path(), fs::path(options.path) / "latest"};
  for (const auto* output : {&options.output, &options.json}) {
    const auto folder = fs::path(*output).parent_path();
    std::error_code error;
    if (!output->empty() && *output != "-" && fs::exists(folder / "index.json", error)) read.push_back(folder);
  }
  require_not_read("OUTPUT", options.output, read);
  require_not_read("--json", options.json, read);
  require_two_files("OUTPUT", options.output, "--json", options.json);
  require_writable_file("--json", options.json);
}

int inspect(const CheckpointOptions& options) {
  const CheckpointReader reader(options.path, /*verify=*/false);
  require_outputs(options, reader);
  if (!options.json.empty()) write_json(options.json, to_json(reader));
  if (options.json == "-") return 0;
  const auto& index = reader.index();
  fmt::print("{}\n", reader.path().string());
  fmt::print("written by {}{}\n", printable(index.library),
             index.strategy.empty()
                 ? ""
                 : fmt::format(", {} at {} ranks, step {}", printable(index.strategy), index.world_size, index.step));
  std::map<std::string, std::pair<int64_t, int64_t>> parts;  // tensors, bytes
  fmt::print("\n{:<48}{:<12}{:<16}{:>14}{:>8}\n", "tensor", "part", "dtype", "MiB", "slices");
  for (const auto& [name, tensor] : index.tensors) {
    auto& [count, bytes] = parts[tensor.part];
    ++count;
    bytes += bytes_of(tensor);
    fmt::print("{:<48}{:<12}{:<16}{:>14.3f}{:>8}  [{}]\n", printable(name), tensor.part, c10::toString(tensor.dtype),
               static_cast<double>(bytes_of(tensor)) / mebibyte, tensor.slices.size(), fmt::join(tensor.shape, ", "));
  }
  fmt::print("\n");
  for (const auto& [part, sum] : parts) {
    fmt::print("{}: {} tensors, {:.3f} MiB\n", part, sum.first, static_cast<double>(sum.second) / mebibyte);
  }
  fmt::print("{} files\n", index.files.size());
  return 0;
}

int verify(const CheckpointOptions& options) {
  const CheckpointReader reader(options.path);
  require_outputs(options, reader);
  const auto verified = reader.verify();
  if (!options.json.empty()) {
    write_json(options.json, {{"path", reader.path().string()},
                              {"tensors", reader.index().tensors.size()},
                              {"bytes", verified.bytes},
                              {"unchecked_bytes", verified.unchecked},
                              {"unread_tensors", verified.unread}});
  }
  if (options.json == "-") return 0;
  fmt::print("{}: intact: {} tensors, {:.3f} MiB", reader.path().string(),
             static_cast<int64_t>(reader.index().tensors.size()) - verified.unread,
             static_cast<double>(verified.bytes) / mebibyte);
  if (verified.unchecked > 0) {
    fmt::print(", {:.3f} of them read, but without checksums to compare",
               static_cast<double>(verified.unchecked) / mebibyte);
  }
  if (verified.unread > 0) fmt::print("; {} more not read, as libtorch does not have their dtype", verified.unread);
  fmt::print("\n");
  return 0;
}

// A new folder of such a name would be taken for a file.
void require_known_file(const std::filesystem::path& output) {
  static const std::set<std::string> others{".pth", ".bin", ".ckpt", ".npz", ".onnx", ".h5", ".pkl"};
  auto extension = output.extension().string();
  std::transform(extension.begin(), extension.end(), extension.begin(),
                 [](unsigned char c) { return std::tolower(c); });
  std::error_code ignored;
  if (!others.contains(extension) || std::filesystem::is_directory(output, ignored)) return;
  throw UsageError(
      fmt::format("OUTPUT {}: give FILE.safetensors, FILE.pt for Python's torch.load, or a folder, which ends with / "
                  "if it has such a name",
                  output.string()));
}

void require_folder_for_parts(const CheckpointOptions& options) {
  const auto extension = std::filesystem::path(options.output).extension();
  if (!options.shard_gb || (extension != ".safetensors" && extension != ".pt")) return;
  throw UsageError(
      fmt::format("--shard-gb: OUTPUT {} is one file; give a folder, or leave --shard-gb out", options.output));
}

int export_model(const CheckpointOptions& options) {
  const std::filesystem::path output = options.output;
  const CheckpointReader reader(options.path);
  require_outputs(options, reader);
  if (output.extension() == ".safetensors") {
    export_file(reader, output, options.part);
  } else if (output.extension() == ".pt") {
    export_pt(reader, output, options.part);
  } else {
    export_folder(reader, output, static_cast<int64_t>(options.shard_gb.value_or(default_shard_gb) * 1e9),
                  options.part);
  }
  if (!options.json.empty()) {
    write_json(options.json, {{"path", reader.path().string()}, {"part", options.part}, {"output", options.output}});
  }
  if (options.json == "-") return 0;
  fmt::print("{} of {} exported to {}\n", options.part, reader.path().string(), options.output);
  return 0;
}

int reshard_checkpoint(const CheckpointOptions& options) {
  const CheckpointReader reader(options.path);
  require_outputs(options, reader);
  const auto path = reshard(reader, options.output, options.ranks);
  if (!options.json.empty()) {
    write_json(options.json, {{"path", reader.path().string()}, {"output", path.string()}, {"ranks", options.ranks}});
  }
  if (options.json == "-") return 0;
  fmt::print("{} written to {} in the files of {} ranks, and verified\n", reader.path().string(), path.string(),
             options.ranks);
  return 0;
}

}  // namespace

void add_checkpoint_command(CLI::App& app, Action& chosen) {
  auto* command = app.add_subcommand("checkpoint", "inspect, verify, export and reshard checkpoints");
  command->require_subcommand(1);
  const auto options = std::make_shared<CheckpointOptions>();
  const auto add = [&](const char* name, const char* about, int (*act)(const CheckpointOptions&)) {
    auto* sub = command->add_subcommand(name, about);
    sub->add_option("PATH", options->path,
                    "a checkpoint, a folder of checkpoints (the latest is used), a safetensors file, a .pt file, or a "
                    "Hugging Face folder")
        ->required();
    sub->add_option("--json", options->json, "write the result as JSON to this file; - is standard output");
    sub->callback([options, act, &chosen] {
      require_folder_for_parts(*options);
      chosen = [options, act] { return act(*options); };
    });
    return sub;
  };
  add("inspect", "tensors, shapes, files, state; reads no values", inspect);
  add("verify", "reads everything and compares checksums", verify);
  auto* exports = add("export", "whole tensors for other programs, as they read them", export_model);
  exports
      ->add_option_function<std::string>(
          "OUTPUT",
          [options](const std::string& output) {
            require_known_file(output);
            options->output = output;
          },
          "FILE.safetensors, FILE.pt for Python's torch.load, or a new folder in the layout of Hugging Face")
      ->required();
  exports->add_option("--part", options->part, "part of the checkpoint to export")->capture_default_str();
  exports
      ->add_option_function<double>(
          "--shard-gb",
          [options](double size) {
            if (!(size >= 1e-9 && size <= 1e9)) {  // nor what is no number
              throw UsageError(fmt::format("--shard-gb {}: give 1e-9 to 1e9", size));
            }
            options->shard_gb = size;
          },
          "maximum size of a file in an output folder, in units of 10^9 bytes")
      ->default_str(fmt::format("{}", default_shard_gb));
  auto* reshards =
      add("reshard", "the same tensors and state in the files of another number of ranks", reshard_checkpoint);
  reshards->add_option("OUTPUT", options->output, "a new folder of checkpoints")->required();
  reshards
      ->add_option_function<int64_t>(
          "--ranks",
          [options](int64_t ranks) {
            if (ranks < 1 || ranks > max_ranks) {
              throw UsageError(fmt::format("--ranks {}: give 1 to {}", ranks, max_ranks));
            }
            options->ranks = static_cast<int>(ranks);
          },
          "number of ranks whose files to write")
      ->required();
}

}  // namespace shoal::cli
