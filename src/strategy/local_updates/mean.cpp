#include "strategy/local_updates/mean.h"

#include <map>
#include <string>

#include "memory/views.h"

namespace shoal {

Mean::Mean(const Group& group, const std::vector<at::Tensor>& likes, const std::vector<at::ScalarType>& dtypes,
           const std::function<void(size_t, at::Tensor&)>& write, const Label& label)
    : values_(likes.size()) {
  std::map<std::pair<at::ScalarType, std::string>, std::vector<size_t>> messages;
  for (size_t i = 0; i < likes.size(); ++i) messages[{dtypes[i], likes[i].device().str()}].push_back(i);
  for (const auto& [kind, members] : messages) {
    int64_t numel = 0;
    for (const auto member : members) numel += likes[member].numel();
    const auto options = likes[members.front()].options().dtype(kind.first).requires_grad(false);
    const auto flat = group.allocate(numel, options);
    int64_t offset = 0;
    for (const auto member : members) {
      values_[member] = view_like(flat, offset, likes[member]);
      write(member, values_[member]);
      offset += likes[member].numel();
    }
    if (numel > 0) works_.push_back(group.all_reduce(flat, ReduceOp::avg, label));
  }
}

const std::vector<at::Tensor>& Mean::wait() {
  for (auto& work : works_) work.wait();
  works_.clear();
  return values_;
}

}  // namespace shoal
