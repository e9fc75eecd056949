#pragma once
// Behaviour, and its view of the strategy that it runs under.

#include <torch/nn/modules/container/sequential.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "shoal/group.h"
#include "tests/conformance/trained.h"

namespace shoal::test {

struct Strategy;

// Part of the whole batch that a rank has.
struct Part {
  int number = 0;
  int of = 1;
};

// Values that are compared with one process.
struct Observation {
  std::string what;
  std::vector<at::Tensor> values;
};

// Error on a rank that did not refuse an action while another rank did.
struct RefusedElsewhere : std::runtime_error {
  RefusedElsewhere() : std::runtime_error("refused on another rank") {}
};

// Environment of a behaviour, which runs twice: in one process on the whole batch, and on ranks that divide the batch.
// Its observations must be equal.
class Bench {
 public:
  // expected: observations of one process; nullptr: this is the one process. parts: number of parts of the batch.
  Bench(const Strategy& strategy, const Group& group, std::filesystem::path folder, int parts,
        const std::vector<Observation>* expected);

  std::unique_ptr<Trained> wrap(std::shared_ptr<Network> model, const Setup& setup = {});
  std::unique_ptr<Trained> wrap(const torch::nn::Sequential& model, const Setup& setup = {});

  bool one_process() const { return expected_ == nullptr; }
  const Group& group() const { return group_; }
  Part part() const { return part_; }
  // Number of parts of a batch; also known to the one process, which has all of them.
  int parts() const { return parts_; }
  // Number of ranks with the same rows.
  int ranks_per_part() const { return one_process() ? 1 : group_.size() / part_.of; }
  // Whether this is the given rank; always true in one process.
  bool on(int rank) const { return one_process() || group_.rank() == rank % group_.size(); }
  // This rank's rows of a whole tensor.
  at::Tensor share(const at::Tensor& whole) const;
  // The rows of any part.
  at::Tensor share_of(const at::Tensor& whole, int number) const;
  // This rank's rows of a batch of 12; the same in every run.
  at::Tensor batch(int64_t step, int64_t columns = 6) const;
  // Folder that all ranks share; empty at the start of a behaviour. Not collective.
  const std::filesystem::path& folder() const { return folder_; }
  std::string file(const std::string& name) const { return folder_ / name; }
  // Waits for all ranks.
  void meet() const;
  // For actions that only some ranks may refuse: then all of them refuse, so that none waits for another.
  void together(const std::function<void()>& act) const;

  // Expects equality with one process within tolerance, relative to the largest element.
  void same(const std::string& what, const std::vector<at::Tensor>& values, double tolerance = 1e-9);
  void same(const std::string& what, const at::Tensor& value, double tolerance = 1e-9);
  void same(const std::string& what, double value, double tolerance = 1e-9);
  void same_parameters(const torch::nn::Module& module, double tolerance = 1e-9);
  // Fails with `what` if `right` is false.
  void check(bool right, const std::string& what);

  const std::vector<Observation>& observed() const { return observed_; }
  const std::vector<std::string>& differences() const { return differences_; }

 private:
  const Strategy& strategy_;
  Group group_;
  std::filesystem::path folder_;
  int parts_;
  const std::vector<Observation>* expected_;
  Part part_;
  std::vector<Observation> observed_;
  std::vector<std::string> differences_;
};

struct Behaviour {
  std::string name;
  std::function<void(Bench&)> body;
};

// Tensors with values in [0, 1) or normal ones, the same in every run.
at::Tensor rows(int64_t seed, at::IntArrayRef shape);
inline at::Tensor loss_of(const at::Tensor& output) {
  return output.pow(2).mean();
}
// Steps of zero_grad, forward, backward and step.
void train(Bench& bench, Trained& training, int64_t from, int64_t to);

}  // namespace shoal::test
