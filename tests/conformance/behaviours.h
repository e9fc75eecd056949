#pragma once
// Behaviours by theme: what training loops do without thinking. docs/your_loop.md names them.

#include "tests/conformance/bench.h"

namespace shoal::test {

using Behaviours = std::vector<Behaviour>;

Behaviours loading();       // tensors that are replaced or written under the wrapper
Behaviours zeroing();       // zero_grad in all its forms and places
Behaviours clipping();      // clipping, and gradients that a loop reads or writes
Behaviours editing();       // the same in custom loops, in several orders, of micro-batches
Behaviours step_orders();   // step, backward and forward in other orders
Behaviours evaluating();    // forwards without a backward, and reads of parameters
Behaviours failing();       // exceptions, and training on after them
Behaviours freezing();      // requires_grad, shared, unused and sparse parameters
Behaviours autograd();      // uses of autograd beyond loss.backward()
Behaviours wrapping();      // construction and destruction; inputs and outputs of modules
Behaviours surroundings();  // threads, modules that change, optimizers beside the strategy's
Behaviours saving();        // torch::save, state dicts, checkpoints
Behaviours keeping();       // tensors of the program on the memory of gradients and parameters
Behaviours programs_gans();
Behaviours programs_gradients();
Behaviours programs_sequences();
Behaviours programs_transfer();
Behaviours weighing();     // weights, Join, loss scales
Behaviours recomputing();  // activation checkpoints with a backward of their own

// All behaviours.
const Behaviours& behaviours();

// Trains under a Join: part n has n + 2 batches; parts without a batch contribute zero.
void train_joined(Bench& bench, const std::shared_ptr<Network>& model);

}  // namespace shoal::test
