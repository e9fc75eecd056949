// Work of `shoal train` between steps and at the end: evaluations and checkpoints.

#include <fmt/format.h>

#include <cerrno>
#include <optional>

#include "base/print_to_stderr.h"
#include "cli/exit_code.h"
#include "cli/train/exchanges.h"
#include "cli/train/loop.h"
#include "shoal/error.h"
#include "training/common_values.h"

namespace shoal::cli {

// A full disk does not end the training: earlier checkpoints still exist. Nor does the end of a rank, if the others go
// on without it.
void Trainer::tolerate(const std::function<void()>& saving) {
  const auto say = [&](const Error& error) {
    if (leads()) print_to_stderr("shoal: {}; training continues\n", error.what());
  };
  try {
    saving();
  } catch (const CheckpointError& error) {
    say(error);
  } catch (const CommError& error) {
    if (in_step()) throw;
    say(error);
  }
}

void Trainer::save_end(int64_t steps, TrainResult& result) {
  if (options_.save.empty() || !checkpoints_.has_state()) return;
  try {
    together([&](const Group&) {
      checkpoints_.save(steps);
      if (result.stopped) checkpoints_.wait();  // older checkpoints are removed by now, and the folder is free
    });
    result.checkpoint = fmt::format("{}/step-{}", options_.save, steps);
    if (result.stopped) result.kept_latest = checkpoints_.keep_earlier_latest(steps, leads());
  } catch (const CommError& error) {
    if (in_step()) throw;
    if (leads()) print_to_stderr("shoal: no checkpoint of the end: {}\n", error.what());
  }
}

Evaluation Trainer::evaluated(const Group& present, TrainResult& result) {
  result.figures = exchange_figures(*strategy_);
  const auto whole = strategy_->full_parameters();
  // Batch norms' running means are evaluated as they are saved, with rank 0's values. Ranks that train independently
  // evaluate their own models.
  std::optional<CommonValues> buffers;
  if (strategy_->strategy().synchronization != Synchronization::independent) {
    buffers.emplace(CommonValues::Of::first_rank, model_->buffers(), present);
  }
  return evaluate(*model_, *feed_.test_data(), present, options_.precision());
}

// After loop.number steps.
void Trainer::tell_evaluation(Loop& loop, const Evaluation& evaluation, TrainResult& result) {
  result.eval.push_back(evaluation);
  loop.log.clear_progress();
  const auto last = loop.number - 1;
  if (leads() && options_.json != "-") {
    const auto per_epoch = feed_.steps_per_epoch();
    const auto text = evaluation_text((per_epoch ? last / *per_epoch : 0) + 1, result);
    if (!write_to_stdout(text + "\n") && errno == EPIPE && heeds_readers_) {
      unread_ = true;
      if (loop.number < total_steps()) print_to_stderr("shoal: nobody reads the output any more: training stops\n");
    }
  }
  loop.log.report(leads());
  loop.log.evaluation(last, result);
}

// As a launcher tells all ranks to stop whose output nobody reads any more.
bool Trainer::is_unread() {
  meeting_->together([&](const Group& present) {
    const auto anywhere = at::full({1}, unread_ ? 1 : 0, at::kInt);
    present.all_reduce(anywhere, ReduceOp::max, {-1, -1, "whether the output is read"}).wait();
    unread_ = anywhere.item<int>() != 0;
  });
  return unread_;
}

}  // namespace shoal::cli
