#pragma once
// Error feedback of lossy hooks: the compression error of a gradient is added to the next one (Seide et al.,
// Interspeech 2014; Karimireddy et al., ICML 2019).

#include <string>

#include "shoal/hooks.h"

namespace shoal {

// Lossy hooks compute at least in float32.
at::ScalarType wide(at::ScalarType dtype);

// A piece's elements of memory that is laid out like its bucket.
at::Tensor piece_of(const at::Tensor& flat, const GradientPiece& piece);

// By parameter, so that it outlives a new assignment to buckets. Gradients are divided by the number of ranks, and so
// is what is left of them.
class Residuals {
 public:
  // Without `on`, nothing is kept.
  explicit Residuals(bool on) : on_(on) {}
  bool on() const { return on_; }
  // The bucket's gradients and what is owed to them, wide; in the bucket's memory where its dtype is.
  at::Tensor add_to(const GradientBucket& bucket) const;
  // missing: in the piece's shape; owned from now on. What is not finite is dropped: it has spoilt its own step.
  void keep(const GradientPiece& piece, at::Tensor missing);
  // missing: laid out like the bucket.
  void keep_all(const GradientBucket& bucket, const at::Tensor& missing);
  void clear() { owed_.clear(); }

  // In a hook's state as "owed.NAME".
  void save(CommunicationHook::State& state) const;
  // Whether the entry was one of these.
  bool load(const std::string& name, const at::Tensor& value);

 private:
  bool on_;
  std::map<std::string, at::Tensor> owed_;
};

}  // namespace shoal
