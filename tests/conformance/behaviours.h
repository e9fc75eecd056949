#pragma once
// Behaviours by theme: what training loops do without thinking. docs/your_loop.md names them.

#include "tests/conformance/bench.h"

namespace shoal::test {

using Behaviours = std::vector<Behaviour>;

Behaviours loading();      // tensors that are replaced or written under the wrapper
Behaviours zeroing();      // zero_grad in all its forms and places
Behaviours clipping();     // clipping, and gradients that are read and written
Behaviours editing();      // the same in loops of one's own, in several orders, of micro-batches
Behaviours step_orders();  // step, backward and forward in other orders
Behaviours evaluating();   // forwards without a backward, and reading parameters
Behaviours failing();      // exceptions, and going on
Behaviours freezing();     // requires_grad, shared, unused and sparse parameters
Behaviours autograd();     // what a loop asks of autograd beyond loss.backward()
Behaviours wrapping();     // when things are made and destroyed; what modules take and return
Behaviours surroundings();  // threads, modules that change, optimizers beside the strategy's
Behaviours saving();       // torch::save, state dicts, checkpoints
Behaviours programs_gans();
Behaviours programs_gradients();
Behaviours programs_sequences();
Behaviours programs_transfer();
Behaviours weighing();  // weights, Join, loss scales

// All of them.
const Behaviours& behaviours();

}  // namespace shoal::test
