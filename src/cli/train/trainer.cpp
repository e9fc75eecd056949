#include "cli/train/trainer.h"

#include <fmt/format.h>

#include <utility>

#include "base/print_to_stderr.h"
#include "cli/exit_code.h"
#include "cli/strategies/optimizers.h"
#include "cli/strategies/schedules.h"
#include "cli/train/earlier_run.h"
#include "cli/train/exchanges.h"
#include "cli/train/loop.h"
#include "cli/train/report.h"
#include "models/loss.h"
#include "planning/measured_step.h"
#include "shoal/detail/clock.h"
#include "shoal/error.h"
#include "shoal/telemetry.h"

namespace shoal::cli {

volatile std::sig_atomic_t interrupted = 0;

namespace {

// Adds the schedule, for strategies that step their optimizers themselves.
TrainingOptions with_schedule(const TrainOptions& options, int64_t total_steps) {
  auto training = options.training_options();
  if (options.schedule == "constant" || !find_strategy(options.strategy).takes_schedule) return training;
  training.schedule = [&options, total_steps](torch::optim::Optimizer& optimizer) {
    return std::unique_ptr<torch::optim::LRScheduler>(make_schedule(options, optimizer, total_steps));
  };
  return training;
}

std::vector<double> rates_of(const torch::optim::Optimizer& optimizer) {
  std::vector<double> rates;
  for (const auto& group : optimizer.param_groups()) rates.push_back(group.options().get_lr());
  return rates;
}

}  // namespace

Trainer::Trainer(const TrainOptions& options, const World& world, std::shared_ptr<models::Model> model, Feed& feed,
                 bool heeds_readers)
    : options_(options.under(options.strategy)),
      all_options_(options),
      course_(options.course()),
      world_(world),
      group_(world.group()),
      model_(std::move(model)),
      feed_(feed),
      heeds_readers_(heeds_readers),
      strategy_(
          make_training(options.strategy, model_, recipe_of(options_), group_, with_schedule(options_, total_steps()))),
      meeting_(std::in_place, *strategy_, group_),
      base_rates_(rates_of(strategy_->optimizer())),
      schedule_(make_schedule(options_, strategy_->optimizer(), total_steps())) {
  if (course_.back().first >= total_steps()) {
    throw UsageError(fmt::format("--replan {}: training ends after step {}", options.replan, total_steps()));
  }
  take_state();
  schedule_steps_ = total_steps();
  started_ = group_.size();
}

void Trainer::together(const std::function<void(const Group& present)>& work) {
  if (!elastic_) return meeting_->together(work);
  elastic_->together([&] { work(group_); });
}

void Trainer::take_state() {
  checkpoints_.take_state(*strategy_, schedule_.get());
}

std::optional<nlohmann::ordered_json> Trainer::replan(int64_t number) {
  std::string due = options_.strategy;
  for (const auto& [step, name] : course_) {
    if (step <= number) due = name;
  }
  if (due == options_.strategy) return std::nullopt;
  bytes_.count();
  checkpoints_.leave_state();
  meeting_.reset();
  const auto before = options_.strategy;
  options_ = all_options_.under(due);
  const auto done = strategy_.replan(due, with_schedule(options_, total_steps()), recipe_of(options_));
  if (schedule_) schedule_ = schedule_->on(strategy_->optimizer());
  meeting_.emplace(*strategy_, group_);
  take_state();
  bytes_.begin();
  const auto text = fmt::format("{} -> {} in {:.3f} s, {:.1f} MiB received", before, due, done.seconds,
                                static_cast<double>(done.bytes) / (1 << 20));
  return nlohmann::ordered_json{{"step", number},
                                {"event", text},
                                {"replan", due},
                                {"from", before},
                                {"replan_seconds", done.seconds},
                                {"replan_bytes", done.bytes}};
}

int64_t Trainer::total_steps() const {
  return options_.steps ? *options_.steps : *feed_.steps_per_epoch() * *options_.epochs;
}

std::optional<double> Trainer::step(int64_t number, TrainResult& result) {
  if (elastic_) return elastic_step(number, result);
  const auto precision = options_.precision();
  TrainedStep step;
  const auto loss = [&](int micro) {
    const auto batch = feed_.next(number, micro);
    step.samples += batch.data.size(0);
    const TimedScope scope(timeline_of(group_), "forward", number);
    return models::loss_of(strategy_.forward(precision.input(batch.data)), batch.target);
  };
  step.measured = measured_step(*strategy_, number, options_.accumulate, loss, /*gradients=*/result.loss.empty());
  step.all_samples = step.samples * group_.size();  // the sampler gives every rank equally many
  result.add(step);
  return step.measured.loss;
}

// Ranks that need each other to save must end with the same step; one that is interrupted while they agree ends with
// the next.
bool Trainer::is_interrupted(int64_t number) const {
  const bool alone = in_step() ? has_whole_model() && !checkpoints_.has_state() : !strategy_->lockstep_group();
  if (alone) return interrupted != 0;
  auto anywhere = at::full({1}, interrupted != 0 ? 1 : 0, at::kInt);
  strategy_->lockstep_group().value_or(group_).all_reduce(anywhere, ReduceOp::max, {number, -1, "interrupted"}).wait();
  return anywhere.item<int>() != 0;
}

void Trainer::begin_epoch(int64_t number, int64_t first) {
  const auto per_epoch = feed_.steps_per_epoch();
  const int64_t epoch = per_epoch ? number / *per_epoch : 0;
  const int64_t done = per_epoch ? number % *per_epoch : number;
  if (done != 0 && number != first) return;
  feed_.begin_epoch(epoch);
  feed_.skip(done);
}

bool Trainer::evaluates(int64_t steps) const {
  const auto per_epoch = feed_.steps_per_epoch();
  return options_.eval && ((per_epoch && steps % *per_epoch == 0) || steps >= total_steps());
}

bool Trainer::train_step(Loop& loop, TrainResult& result) {
  const auto number = loop.number;
  if (elastic_) position_.copy_(at::tensor({number, loop.per_epoch, schedule_steps_, int64_t{started_}}, at::kLong));
  elastic_ ? begin_epoch(loop) : begin_epoch(number, loop.first);
  feed_.prepare(number);
  const auto before_step = process_counters();
  const auto start = Clock::now();
  const auto lr = strategy_->optimizer().param_groups().front().options().get_lr();
  const auto loss = step(number, result);
  if (!loss) return false;
  result.lr.push_back(lr);
  result.loss.push_back(*loss);
  if (schedule_ && elastic_) {
    // By the part of the training that is done, because fewer ranks make more steps of an epoch.
    schedule_->set_position((number + 1) * schedule_steps_ / total_steps());
  } else if (schedule_) {
    schedule_->step();
  }
  const std::chrono::duration<double> duration = Clock::now() - start;
  result.seconds += duration.count();
  result.step_ms.push_back(1e3 * duration.count());
  result.counted.push_back(process_counters() - before_step);
  loop.log.report(leads());
  loop.log.step(number, result, *strategy_, is_sampled(loop.under_strategy));
  ++loop.number;
  ++loop.under_strategy;
  return true;
}

void Trainer::train(Loop& loop, TrainResult& result) {
  const int64_t total = total_steps();
  while (loop.number < total && !result.stopped) {
    const auto number = loop.number;
    // Ranks that can go on without each other still make the first step together.
    const bool stops = is_interrupted(number) && (in_step() || number > loop.first);
    if (meeting_->meet(number, /*due=*/false, stops) == Meeting::Outcome::stop) {
      result.stopped = true;
      break;
    }
    if (const auto line = replan(number)) {
      result.replans.push_back(*line);
      loop.under_strategy = 0;
      loop.log.clear_progress();
      loop.log.change(fmt::format("step {}: {}", number, (*line)["event"].get<std::string>()), *line);
    }
    train_step(loop, result);
    const bool ends = loop.number == total;
    const bool saves = checkpoints_.is_due(loop.number) && !ends;
    if (!evaluates(loop.number) && !saves && !ends) continue;
    const auto outcome = meeting_->meet(loop.number, /*due=*/true, !in_step() && interrupted != 0);
    result.stopped = outcome == Meeting::Outcome::stop && !ends;
    if (outcome == Meeting::Outcome::go_on || result.stopped) continue;
    if (evaluates(loop.number)) {
      Evaluation evaluation;
      meeting_->together(
          [&](const Group& present) { bytes_.between(present, [&] { evaluation = evaluated(present, result); }); });
      tell_evaluation(loop, evaluation, result);
      result.unread = is_unread() && !ends;
      result.stopped = result.unread;
    }
    if (!saves || result.stopped) continue;
    loop.log.clear_progress();
    tolerate([&] { meeting_->together([&](const Group&) { checkpoints_.wait(); }); });  // the last one may have failed
    tolerate([&] {
      meeting_->together([&](const Group& present) {
        bytes_.between(present, [&] { checkpoints_.save_in_background(loop.number); });
      });
    });
  }
}

TrainResult Trainer::run() {
  TrainResult result;
  const bool joins = world_.joining();
  const int64_t first = joins ? 0 : checkpoints_.resume(total_steps(), schedule_.get(), /*says=*/group_.rank() == 0);
  const bool reports = group_.rank() == 0 && !joins;
  if (first >= total_steps()) {
    result.done_before = true;
    return result;
  }
  const bool anew = !joins && (options_.resume.empty() || options_.partial);
  if (anew) checkpoints_.begin_anew();
  if (reports && first == 0 && !options_.save.empty() && latest_step(options_.save)) {
    print_to_stderr(
        "--save {}: replaces checkpoints of an earlier run at the same steps; --resume latest goes on from it\n",
        options_.save);
  }
  if (reports) remove_report(options_.json);  // a run that is interrupted writes none
  // Before ranks may end, so that one that takes over finds no lines of a former run.
  Metrics metrics(options_.metrics, first > 0 || joins ? Metrics::Start::behind : Metrics::Start::anew, reports);
  const auto per_epoch = feed_.steps_per_epoch().value_or(0);
  // The rest of a resumed epoch stays, also if a rank ends before the first step.
  if (options_.elastic && per_epoch > 0 && !joins) feed_.prepare_epoch(first / per_epoch, first % per_epoch);
  make_elastic();
  const auto samples = static_cast<double>(options_.batch * options_.accumulate * group_.size());
  Loop loop{.first = first,
            .number = first,
            .log = TrainLog(std::move(metrics), total_steps() - first, samples, reports),
            .per_epoch = per_epoch};
  if (joins) join(loop, result);
  bytes_.begin();
  elastic_ ? train_elastic(loop, result) : train(loop, result);
  bytes_.count();
  result.wire_bytes = bytes_.counted();
  if (checkpoints_.has_state()) {
    tolerate([&] { together([&](const Group&) { checkpoints_.wait(); }); });
  }
  if (result.stopped) interrupted = 1;  // also if only a peer was interrupted
  result.params_mib = mebibytes(strategy_->parameters());
  result.state_mib = state_mib(*strategy_, *model_);
  if (!result.stopped) together([&](const Group&) { result.figures = exchange_figures(*strategy_); });
  result.logging = strategy_->logging_data();
  save_end(loop.number, result);
  loop.log.tell_fault();
  if (elastic_) tell_changes(loop, result);
  return result;
}

}  // namespace shoal::cli
