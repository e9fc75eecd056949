#include "shoal/hooks.h"

#include <fmt/format.h>
#include <torch/utils.h>

#include "engine/buckets/spare_memory.h"
#include "shoal/error.h"

namespace shoal {

struct CompressHook::Spare {
  SpareMemory memory;
};

CompressHook::CompressHook(at::ScalarType dtype) : dtype_(dtype), spare_(std::make_shared<Spare>()) {
  if (dtype == at::kHalf || dtype == at::kBFloat16) return;
  throw UsageError(fmt::format("CompressHook: {}: give float16 or bfloat16", c10::toString(dtype)));
}

CompressHook::~CompressHook() = default;

std::string CompressHook::name() const {
  return dtype_ == at::kHalf ? "fp16" : "bf16";
}

PendingExchange CompressHook::begin(const GradientBucket& bucket) {
  // Sums 16-bit gradients as they are: conversion would lose range or precision, and save nothing.
  if (bucket.gradients.element_size() <= 2) return {sum_up(bucket, bucket.gradients, bucket.sum)};
  const auto numel = bucket.gradients.numel();
  auto memory = spare_->memory.take(bucket.group, numel, bucket.gradients.options().dtype(dtype_));
  const auto narrow = memory.narrow(0, 0, numel);
  narrow.copy_(bucket.gradients);
  // In place: the r-th part of the buffer is rank r's result.
  const auto part = bucket.result == SumResult::ranges ? numel / bucket.group.size() : numel;
  const auto begin = bucket.result == SumResult::ranges ? part * bucket.group.rank() : 0;
  const auto sum = narrow.narrow(0, begin, part);
  return {.work = sum_up(bucket, narrow, sum), .finish = [spare = spare_, memory, sum, to = bucket.sum] {
            if (to.defined()) at::Tensor(to).copy_(sum);
            spare->memory.put(memory);
          }};
}

}  // namespace shoal
