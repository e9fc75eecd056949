#pragma once
// Error feedback of lossy hooks: the compression error of a gradient is added to the next one (Seide et al.,
// Interspeech 2014; Karimireddy et al., ICML 2019).

#include <string>

#include "shoal/hooks.h"

namespace shoal {

// Dtype in which lossy hooks compute: at least float32.
at::ScalarType wide(at::ScalarType dtype);

// A piece's elements of a flat tensor that is laid out like the piece's bucket.
at::Tensor piece_of(const at::Tensor& flat, const GradientPiece& piece);

// Residuals are stored by parameter, so that they survive a rebuild of the buckets. They belong to gradients that are
// already divided by the number of ranks.
class Residuals {
 public:
  // on: false keeps nothing.
  explicit Residuals(bool on) : on_(on) {}
  bool on() const { return on_; }
  // The bucket's gradients plus their residuals, in the dtype of wide(). Changes the bucket in place if its dtype is
  // wide already.
  at::Tensor add_to(const GradientBucket& bucket) const;
  // missing: in the piece's shape; this object takes it over. Values that are not finite are dropped, because they have
  // already broken their own step.
  void keep(const GradientPiece& piece, at::Tensor missing);
  // missing: laid out like the bucket.
  void keep_all(const GradientBucket& bucket, const at::Tensor& missing);
  void clear() { owed_.clear(); }

  // Saves residuals in a hook's state as "owed.NAME".
  void save(CommunicationHook::State& state) const;
  // Loads an entry of the state. False if it is not a residual.
  bool load(const std::string& name, const at::Tensor& value);

 private:
  bool on_;
  std::map<std::string, at::Tensor> owed_;
};

}  // namespace shoal
