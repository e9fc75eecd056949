#include "engine/changes/noticed_writes.h"

#include "engine/changes/changed_values.h"

namespace shoal {

void NoticedWrites::note(size_t parameter, const at::Tensor& home) {
  if (!digests_[parameter]) digests_[parameter] = digest_of(home);
  any_ = true;
}

std::vector<size_t> NoticedWrites::forget_undone(const std::vector<at::Tensor>& homes,
                                                 const std::function<bool(size_t)>& in_place) {
  std::vector<size_t> undone;
  bool any = false;
  for (size_t parameter = 0; parameter < digests_.size(); ++parameter) {
    auto& digest = digests_[parameter];
    if (!digest) continue;
    if (in_place(parameter) && digest_of(homes[parameter]) == *digest) {
      digest.reset();
      undone.push_back(parameter);
    } else {
      any = true;
    }
  }
  any_ = any;
  return undone;
}

void NoticedWrites::forget_all() {
  digests_.assign(digests_.size(), std::nullopt);
  any_ = false;
}

}  // namespace shoal
