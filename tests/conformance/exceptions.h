#pragma once
// Intended differences between strategies and one process, by strategy.

#include <string>
#include <vector>

#include "tests/conformance/strategy.h"

namespace shoal::test {

Exceptions operator+(Exceptions a, const Exceptions& b);
Exceptions all(const std::vector<std::string>& behaviours, const Exception& exception);

// What several strategies have in common.
const Exceptions& of_wrapped();
const Exceptions& of_all();
const Exceptions& of_sole_wrappers();
const std::vector<std::string>& gradients_read();
Exceptions of_gathered(Exception::Where where);

const Exceptions& of_ddp();
const Exceptions& of_zero1();
const Exceptions& of_zero2();
const Exceptions& of_megatron();
const Exceptions& of_megatron_in_grads();
const Exceptions& of_megatron_late_gather();
const Exceptions& of_megatron_no_overlap();
const Exceptions& of_fsdp();
const Exceptions& of_shard_gossip();
const Exceptions& of_decentralized();
const Exceptions& of_local_sgd();
const Exceptions& of_diloco();

}  // namespace shoal::test
