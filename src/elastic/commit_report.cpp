#include "elastic/commit_report.h"

namespace shoal {

CommitReport CommitReport::of_all(const Group& group, const Label& label) const {
  std::vector<double> row{map ? 1.0 : 0.0, earlier_gradients ? 1.0 : 0.0, join_requested ? 1.0 : 0.0};
  for (const auto& number : {samples, steps, pass, epoch}) {
    row.insert(row.end(), {number.most, number.minus_least});
  }
  for (const auto* list : {&dropped, &compared}) row.insert(row.end(), list->begin(), list->end());
  const auto most = group.all_reduce(row, ReduceOp::max, label);
  auto next = most.begin();
  auto all = *this;
  for (auto* flag : {&all.map, &all.earlier_gradients, &all.join_requested}) *flag = *next++ != 0;
  for (auto* number : {&all.samples, &all.steps, &all.pass, &all.epoch}) {
    number->most = *next++;
    number->minus_least = *next++;
  }
  for (auto* list : {&all.dropped, &all.compared}) {
    for (auto& value : *list) value = *next++;
  }
  return all;
}

}  // namespace shoal
