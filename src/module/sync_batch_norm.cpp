#include "shoal/sync_batch_norm.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/autograd.h>
#include <torch/nn/functional/batchnorm.h>
#include <torch/utils.h>

#include <numeric>

#include "base/called_by_pytorch.h"
#include "shoal/error.h"

namespace shoal {
namespace {

// Dtype of the exchanged statistics, whatever the input's: counts must be exact, and the vectors are short.
constexpr auto wide = at::kDouble;

// All dimensions but that of the channels.
std::vector<int64_t> reduced_dimensions(const at::Tensor& input) {
  std::vector<int64_t> dimensions(input.dim() - 1);
  std::iota(dimensions.begin(), dimensions.end(), 1);
  dimensions.front() = 0;
  return dimensions;
}

// A vector over the channels, in a shape that broadcasts with the input.
at::Tensor along_channels(const at::Tensor& vector, const at::Tensor& input) {
  std::vector<int64_t> shape(input.dim(), 1);
  shape[1] = -1;
  return vector.view(shape);
}

at::ScalarType compute_dtype(const at::Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

int64_t values_per_channel(const at::Tensor& input) {
  return input.size(1) == 0 ? 0 : input.numel() / input.size(1);
}

struct Moments {
  at::Tensor mean;            // [c] float64
  at::Tensor sum_of_squares;  // [c] float64, of deviations from the mean
  double count = 0;           // values per channel
};

// Moments of all ranks' values together (Chan, Golub and LeVeque 1979, which avoids differences of large numbers).
Moments moments(const at::Tensor& input, const Group& group) {
  const auto channels = input.size(1);
  const auto count = values_per_channel(input);
  auto mine = at::zeros({2 * channels + 1}, input.options().dtype(wide));
  if (count > 0) {
    const auto [variance, mean] =
        at::var_mean(input.to(compute_dtype(input)), reduced_dimensions(input), /*correction=*/at::Scalar(0));
    mine.narrow(0, 0, channels).copy_(mean);
    mine.narrow(0, channels, channels).copy_(variance).mul_(count);
    mine[2 * channels] = count;
  }
  auto all = at::empty({group.size(), 2 * channels + 1}, mine.options());
  group.all_gather(all, mine, {-1, -1, "statistics of SyncBatchNorm"}).wait();
  const auto means = all.narrow(1, 0, channels);
  const auto counts = all.narrow(1, 2 * channels, 1);
  const auto total = counts.sum().item<double>();
  if (total == 0) return {at::zeros({channels}, mine.options()), at::zeros({channels}, mine.options()), 0};
  const auto mean = (means * (counts / total)).sum(0);
  const auto between = ((means - mean).square() * counts).sum(0);
  return {mean, all.narrow(1, channels, channels).sum(0) + between, total};
}

// Normalises by given statistics; backward reduces the sums that it needs over the group.
class Normalise : public torch::autograd::Function<Normalise> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input,
                            const at::Tensor& weight, const at::Tensor& bias, const Moments& of_all, double eps,
                            const Group& group) {
    const auto dtype = compute_dtype(input);
    const auto variance = of_all.sum_of_squares / std::max(1.0, of_all.count);
    context->save_for_backward({input, weight, of_all.mean.to(dtype), (variance + eps).rsqrt().to(dtype)});
    context->saved_data["count"] = of_all.count;
    context->saved_data["bias_dtype"] = bias.scalar_type();
    // Autograd saves plain values only, so the group is wrapped in a capsule.
    context->saved_data["group"] = c10::IValue::make_capsule(c10::make_intrusive<Carried>(group));
    if (input.numel() == 0) return at::empty_like(input);
    // The kernel that evaluation uses.
    return std::get<0>(at::native_batch_norm(input.to(dtype), weight.to(dtype), bias.to(dtype), of_all.mean.to(dtype),
                                             variance.to(dtype), /*training=*/false, /*momentum=*/0, eps))
        .to(input.scalar_type());
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& outputs) {
    return called_by_pytorch([&] { return gradients(context, outputs); });
  }

 private:
  struct Carried : torch::CustomClassHolder {
    explicit Carried(Group of) : group(std::move(of)) {}
    Group group;
  };

  static torch::autograd::variable_list gradients(torch::autograd::AutogradContext* context,
                                                  const torch::autograd::variable_list& outputs) {
    if (at::GradMode::is_enabled()) {
      throw UsageError(
          "SyncBatchNorm: backward with create_graph is not supported: its gradient cannot be differentiated again");
    }
    const auto saved = context->get_saved_variables();
    const auto &input = saved[0], &weight = saved[1], &mean = saved[2], &scale = saved[3];
    const auto group = c10::static_intrusive_pointer_cast<Carried>(context->saved_data["group"].toCapsule())->group;
    const auto channels = input.size(1);
    const auto gradient = outputs[0].to(mean.scalar_type());
    const auto normalised =
        (input.to(mean.scalar_type()) - along_channels(mean, input)).mul_(along_channels(scale, input));
    const auto dimensions = reduced_dimensions(input);
    auto sums = at::empty({2, channels}, mean.options().dtype(wide));
    sums[0].copy_(gradient.sum(dimensions));
    sums[1].copy_((gradient * normalised).sum(dimensions));
    const auto own = [&](int64_t row, at::ScalarType dtype) { return sums[row].to(dtype, false, /*copy=*/true); };
    at::Tensor weight_gradient, bias_gradient, input_gradient;
    if (context->needs_input_grad(1)) weight_gradient = own(1, weight.scalar_type());
    if (context->needs_input_grad(2)) bias_gradient = own(0, context->saved_data["bias_dtype"].toScalarType());
    // Collective, so called even if this rank does not need its input's gradient: other ranks may need theirs.
    group.all_reduce(sums, ReduceOp::sum, {-1, -1, "sums of SyncBatchNorm's backward"}).wait();
    if (context->needs_input_grad(0)) {
      const auto means = (sums / std::max(1.0, context->saved_data["count"].toDouble())).to(mean.scalar_type());
      auto centred = gradient - along_channels(means[0], input);
      centred.sub_(normalised * along_channels(means[1], input));
      const auto factor = scale * weight.to(scale.scalar_type());
      input_gradient = centred.mul_(along_channels(factor, input)).to(input.scalar_type());
    }
    return {input_gradient, weight_gradient, bias_gradient, {}, {}, {}};
  }
};

}  // namespace

SyncBatchNormImpl::SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, Group group)
    : NormImplBase(options), group_(std::move(group)) {}

void SyncBatchNormImpl::adopt(const at::Tensor& new_weight, const at::Tensor& new_bias, const at::Tensor& mean,
                              const at::Tensor& var, const at::Tensor& batches) {
  parameters_["weight"] = weight = new_weight;
  parameters_["bias"] = bias = new_bias;
  // set_data, because libtorch cannot replace a registered buffer.
  const auto share = [](at::Tensor& own, const at::Tensor& other) {
    if (own.defined() && other.defined()) own.set_data(other);
    if (!other.defined()) own.reset();
  };
  share(running_mean, mean);
  share(running_var, var);
  share(num_batches_tracked, batches);
}

void SyncBatchNormImpl::_check_input_dim(const at::Tensor& input) {
  if (input.dim() < 2 || input.dim() > 5 || input.size(1) != options.num_features()) {
    throw UsageError(fmt::format("SyncBatchNorm: input [{}]; it must be [n, {}] with up to three more dimensions",
                                 fmt::join(input.sizes(), ", "), options.num_features()));
  }
  if (!at::isFloatingType(input.scalar_type())) {
    throw UsageError(
        fmt::format("SyncBatchNorm: input of {}; it must be floating point", c10::toString(input.scalar_type())));
  }
}

// Counts a batch; returns the weight of its statistics in the running ones.
double SyncBatchNormImpl::count_batch() {
  if (!num_batches_tracked.defined()) return options.momentum().value_or(0);
  num_batches_tracked += 1;
  return options.momentum() ? *options.momentum() : 1.0 / num_batches_tracked.item<double>();
}

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& input) {
  _check_input_dim(input);
  const bool tracks = is_training() && options.track_running_stats() && running_mean.defined();
  if (!is_training() || group_.size() == 1) {
    const double factor = tracks ? count_batch() : 0;
    const bool by_batch = is_training() || !options.track_running_stats();
    const auto used = [&](const at::Tensor& running) { return by_batch && !tracks ? at::Tensor() : running; };
    return torch::nn::functional::detail::batch_norm(input, used(running_mean), used(running_var), weight, bias,
                                                     by_batch, factor, options.eps());
  }
  const auto of_all = [&] {
    const torch::NoGradGuard no_grad;
    return moments(input.detach(), group_);
  }();
  if (of_all.count == 1) {
    throw UsageError("SyncBatchNorm: all ranks together have only one value per channel; training needs at least two");
  }
  if (tracks && of_all.count > 0) {
    const double factor = count_batch();
    const auto blend = [factor](const at::Tensor& running, const at::Tensor& fresh) {
      running.copy_(running.to(wide).mul(1 - factor).add(fresh, factor));
    };
    blend(running_mean, of_all.mean);
    blend(running_var, of_all.sum_of_squares / (of_all.count - 1));
  }
  // Autograd accepts no undefined inputs.
  const auto plain = input.options().dtype(compute_dtype(input));
  return Normalise::apply(input, weight.defined() ? weight : at::ones({input.size(1)}, plain),
                          bias.defined() ? bias : at::zeros({input.size(1)}, plain), of_all, options.eps(), group_);
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << fmt::format("shoal::SyncBatchNorm({}, eps={}, momentum={}, affine={}, track_running_stats={}, ranks={})",
                        options.num_features(), options.eps(),
                        options.momentum() ? fmt::format("{}", *options.momentum()) : "none", options.affine(),
                        options.track_running_stats(), group_.size());
}

}  // namespace shoal
