#include "tests/conformance/bench.h"

#include <fmt/format.h>

#include <optional>

#include "shoal/error.h"
#include "tests/conformance/strategy.h"
#include "tests/support/models.h"

namespace shoal::test {

Bench::Bench(const Strategy& strategy, const Group& group, std::filesystem::path folder, int parts,
             const std::vector<Observation>* expected)
    : strategy_(strategy),
      group_(group),
      folder_(std::move(folder)),
      parts_(parts),
      expected_(expected),
      part_(strategy.part(group)) {}

std::unique_ptr<Trained> Bench::wrap(std::shared_ptr<Network> model, const Setup& setup) {
  return strategy_.wrap.network(std::move(model), setup, group_);
}

std::unique_ptr<Trained> Bench::wrap(const torch::nn::Sequential& model, const Setup& setup) {
  return strategy_.wrap.sequential(model.ptr(), setup, group_);
}

at::Tensor Bench::share(const at::Tensor& whole) const {
  return one_process() ? whole : share_of(whole, part_.number);
}

at::Tensor Bench::share_of(const at::Tensor& whole, int number) const {
  const int64_t length = whole.size(0) / parts_;
  return whole.narrow(0, number * length, length);
}

at::Tensor Bench::batch(int64_t step, int64_t columns) const {
  return share(rows(step, {12, columns}));
}

void Bench::meet() const {
  if (!one_process()) group_.barrier().wait();
}

void Bench::together(const std::function<void()>& act) const {
  if (one_process()) return act();
  std::exception_ptr refusal;
  try {
    act();
  } catch (const CommError&) {
    throw;
  } catch (const DisagreeError&) {  // on every rank, and the group is unusable
    throw;
  } catch (const std::exception&) {
    refusal = std::current_exception();
  }
  const auto refused = at::full({1}, refusal ? 1 : 0, at::kLong);
  group_.all_reduce(refused).wait();
  if (refusal) std::rethrow_exception(refusal);
  if (refused.item<int64_t>() > 0) throw RefusedElsewhere();
}

void Bench::same(const std::string& what, const std::vector<at::Tensor>& values, double tolerance) {
  Observation seen{what, {}};
  for (const auto& value : values) seen.values.push_back(value.defined() ? value.detach().clone() : value);
  const size_t place = observed_.size();
  observed_.push_back(std::move(seen));
  if (one_process()) return;
  if (place >= expected_->size()) return check(false, what + ": one process did not come here");
  const auto& wanted = (*expected_)[place];
  if (wanted.what != what) return check(false, fmt::format("{}: one process had {} here", what, wanted.what));
  const double worst = difference(observed_.back().values, wanted.values);
  check(worst <= tolerance, fmt::format("{} differs from one process by {}", what, worst));
}

void Bench::same(const std::string& what, const at::Tensor& value, double tolerance) {
  same(what, std::vector<at::Tensor>{value}, tolerance);
}

void Bench::same(const std::string& what, double value, double tolerance) {
  same(what, at::scalar_tensor(value, at::kDouble), tolerance);
}

void Bench::same_parameters(const torch::nn::Module& module, double tolerance) {
  std::vector<at::Tensor> values;
  for (const auto& entry : module.named_parameters()) values.push_back(entry.value().detach().clone());
  same(fmt::format("parameters (observation {})", observed_.size()), values, tolerance);
}

void Bench::check(bool right, const std::string& what) {
  if (!right) differences_.push_back(what);
}

at::Tensor rows(int64_t seed, at::IntArrayRef shape) {
  auto generator = at::detail::createCPUGenerator(7919 * (seed + 1));
  return at::randn(shape, generator, at::kDouble);
}

void train(Bench& bench, Trained& training, int64_t from, int64_t to) {
  for (int64_t step = from; step < to; ++step) {
    training.zero_grad();
    loss_of(training.forward(bench.batch(step))).backward();
    training.step();
  }
}

}  // namespace shoal::test
