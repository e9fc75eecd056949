#pragma once
// Options and states of a sharded optimizer that the program has changed, and whether all ranks have the same.

#include <cstdint>
#include <string>
#include <vector>

#include "optim/param_groups.h"
#include "shoal/group.h"
#include "shoal/optimizer_state.h"

namespace shoal {

// One line per param group whose options are not as before, with what differs. Of options that neither libtorch nor
// shoal defines, learning rates are compared; those of other languages (OptionsOfType) are left to these.
std::vector<std::string> changed_options(const ParamGroups& before, const ParamGroups& now);

// Ranks that have the same options before a step and do not change them alike would update parts of the model in
// different ways. DisagreeError. Called by ranks with changed options; if some have none, the others' next collective
// is the error. Collective.
void agree_on_options(const Group& group, const std::string& optimizer, const std::vector<std::string>& changed);

// A number that stands for the options of all groups.
uint64_t digest_of(const ParamGroups& groups);

// A number that stands for the bits of a state.
uint64_t digest_of(const OptimizerState& state);

// The same for states that were loaded since the last step.
void agree_on_loaded_state(const Group& group, const std::string& optimizer, uint64_t digest);

}  // namespace shoal
