#pragma once
// Memory and communication of training per rank, by the published formulas (ZeRO, SC 2020; Megatron-LM's distributed
// optimizer). Plain arithmetic, without padding and buckets in flight; `shoal plan --model` counts those as well.

namespace shoal {

// What is divided by the number of ranks; each includes those before it.
enum class Sharded {
  nothing,     // DDP
  state,       // ZeRO-1, Megatron's distributed optimizer
  gradients,   // ZeRO-2
  parameters,  // ZeRO-3, FSDP
};

// Per parameter. Mixed precision with Adam: 2, 2, and 12 for main copy and two moments in float32.
struct ElementBytes {
  double parameter = 4;
  double gradient = 4;
  double state = 8;  // the float32 main copy included, where there is one
};

struct ModelBytes {
  double parameters = 0;
  double gradients = 0;
  double state = 0;
  double total() const { return parameters + gradients + state; }
};

// Of one rank. Throws UsageError for fewer than one rank and for numbers below zero.
ModelBytes bytes_per_rank(double parameters, const ElementBytes& bytes, Sharded sharded, int ranks);

// The least that a rank sends in a step: (ranks - 1) / ranks of what is reduced to, or comes back from, its owners.
// With Sharded::state gradients are all-reduced, as in ZeRO-1; Megatron's optimizer moves what Sharded::gradients does.
double bytes_sent_per_step(double parameters, const ElementBytes& bytes, Sharded sharded, int ranks);

}  // namespace shoal
