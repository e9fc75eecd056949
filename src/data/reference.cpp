#include "data/reference.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "models/hash.h"
#include "models/registry.h"

namespace shoal::data {
namespace {

using models::draw;
using models::key;
using models::Purpose;
using models::unit;

constexpr size_t pixels = 784;

uint64_t stream_of(const SampleId& id) {
  return key(id.seed, Purpose::sample, id.step, id.rank, id.sample);
}

SampleId sample_of(const BatchId& id, int64_t count, int64_t i) {
  return {.seed = id.seed,
          .step = id.step,
          .rank = id.rank,
          .sample = id.micro * static_cast<uint64_t>(count) + static_cast<uint64_t>(i)};
}

Batch image_batch(const BatchId& id, int64_t count) {
  auto inputs = at::empty({count, static_cast<int64_t>(pixels)}, at::kFloat);
  auto labels = at::empty({count}, at::kLong);
  for (int64_t i = 0; i < count; ++i) {
    const auto image = reference_image(sample_of(id, count, i));
    std::copy(image.pixels.begin(), image.pixels.end(), inputs[i].mutable_data_ptr<float>());
    labels.mutable_data_ptr<int64_t>()[i] = image.label;
  }
  return {inputs, labels};
}

Batch text_batch(const BatchId& id, int64_t count, int64_t context) {
  auto tokens = at::empty({count, context + 1}, at::kLong);
  for (int64_t i = 0; i < count; ++i) {
    const auto text = reference_text(sample_of(id, count, i), context);
    std::copy(text.begin(), text.end(), tokens[i].mutable_data_ptr<int64_t>());
  }
  return {tokens.narrow(1, 0, context).contiguous(), tokens.narrow(1, 1, context).contiguous()};
}

}  // namespace

Image reference_image(const SampleId& id) {
  const uint64_t stream = stream_of(id);
  Image image{.pixels = std::vector<float>(pixels), .label = static_cast<int64_t>(draw(stream, 0) % 10)};
  const uint64_t label_template = key(id.seed, Purpose::label_template, image.label);
  for (size_t e = 0; e < pixels; ++e) {
    // Both products are exact, so that a fused multiply-add gives the same sum.
    image.pixels[e] = 0.5f * unit(draw(label_template, e)) + 0.5f * unit(draw(stream, 1 + e));
  }
  return image;
}

std::vector<int64_t> reference_text(const SampleId& id, int64_t context) {
  const uint64_t stream = stream_of(id);
  std::vector<int64_t> text{static_cast<int64_t>(draw(stream, 0) % 256)};
  for (int64_t i = 1; i <= context; ++i) {
    text.push_back((5 * text.back() + 17 + static_cast<int64_t>(draw(stream, i) % 4)) % 256);
  }
  return text;
}

Batch reference_batch(const std::string& model, const std::string& size, const BatchId& id, int64_t count,
                      at::ScalarType dtype) {
  models::require_model(model, size);
  if (model == "gpt") return text_batch(id, count, models::gpt_config(size).context);
  auto batch = image_batch(id, count);
  batch.data = batch.data.to(dtype);
  return batch;
}

}  // namespace shoal::data
