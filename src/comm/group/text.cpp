#include "comm/group/text.h"

#include <algorithm>
#include <cstring>

namespace shoal {
namespace {

std::vector<int64_t> all_gather_number(const Group& group, int64_t own, const Label& label) {
  auto all = at::empty({group.size()}, at::kLong);
  group.all_gather(all, at::full({1}, own, at::kLong), label).wait();
  return {all.data_ptr<int64_t>(), all.data_ptr<int64_t>() + group.size()};
}

// Padded, because operations move equal numbers of bytes per rank.
at::Tensor padded(const std::string& text, int64_t size) {
  auto bytes = at::zeros({size}, at::kByte);
  std::memcpy(bytes.data_ptr(), text.data(), text.size());
  return bytes;
}

int64_t longest(const std::vector<int64_t>& lengths) {
  return *std::max_element(lengths.begin(), lengths.end());
}

std::string text_of(const at::Tensor& bytes, int64_t length) {
  return {reinterpret_cast<const char*>(bytes.data_ptr<uint8_t>()), static_cast<size_t>(length)};
}

}  // namespace

std::vector<std::string> all_gather_text(const Group& group, const std::string& text, const Label& label) {
  const auto lengths = all_gather_number(group, static_cast<int64_t>(text.size()), label);
  const auto size = longest(lengths);
  if (size == 0) return std::vector<std::string>(lengths.size());
  auto all = at::empty({size * group.size()}, at::kByte);
  group.all_gather(all, padded(text, size), label).wait();
  std::vector<std::string> texts;
  for (int rank = 0; rank < group.size(); ++rank) {
    texts.push_back(text_of(all.narrow(0, rank * size, size), lengths[rank]));
  }
  return texts;
}

std::vector<std::string> gather_text(const Group& group, const std::string& text, int root, const Label& label) {
  const auto lengths = all_gather_number(group, static_cast<int64_t>(text.size()), label);
  const auto size = longest(lengths);
  const bool is_root = group.rank() == root;
  if (size == 0) return std::vector<std::string>(is_root ? lengths.size() : 0);
  std::vector<at::Tensor> parts;
  if (is_root) {
    for (int rank = 0; rank < group.size(); ++rank) parts.push_back(at::empty({size}, at::kByte));
  }
  group.gather(parts, padded(text, size), root, label).wait();
  std::vector<std::string> texts;
  for (size_t rank = 0; rank < parts.size(); ++rank) texts.push_back(text_of(parts[rank], lengths[rank]));
  return texts;
}

std::string broadcast_text(const Group& group, const std::string& text, int root, const Label& label) {
  auto length = at::full({1}, static_cast<int64_t>(text.size()), at::kLong);
  group.broadcast(length, root, label).wait();
  const auto size = length.item<int64_t>();
  if (size == 0) return {};
  auto bytes = group.rank() == root ? padded(text, size) : at::empty({size}, at::kByte);
  group.broadcast(bytes, root, label).wait();
  return text_of(bytes, size);
}

}  // namespace shoal
