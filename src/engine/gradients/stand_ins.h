#pragma once
// Stand-ins of a model's gradients, each made on first use.

#include <memory>
#include <string>
#include <vector>

#include "engine/buckets/bucket_plan.h"
#include "engine/gradients/gradient_stand_in.h"

namespace shoal {

// Indexed by gradient. The destructor removes them from grad().
class StandIns {
 public:
  // The reference must outlive this object. about: follows the parameter's name in the error of an operator that takes
  // one.
  StandIns(const std::vector<Gradient>& gradients, std::string about);
  ~StandIns();
  StandIns(const StandIns&) = delete;
  StandIns& operator=(const StandIns&) = delete;

  // Puts a fresh stand-in into grad(). A parameter without elements gets an empty tensor.
  void put(size_t gradient);
  // Whether grad() holds its stand-in.
  bool present(size_t gradient) const;
  // Whether the last stand-in was zeroed, even if it is no longer in grad().
  bool zeroed(size_t gradient) const { return stand_ins_[gradient] && stand_ins_[gradient]->zeroed(); }
  void renew(size_t gradient) { stand_ins_[gradient]->renew(); }

 private:
  at::Tensor& mutable_grad(size_t gradient) { return at::Tensor(gradients_[gradient].parameter).mutable_grad(); }

  const std::vector<Gradient>& gradients_;
  std::string about_;
  std::vector<std::unique_ptr<GradientStandIn>> stand_ins_;
};

}  // namespace shoal
