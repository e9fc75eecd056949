#include "layout/model_bytes.h"

#include "shoal/error.h"

namespace shoal {
namespace {

void check(double parameters, const ElementBytes& bytes, int ranks) {
  if (ranks < 1) throw UsageError("model bytes: give at least 1 rank");
  // Also refuses NaN.
  if (parameters >= 0 && bytes.parameter >= 0 && bytes.gradient >= 0 && bytes.state >= 0) return;
  throw UsageError("model bytes: numbers of parameters and bytes must not be below zero");
}

}  // namespace

ModelBytes bytes_per_rank(double parameters, const ElementBytes& bytes, Sharded sharded, int ranks) {
  check(parameters, bytes, ranks);
  const auto part = [&](Sharded from) { return parameters / (sharded >= from ? ranks : 1); };
  return {.parameters = bytes.parameter * part(Sharded::parameters),
          .gradients = bytes.gradient * part(Sharded::gradients),
          .state = bytes.state * part(Sharded::state)};
}

double bytes_sent_per_step(double parameters, const ElementBytes& bytes, Sharded sharded, int ranks) {
  check(parameters, bytes, ranks);
  // An all-reduce is a reduce-scatter and an all-gather; sharded parameters are gathered for forward and backward.
  const double gradients = sharded <= Sharded::state ? 2 : 1;
  const double gathers = sharded == Sharded::nothing ? 0 : sharded == Sharded::parameters ? 2 : 1;
  return parameters * (ranks - 1) / ranks * (gradients * bytes.gradient + gathers * bytes.parameter);
}

}  // namespace shoal
