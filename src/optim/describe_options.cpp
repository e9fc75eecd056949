#include "optim/describe_options.h"

#include <torch/serialize.h>

#include <algorithm>
#include <sstream>

namespace shoal {

std::string describe_options(const torch::optim::OptimizerOptions& options) {
  torch::serialize::OutputArchive written;
  options.serialize(written);
  std::stringstream stream;
  written.save_to(stream);
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  auto keys = archive.keys();
  std::sort(keys.begin(), keys.end());
  std::ostringstream text;
  for (const auto& key : keys) {
    c10::IValue value;
    archive.read(key, value);
    text << (text.tellp() > 0 ? ", " : "") << key << " " << value;
  }
  return text.str();
}

}  // namespace shoal
