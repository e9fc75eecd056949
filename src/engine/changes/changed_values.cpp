#include "engine/changes/changed_values.h"

#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "shoal/group.h"

namespace shoal {
namespace {

constexpr uint64_t factor = 0x9e3779b97f4a7c15U;

uint64_t add(uint64_t hash, uint64_t word) {
  return std::rotl((hash ^ word) * factor, 29);
}

// In four independent chains, as fast as memory.
uint64_t digest_of_bytes(const uint8_t* bytes, size_t size) {
  constexpr size_t lanes = 4;
  uint64_t hashes[lanes] = {1, 2, 3, 4};
  uint64_t words[lanes];
  size_t at = 0;
  for (; at + sizeof(words) <= size; at += sizeof(words)) {
    std::memcpy(words, bytes + at, sizeof(words));
    for (size_t lane = 0; lane < lanes; ++lane) hashes[lane] = add(hashes[lane], words[lane]);
  }
  uint64_t hash = size;
  for (const auto lane : hashes) hash = add(hash, lane);
  for (; at < size; ++at) hash = add(hash, bytes[at]);
  return hash;
}

}  // namespace

uint64_t digest_of(const at::Tensor& tensor) {
  const torch::NoGradGuard no_grad;
  const auto dense = tensor.detach().cpu().contiguous();
  const auto hash =
      dense.numel() == 0 ? 0 : digest_of_bytes(static_cast<const uint8_t*>(dense.data_ptr()), dense.nbytes());
  return add(hash, static_cast<uint64_t>(dense.scalar_type()));
}

void agree_on_values(const Group& group, const std::vector<ChangedValue>& values) {
  std::vector<std::string> lines;
  for (const auto& value : values) {
    const auto* advice =
        value.frozen ? " (frozen: if each rank writes its own values, name it in ignored, or FSDP's ignored_parameters)"
                     : "";
    lines.push_back(fmt::format("parameter {}{} with values of digest {:016x}", value.name, advice, value.digest));
  }
  agree_as("agreement on values of parameters that were loaded or written; elsewhere not, or as they were", group,
           "values of parameters that were loaded or written (do the same on every rank)", lines);
}

void agree_as(const std::string& call, const Group& group, const std::string& subject,
              const std::vector<std::string>& items) {
  auto hash = static_cast<uint64_t>(items.size());
  for (const auto& item : items) {
    hash = add(hash, digest_of_bytes(reinterpret_cast<const uint8_t*>(item.data()), item.size()));
  }
  const auto all = at::empty({group.size()}, at::kLong);  // a transport keeps it if this fails
  group.all_gather(all, at::full({1}, static_cast<int64_t>(hash), at::kLong), {-1, -1, call}).wait();
  const auto* hashes = all.const_data_ptr<int64_t>();
  if (std::any_of(hashes, hashes + all.numel(), [&](int64_t one) { return one != hashes[0]; })) {
    agree(group, subject, items);
  }
}

}  // namespace shoal
