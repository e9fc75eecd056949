#include "strategy/megatron/chunk_turns.h"

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <utility>

namespace shoal {
namespace {

int64_t turns(const ShardedChunks& chunks, size_t number) {
  return chunks[number]->reducer().step();
}

// Of the chunk that has had most, the last one.
int64_t most_turns(const ShardedChunks& chunks) {
  return turns(chunks, chunks.size() - 1);
}

void finish(Reducer& reducer) {
  reducer.running() ? reducer.end_now() : reduce_local(reducer);
}

void give_up(Reducer& reducer) {
  reducer.expect_backward();
  reducer.mark_failed();
  reducer.abandon();
}

}  // namespace

bool is_turn_of(const ShardedChunks& chunks, size_t number) {
  const auto own = turns(chunks, number);
  for (size_t other = 0; other < chunks.size(); ++other) {
    if (other < number && turns(chunks, other) < own) return false;
    if (other > number && turns(chunks, other) <= own) return false;
  }
  return true;
}

void finish_before(const ShardedChunks& chunks, size_t number) {
  const auto own = turns(chunks, number);
  for (size_t other = number; other-- > 0;) {
    if (turns(chunks, other) < own) finish(chunks[other]->reducer());
  }
  for (size_t other = chunks.size(); --other > number;) {
    if (turns(chunks, other) <= own) finish(chunks[other]->reducer());
  }
}

void finish_round(const ShardedChunks& chunks) {
  for (size_t number = chunks.size(); number-- > 0;) {
    if (turns(chunks, number) < most_turns(chunks)) finish(chunks[number]->reducer());
  }
}

void abandon_round(const ShardedChunks& chunks) {
  if (turns(chunks, 0) == most_turns(chunks)) give_up(chunks.back()->reducer());
  abandon_behind(chunks);
}

void abandon_behind(const ShardedChunks& chunks) {
  for (size_t number = chunks.size(); number-- > 0;) {
    if (turns(chunks, number) < most_turns(chunks)) give_up(chunks[number]->reducer());
  }
}

void reduce_local(Reducer& reducer) {
  const auto usual = std::exchange(reducer.callbacks.synchronises, [] { return true; });
  const auto restore = c10::make_scope_exit([&] { reducer.callbacks.synchronises = usual; });
  reducer.reduce_now();
}

}  // namespace shoal
