#pragma once
// Report of a change of the ranks, to people and programs.

#include <string>

#include "elastic/elastic_parts.h"
#include "elastic/global_batch.h"
#include "shoal/elastic.h"

namespace shoal {

// ElasticChange::taken_over. updated_before: elements that this rank updated.
std::string taken_over(const ElasticParts& parts, const GlobalBatch& batch, const World& world, int64_t updated_before);

// Notes the change in the flight recorder of the former group, passes it to on_change, or says it on standard error,
// and appends it to the metrics file. rank: of this process from now on; rank 0 speaks.
void report_change(const ElasticChange& change, const ElasticOptions& options, int rank, const Group& former);

}  // namespace shoal
