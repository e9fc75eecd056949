#pragma once
// Stand-ins of a model's gradients, each made when it is first needed.

#include <memory>
#include <string>
#include <vector>

#include "engine/gradients/gradient_stand_in.h"
#include "engine/reducer/bucket_plan.h"

namespace shoal {

// By gradient. They leave grad() with this object.
class StandIns {
 public:
  // The reference stays. about: of an operator that takes one, after the parameter's name.
  StandIns(const std::vector<Gradient>& gradients, std::string about);
  ~StandIns();
  StandIns(const StandIns&) = delete;
  StandIns& operator=(const StandIns&) = delete;

  // grad() is one from now on, not zeroed. A parameter without elements gets an empty tensor.
  void put(size_t gradient);
  // Whether grad() is one.
  bool present(size_t gradient) const;
  // Whether the last one has been zeroed since, also where it is not in grad() any more.
  bool zeroed(size_t gradient) const { return stand_ins_[gradient] && stand_ins_[gradient]->zeroed(); }
  void renew(size_t gradient) { stand_ins_[gradient]->renew(); }

 private:
  at::Tensor& mutable_grad(size_t gradient) { return at::Tensor(gradients_[gradient].parameter).mutable_grad(); }

  const std::vector<Gradient>& gradients_;
  std::string about_;
  std::vector<std::unique_ptr<GradientStandIn>> stand_ins_;
};

}  // namespace shoal
