#include "shoal/hooks.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <cmath>

#include "engine/hooks/residuals.h"
#include "engine/hooks/step_count.h"
#include "shoal/error.h"

namespace shoal {

struct PowerSgdHook::Memory {
  explicit Memory(bool error_feedback) : residuals(error_feedback) {}
  Residuals residuals;
  StepCount count{};
  std::map<std::string, at::Tensor> factors{};  // second factors of the last step, by name of the matrix
};

namespace {

constexpr const char* factor_prefix = "factor.";
constexpr const char* power_sgd_carrier = "carrier.";

// Matrix to be compressed, approximately p q^T.
struct Matrix {
  std::string name;
  at::Tensor values;  // [n, m]: this rank's values
  int64_t rank = 1;
  at::Tensor p{};  // [n, rank]
  at::Tensor q{};  // [m, rank]
};

// An orthonormal basis of the columns' span (of a larger space if the columns are dependent).
at::Tensor orthonormal(const at::Tensor& columns) {
  return std::get<0>(at::linalg_qr(columns, "reduced"));
}

// Tensors one after the other in a bucket for the carrier.
class Parcel {
 public:
  void open(const GradientBucket& like, at::ScalarType dtype, int64_t numel) {
    bucket = std::make_unique<GradientBucket>(like);
    bucket->gradients = bucket->sum = at::empty({numel}, like.gradients.options().dtype(dtype));
    bucket->pieces.clear();
  }
  // Appends a place of this shape to the bucket.
  at::Tensor add(const std::string& name, at::IntArrayRef shape) {
    const auto begin = bucket->pieces.empty() ? 0 : bucket->pieces.back().in_bucket.end;
    const auto numel = c10::multiply_integers(shape);
    auto place = bucket->gradients.narrow(0, begin, numel).view(shape);
    bucket->pieces.push_back(
        {.name = name, .gradient = place, .in_bucket = {begin, begin + numel}, .in_parameter = {0, numel}});
    return place;
  }
  std::unique_ptr<GradientBucket> bucket;
};

// Two-round reduction of one bucket: first factors together with uncompressed gradients, then second factors.
template <class Memory>
class LowRankSum : public std::enable_shared_from_this<LowRankSum<Memory>> {
 public:
  LowRankSum(const GradientBucket& bucket, const PowerSgdOptions& options, int64_t step,
             std::shared_ptr<CommunicationHook> carrier, std::shared_ptr<Memory> memory)
      : bucket_(bucket),
        options_(options),
        step_(step),
        carrier_(std::move(carrier)),
        memory_(std::move(memory)),
        wanted_(memory_->residuals.add_to(bucket_)) {}

  PendingExchange begin() {
    options_.batched ? take_all() : divide();
    int64_t numel = 0;
    for (const auto number : whole_) numel += bucket_.pieces[number].gradient.numel();
    for (const auto& matrix : matrices_) numel += matrix.values.size(0) * matrix.rank;
    first_.open(bucket_, wanted_.scalar_type(), numel);
    for (const auto number : whole_) {
      const auto& piece = bucket_.pieces[number];
      first_.add(piece.name, piece.gradient.sizes()).copy_(piece_of(wanted_, piece));
    }
    // Drawn on the CPU in one dtype, so that ranks draw the same numbers on any device.
    auto generator = at::detail::createCPUGenerator(options_.seed + 1000003 * static_cast<uint64_t>(step_) +
                                                    static_cast<uint64_t>(bucket_.label.bucket));
    for (auto& matrix : matrices_) {
      matrix.q = orthonormal(start_of(matrix, generator));
      matrix.p = first_.add(matrix.name + ".p", {matrix.values.size(0), matrix.rank});
      at::mm_out(matrix.p, matrix.values, matrix.q);
    }
    return chain(carrier_->begin(*first_.bucket), [self = this->shared_from_this()] {
      if (!self->matrices_.empty()) return self->send_second();
      self->deliver();
      return PendingExchange();
    });
  }

 private:
  void take_all() {
    const auto numel = wanted_.numel();
    const auto side = static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(numel))));
    auto square = at::zeros({side * side}, wanted_.options());
    square.narrow(0, 0, numel).copy_(wanted_);
    matrices_.push_back({.name = fmt::format("bucket{}", bucket_.label.bucket),
                         .values = square.view({side, side}),
                         .rank = std::min(side, options_.rank)});
  }

  void divide() {
    for (size_t number = 0; number < bucket_.pieces.size(); ++number) {
      const auto& piece = bucket_.pieces[number];
      const auto rows = piece.gradient.dim() > 1 ? std::max<int64_t>(piece.gradient.size(0), 1) : 1;
      const auto columns = piece.gradient.numel() / rows;
      const auto rank = std::min({rows, columns, options_.rank});
      const auto sent = static_cast<double>((rows + columns) * rank);
      if (piece.gradient.dim() < 2 ||
          sent * options_.min_compression_rate >= static_cast<double>(piece.gradient.numel())) {
        whole_.push_back(number);
      } else {
        compressed_.push_back(number);
        matrices_.push_back(
            {.name = piece.name, .values = piece_of(wanted_, piece).reshape({rows, columns}), .rank = rank});
      }
    }
  }

  at::Tensor start_of(const Matrix& matrix, at::Generator& generator) const {
    const auto columns = matrix.values.size(1);
    const auto last = memory_->factors.find(matrix.name);
    const bool warm = options_.warm_start && last != memory_->factors.end() && last->second.size(0) == columns &&
                      last->second.size(1) == matrix.rank;
    if (warm) return last->second;
    return at::randn({columns, matrix.rank}, generator, at::kDouble).to(matrix.values.options());
  }

  PendingExchange send_second() {
    int64_t numel = 0;
    for (const auto& matrix : matrices_) numel += matrix.values.size(1) * matrix.rank;
    second_.open(bucket_, wanted_.scalar_type(), numel);
    for (auto& matrix : matrices_) {
      matrix.p = orthonormal(matrix.p);
      matrix.q = second_.add(matrix.name + ".q", {matrix.values.size(1), matrix.rank});
      at::mm_out(matrix.q, matrix.values.t(), matrix.p);
    }
    keep_missing();
    return chain(carrier_->begin(*second_.bucket), [self = this->shared_from_this()] {
      self->deliver();
      return PendingExchange();
    });
  }

  // Keeps the residual: what this rank's own factors leave out.
  void keep_missing() {
    if (!memory_->residuals.on()) return;
    for (size_t number = 0; number < matrices_.size(); ++number) {
      const auto& matrix = matrices_[number];
      const auto missing = at::addmm(matrix.values, matrix.p, matrix.q.t(), 1, -1);
      if (options_.batched) {
        memory_->residuals.keep_all(bucket_, missing.view({-1}));
      } else {
        const auto& piece = bucket_.pieces[compressed_[number]];
        memory_->residuals.keep(piece, missing.view(piece.gradient.sizes()));
      }
    }
  }

  void deliver() {
    for (size_t i = 0; i < whole_.size(); ++i) {
      at::Tensor(bucket_.pieces[whole_[i]].gradient).copy_(first_.bucket->pieces[i].gradient);
    }
    for (size_t number = 0; number < matrices_.size(); ++number) {
      const auto& matrix = matrices_[number];
      const auto sum = at::mm(matrix.p, matrix.q.t());
      if (options_.batched) {
        at::Tensor(bucket_.sum).copy_(sum.view({-1}).narrow(0, 0, bucket_.sum.numel()));
      } else {
        const at::Tensor& place = bucket_.pieces[compressed_[number]].gradient;
        at::Tensor(place).copy_(sum.view(place.sizes()));
      }
      // A factor that is not finite must not spoil the following steps.
      if (at::isfinite(matrix.q).all().item<bool>()) {
        memory_->factors[matrix.name] = matrix.q.clone();
      } else {
        memory_->factors.erase(matrix.name);
      }
    }
  }

  GradientBucket bucket_;
  PowerSgdOptions options_;
  int64_t step_;
  std::shared_ptr<CommunicationHook> carrier_;
  std::shared_ptr<Memory> memory_;
  at::Tensor wanted_;  // laid out like the bucket
  std::vector<Matrix> matrices_;
  std::vector<size_t> compressed_;  // pieces, by matrix; empty if one matrix is the whole bucket
  std::vector<size_t> whole_;       // pieces
  Parcel first_;
  Parcel second_;
};
}  // namespace

void PowerSgdOptions::validate() const {
  std::vector<std::string> faults;
  if (rank < 1) faults.push_back(fmt::format("rank {}: give at least 1", rank));
  if (start_iteration < 0) faults.push_back(fmt::format("start_iteration {}: give at least 0", start_iteration));
  if (!(min_compression_rate >= 0)) {
    faults.push_back(fmt::format("min_compression_rate {}: give at least 0", min_compression_rate));
  }
  if (!faults.empty()) throw UsageError(fmt::format("PowerSgdHook: {}", fmt::join(faults, "; ")));
}

PowerSgdHook::PowerSgdHook(const PowerSgdOptions& options, std::shared_ptr<CommunicationHook> carrier)
    : options_(options), carrier_(std::move(carrier)), memory_(std::make_shared<Memory>(options.error_feedback)) {
  options_.validate();
  if (!carrier_) throw UsageError("PowerSgdHook: the carrier is nullptr; omit it for an uncompressed sum");
}

PowerSgdHook::~PowerSgdHook() = default;

std::string PowerSgdHook::name() const {
  return fmt::format("powersgd, rank {}{}, from step {}, rate {}, error feedback {}, warm start {}, seed {}, over {}",
                     options_.rank, options_.batched ? ", batched" : "", options_.start_iteration,
                     options_.min_compression_rate, options_.error_feedback, options_.warm_start, options_.seed,
                     carrier_->name());
}

std::vector<const CommunicationHook*> PowerSgdHook::with_memory() const {
  auto hooks = carrier_->with_memory();
  hooks.push_back(this);
  return hooks;
}

PendingExchange PowerSgdHook::begin(const GradientBucket& bucket) {
  const auto step = memory_->count.at(bucket.label.step);
  if (step < options_.start_iteration) return carrier_->begin(bucket);
  return std::make_shared<LowRankSum<Memory>>(bucket, options_, step, carrier_, memory_)->begin();
}

void PowerSgdHook::reset() {
  memory_->residuals.clear();
  memory_->factors.clear();
  carrier_->reset();
}

CommunicationHook::State PowerSgdHook::state() const {
  State state;
  memory_->residuals.save(state);
  memory_->count.save(state);
  for (const auto& [name, factor] : memory_->factors) state[factor_prefix + name] = factor;
  for (const auto& [name, value] : carrier_->state()) state[power_sgd_carrier + name] = value;
  return state;
}

void PowerSgdHook::load_state(const State& state) {
  State of_carrier;
  for (const auto& [name, value] : state) {
    if (memory_->residuals.load(name, value) || memory_->count.load(name, value)) continue;
    if (name.starts_with(factor_prefix)) {
      memory_->factors[name.substr(std::string_view(factor_prefix).size())] = value.clone();
    } else if (name.starts_with(power_sgd_carrier)) {
      of_carrier[name.substr(std::string_view(power_sgd_carrier).size())] = value;
    } else {
      throw UsageError(fmt::format("communication hook {}: '{}' is not part of its state", this->name(), name));
    }
  }
  carrier_->load_state(of_carrier);
}

}  // namespace shoal
