#pragma once
// Parameters that the program has written in place, without those that it has put back since.

#include <torch/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace shoal {

// Keeps a digest of each parameter's values from before its first write. Thread-safe are any() and notices() alone: the
// owner locks around the others.
class NoticedWrites {
 public:
  explicit NoticedWrites(size_t parameters) : digests_(parameters) {}

  // While off, writes are not noticed.
  void notice(bool on) { notices_ = on; }
  bool notices() const { return notices_; }
  bool any() const { return any_; }
  bool contains(size_t parameter) const { return digests_[parameter].has_value(); }

  // Call before the parameter, which lies in `home`, is written.
  void note(size_t parameter, const at::Tensor& home);
  // Forgets writes after which a parameter has the values from before them, to the bit, in its home and `in_place`;
  // returns these parameters.
  std::vector<size_t> forget_undone(const std::vector<at::Tensor>& homes,
                                    const std::function<bool(size_t parameter)>& in_place);
  void forget_all();

 private:
  std::atomic<bool> notices_ = true;
  std::atomic<bool> any_ = false;
  std::vector<std::optional<uint64_t>> digests_;
};

}  // namespace shoal
