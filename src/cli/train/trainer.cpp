#include "cli/train/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <utility>

#include "base/print_to_stderr.h"
#include "base/printable.h"
#include "cli/exit_code.h"
#include "cli/strategies/optimizers.h"
#include "cli/strategies/schedules.h"
#include "cli/train/earlier_run.h"
#include "cli/train/exchanges.h"
#include "cli/train/loop.h"
#include "cli/train/report.h"
#include "models/loss.h"
#include "planning/bytes_over_tcp.h"
#include "planning/measured_step.h"
#include "shoal/error.h"
#include "shoal/telemetry.h"
#include "training/common_values.h"

namespace shoal::cli {

using Clock = std::chrono::steady_clock;

volatile std::sig_atomic_t interrupted = 0;

namespace {

// Keys in the position of a checkpoint.
constexpr const char* steps_per_epoch = "steps_per_epoch";
constexpr const char* seed_of_order = "seed";
constexpr const char* samples_of_data = "samples";

// Adds the schedule, for strategies that step their optimizers themselves.
TrainingOptions with_schedule(const TrainOptions& options, int64_t total_steps) {
  auto training = options.training_options();
  if (options.schedule == "constant" || !find_strategy(options.strategy).takes_schedule) return training;
  training.schedule = [&options, total_steps](torch::optim::Optimizer& optimizer) {
    return std::unique_ptr<torch::optim::LRScheduler>(make_schedule(options, optimizer, total_steps));
  };
  return training;
}

// Where the samples that come now are not those that would have come.
std::vector<std::string> other_samples(const nlohmann::json& position, const TrainOptions& options,
                                       std::optional<size_t> samples, bool in_epoch) {
  std::vector<std::string> lines;
  const auto compare = [&](const char* key, const char* what, const nlohmann::json& now) {
    if (!position.is_object() || !position.contains(key) || position[key] == now) return;
    lines.push_back(fmt::format("{} {}, in the checkpoint {}: samples come in another order{}", what, now.dump(),
                                position[key].dump(),
                                in_epoch ? ", so that this epoch takes some of them twice and others not" : ""));
  };
  compare(seed_of_order, "--seed is", options.seed);
  if (samples) compare(samples_of_data, "samples of --data are", *samples);
  return lines;
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
  make_state();
  schedule_steps_ = total_steps();
  started_ = group_.size();
}

void Trainer::together(const std::function<void(const Group& present)>& work) {
  if (!elastic_) return meeting_->together(work);
  elastic_->together([&] { work(group_); });
}

void Trainer::make_state() {
  training_.reset();
  if (options_.save.empty() && options_.resume.empty()) return;
  auto state = strategy_->state();
  if (!state) return;
  training_.emplace(std::move(*state));
  if (schedule_) training_->with(*schedule_);
}

std::optional<nlohmann::ordered_json> Trainer::replan(int64_t number) {
  std::string due = options_.strategy;
  for (const auto& [step, name] : course_) {
    if (step <= number) due = name;
  }
  if (due == options_.strategy) return std::nullopt;
  wire_ += std::max<int64_t>(0, bytes_over_tcp() - wire_before_);
  if (training_) training_->wait();
  training_.reset();
  meeting_.reset();
  const auto before = options_.strategy;
  options_ = all_options_.under(due);
  const auto done = strategy_.replan(due, with_schedule(options_, total_steps()), recipe_of(options_));
  if (schedule_) schedule_ = schedule_->on(strategy_->optimizer());
  meeting_.emplace(*strategy_, group_);
  make_state();
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
  const bool alone = in_step() ? has_whole_model() && !training_ : !strategy_->bound();
  if (alone) return interrupted != 0;
  auto anywhere = at::full({1}, interrupted != 0 ? 1 : 0, at::kInt);
  strategy_->bound().value_or(group_).all_reduce(anywhere, ReduceOp::max, {number, -1, "interrupted"}).wait();
  return anywhere.item<int>() != 0;
}

int64_t Trainer::resume() {
  if (options_.resume.empty() || world_.joining()) return 0;
  if (options_.partial) {
    const auto found = load(options_.resume, *training_, {.partial = true});
    if (group_.rank() == 0) print_to_stderr("starting with what {} has of the model\n", found.path.string());
    return 0;
  }
  // The command line, not the checkpoint, defines the options of param groups.
  const LoadOptions how{.rates = false, .options = false};
  const auto found =
      options_.resume_if_any ? load_latest(options_.resume, *training_, how) : load(options_.resume, *training_, how);
  if (!found) {
    if (group_.rank() == 0) print_to_stderr("{} has no checkpoint yet: starting at step 0\n", options_.resume);
    return 0;
  }
  const auto& loaded = *found;
  auto first = loaded.step;
  const auto position = nlohmann::json::parse(loaded.position, nullptr, /*allow_exceptions=*/false);
  const auto per_epoch = feed_.steps_per_epoch();
  if (per_epoch && position.is_object()) {
    // Converts the step to the new number of steps per epoch, because ranks or batches may have changed.
    const auto before = position.value(steps_per_epoch, *per_epoch);
    if (before > 0 && before != *per_epoch) first = first * *per_epoch / before;
  }
  if (first >= total_steps() && options_.resume_if_any) {
    if (group_.rank() == 0) {
      print_to_stderr("{}: this training of {} steps is done; for more, give more steps or epochs\n",
                      loaded.path.string(), total_steps());
    }
    return first;
  }
  if (first >= total_steps()) {
    throw UsageError(fmt::format(
        "--resume {}: the checkpoint is from step {}, but training ends after step {}; give more steps or epochs",
        loaded.path.string(), first, total_steps()));
  }
  if (schedule_) schedule_->set_position(first);  // its own count is in steps of the ranks that it began with
  if (group_.rank() == 0) {
    print_to_stderr("going on after step {} of {}{}\n", first, loaded.path.string(),
                    loaded.exact ? "" : fmt::format(" ({} at {} ranks)", printable(loaded.strategy), loaded.ranks));
    for (const auto& difference : loaded.differences) print_to_stderr("{}\n", difference);
    const bool in_epoch = per_epoch && first % *per_epoch != 0;
    for (const auto& line : other_samples(position, options_, feed_.samples(), in_epoch)) print_to_stderr("{}\n", line);
  }
  return first;
}

void Trainer::begin_epoch(int64_t number, int64_t first) {
  const auto per_epoch = feed_.steps_per_epoch();
  const int64_t epoch = per_epoch ? number / *per_epoch : 0;
  const int64_t done = per_epoch ? number % *per_epoch : number;
  if (done != 0 && number != first) return;
  feed_.begin_epoch(epoch);
  feed_.skip(done);
}

void Trainer::save(int64_t steps, bool in_background) {
  nlohmann::json position = nlohmann::json::object();
  if (const auto per_epoch = feed_.steps_per_epoch()) position[steps_per_epoch] = *per_epoch;
  position[seed_of_order] = options_.seed;
  if (const auto samples = feed_.samples()) position[samples_of_data] = *samples;
  const SaveOptions now{.step = steps, .position = position.dump(), .keep_last = options_.keep_last};
  if (in_background) {
    last_saved_ = steps;
    earlier_latest_.reset();
  }
  in_background ? save_async(options_.save, *training_, now) : shoal::save(options_.save, *training_, now);
}

bool Trainer::is_due(int64_t steps) const {
  return training_ && options_.save_every > 0 && steps % options_.save_every == 0;
}

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
  if (options_.save.empty() || !training_) return;
  try {
    together([&](const Group&) {
      save(steps, /*in_background=*/false);
      if (result.stopped) training_->wait();  // older checkpoints are removed by now, and the folder is free
    });
    result.checkpoint = fmt::format("{}/step-{}", options_.save, steps);
    keep_earlier_latest(steps, result);
  } catch (const CommError& error) {
    if (in_step()) throw;
    if (leads()) print_to_stderr("shoal: no checkpoint of the end: {}\n", error.what());
  }
}

// A run that begins anew in a folder of checkpoints, without --resume, may be a mistake until it has saved on its own.
void Trainer::keep_earlier_latest(int64_t steps, TrainResult& result) const {
  if (!result.stopped || !earlier_latest_ || *earlier_latest_ <= steps) return;
  if (leads() && !name_latest_again(options_.save, *earlier_latest_)) {
    print_to_stderr("--save {}: latest is step-{} now, and no longer step-{} of an earlier run\n", options_.save, steps,
                    *earlier_latest_);
    return;
  }
  result.kept_latest = fmt::format("step-{}", *earlier_latest_);
}

Evaluation Trainer::evaluated(const Group& present, TrainResult& result) {
  result.figures = exchange_figures(*strategy_);
  const auto whole = strategy_->full_parameters();
  // Batch norms' running means are evaluated as they are saved, with rank 0's values. Ranks that train independently
  // evaluate their own models.
  std::optional<CommonValues> buffers;
  if (strategy_->strategy().pace != Pace::alone) {
    buffers.emplace(CommonValues::Of::first_rank, model_->buffers(), present);
  }
  return evaluate(*model_, *feed_.test_data(), present, options_.precision());
}

// After loop.number steps.
void Trainer::tell_evaluation(Loop& loop, const Evaluation& evaluation, TrainResult& result) {
  result.eval.push_back(evaluation);
  loop.progress.clear();
  const auto last = loop.number - 1;
  if (leads() && options_.json != "-") {
    const auto per_epoch = feed_.steps_per_epoch();
    auto line = fmt::format("epoch {}: test loss {:.4f}, accuracy {:.2f} %", (per_epoch ? last / *per_epoch : 0) + 1,
                            evaluation.loss, 100 * evaluation.accuracy);
    for (const auto& [name, value] : result.figures) {
      if (name == "consensus_distance") line += fmt::format(", consensus distance {:.3g}", value);
    }
    if (!write_to_stdout(line + "\n") && errno == EPIPE && heeds_readers_) {
      unread_ = true;
      if (loop.number < total_steps()) print_to_stderr("shoal: nobody reads the output any more: training stops\n");
    }
  }
  take_over(loop);
  nlohmann::ordered_json line{{"step", last},
                              {"eval_loss", evaluation.loss},
                              {"eval_accuracy", evaluation.accuracy},
                              {"eval_count", evaluation.count}};
  for (const auto& [name, value] : result.figures) line[name] = value;
  loop.metrics.write(line);
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

bool Trainer::evaluates(int64_t steps) const {
  const auto per_epoch = feed_.steps_per_epoch();
  return options_.eval && ((per_epoch && steps % *per_epoch == 0) || steps >= total_steps());
}

// Takes over the reports if the leading rank has ended; hands them over to one that has joined and leads.
void Trainer::take_over(Loop& loop) {
  if (loop.reports == leads()) return;
  loop.reports = leads();
  loop.reports ? loop.metrics.take_over() : loop.metrics.hand_over();
  loop.progress.enable(loop.reports);
}

// No rank sends what belongs to the work, or to the step after it, before all have counted what came until then.
void Trainer::beside_steps(const Group& present, const std::function<void()>& work) {
  const Label between{-1, -1, "between steps"};
  const auto sent = bytes_over_tcp();
  wire_ += std::max<int64_t>(0, sent - std::exchange(wire_before_, sent));
  present.barrier(between).wait();
  work();
  wire_before_ = bytes_over_tcp();
  present.barrier(between).wait();
}

nlohmann::ordered_json Trainer::metrics_of(const Loop& loop, const TrainResult& result) const {
  nlohmann::ordered_json line{{"step", loop.number},
                              {"seconds", result.seconds},
                              {"loss", result.loss.back()},
                              {"lr", result.lr.back()},
                              {"step_ms", result.step_ms.back()},
                              {"wait_ms", result.wait_ms.back()},
                              {"update_ms", result.update_ms.back()},
                              {"samples", result.all_samples}};
  if (!is_sampled(loop.under_strategy)) return line;
  if (const auto logging = strategy_->logging_data()) {
    line["forward_ms"] = logging->last.forward;
    line["backward_ms"] = logging->last.backward;
    line["communication_ms"] = logging->last.communication;
    line["overlap_ms"] = logging->last.overlap;
  }
  return line;
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
  take_over(loop);
  if (loop.metrics.wanted()) loop.metrics.write(metrics_of(loop, result));
  loop.smooth_loss = number == loop.first ? *loss : 0.95 * loop.smooth_loss + 0.05 * *loss;
  const auto missed = missed_exchanges(*strategy_);
  loop.progress.update(1, fmt::format("loss {:.4f}{}{}", loop.smooth_loss, missed.empty() ? "" : "  ", missed));
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
      wire_before_ = bytes_over_tcp();
      result.replans.push_back(*line);
      loop.under_strategy = 0;
      loop.progress.clear();
      if (loop.reports) {
        print_to_stderr("step {}: {}\n", number, (*line)["event"].get<std::string>());
      }
      if (loop.metrics.wanted()) loop.metrics.write(*line);
    }
    train_step(loop, result);
    const bool ends = loop.number == total;
    const bool saves = is_due(loop.number) && !ends;
    if (!evaluates(loop.number) && !saves && !ends) continue;
    const auto outcome = meeting_->meet(loop.number, /*due=*/true, !in_step() && interrupted != 0);
    result.stopped = outcome == Meeting::Outcome::stop && !ends;
    if (outcome == Meeting::Outcome::go_on || result.stopped) continue;
    if (evaluates(loop.number)) {
      Evaluation evaluation;
      meeting_->together(
          [&](const Group& present) { beside_steps(present, [&] { evaluation = evaluated(present, result); }); });
      tell_evaluation(loop, evaluation, result);
      result.unread = is_unread() && !ends;
      result.stopped = result.unread;
    }
    if (!saves || result.stopped) continue;
    loop.progress.clear();
    tolerate([&] {
      meeting_->together(
          [&](const Group& present) { beside_steps(present, [&] { save(loop.number, /*in_background=*/true); }); });
    });
  }
}

TrainResult Trainer::run() {
  TrainResult result;
  const int64_t first = resume();
  const bool joins = world_.joining();
  const bool reports = group_.rank() == 0 && !joins;
  if (first >= total_steps()) {
    result.done_before = true;
    return result;
  }
  const bool anew = !joins && (options_.resume.empty() || options_.partial);
  if (anew && !options_.save.empty()) earlier_latest_ = latest_step(options_.save);
  if (reports && first == 0 && !options_.save.empty() && std::filesystem::exists(options_.save + "/latest")) {
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
  Loop loop{
      .first = first,
      .number = first,
      .reports = reports,
      .metrics = std::move(metrics),
      .progress = ProgressBar(total_steps() - first, {.enabled = reports, .unit = "samples", .unit_scale = samples}),
      .per_epoch = per_epoch};
  if (joins) join(loop, result);
  wire_before_ = bytes_over_tcp();
  elastic_ ? train_elastic(loop, result) : train(loop, result);
  result.wire_bytes = wire_ + std::max<int64_t>(0, bytes_over_tcp() - wire_before_);
  if (training_) {
    tolerate([&] {
      together([&](const Group&) {
        if (training_) training_->wait();
      });
    });
  }
  if (result.stopped) interrupted = 1;  // also if only a peer was interrupted
  result.params_mib = mebibytes(strategy_->parameters());
  result.state_mib = state_mib(*strategy_, *model_);
  if (!result.stopped) together([&](const Group&) { result.figures = exchange_figures(*strategy_); });
  result.logging = strategy_->logging_data();
  save_end(loop.number, result);
  if (const auto& fault = loop.metrics.fault(); loop.reports && !fault.empty()) {
    print_to_stderr("shoal: {}\n", fault);
  }
  if (elastic_) tell_changes(loop, result);
  return result;
}

}  // namespace shoal::cli
