#pragma once
// Memory and communication per rank, by the published formulas (ZeRO, SC 2020; Megatron-LM's distributed optimizer).
// Ignores padding and buckets in flight; `shoal plan --model` includes those.

namespace shoal {

// Parts of the model state that are sharded; each value includes those before it.
enum class Sharded {
  nothing,     // DDP
  state,       // ZeRO-1, Megatron's distributed optimizer
  gradients,   // ZeRO-2
  parameters,  // ZeRO-3, FSDP
};

// Bytes per parameter. For mixed precision with Adam: 2, 2, and 12 for a float32 main copy and two moments.
struct ElementBytes {
  double parameter = 4;
  double gradient = 4;
  double state = 8;  // includes the float32 main copy, if there is one
};

struct ModelBytes {
  double parameters = 0;
  double gradients = 0;
  double state = 0;
  double total() const { return parameters + gradients + state; }
};

// Bytes of one rank. UsageError for less than one rank, and for negative numbers.
ModelBytes bytes_per_rank(double parameters, const ElementBytes& bytes, Sharded sharded, int ranks);

// Minimum that a rank sends in a step: (ranks - 1) / ranks of what is reduced to, or gathered from, the owners. With
// Sharded::state gradients are all-reduced, as in ZeRO-1; Megatron's optimizer sends as much as Sharded::gradients.
double bytes_sent_per_step(double parameters, const ElementBytes& bytes, Sharded sharded, int ranks);

}  // namespace shoal
