#include "strategy/fsdp/originals.h"

#include <torch/utils.h>

#include "memory/views.h"
#include "shoal/deferred_init.h"
#include "shoal/group.h"

namespace shoal {

Originals narrow(const ModuleTensors& tensors, at::ScalarType dtype,
                 const std::vector<FullyShardedCore::Shards::Frozen>& former) {
  Originals originals;
  const DeferredInit conversions_too;  // also defers the conversion of deferred parameters
  for (const auto& entry : tensors.parameters) {
    if (entry.tensor.requires_grad()) {
      originals.trainable.push_back(entry.tensor.detach());
    } else if (former.empty() && entry.tensor.scalar_type() != dtype) {
      originals.frozen[entry.tensor.unsafeGetTensorImpl()] = entry.tensor.detach();
    }
    at::Tensor(entry.tensor).set_data(entry.tensor.detach().to(dtype));
  }
  for (const auto& frozen : former) {
    if (!frozen.copies.defined()) continue;
    for (size_t piece = 0; piece < frozen.parameters.size(); ++piece) {
      const auto range = frozen.layout.range(piece);
      originals.frozen[frozen.parameters[piece].tensor.unsafeGetTensorImpl()] =
          frozen.copies.narrow(0, range.begin, range.size());
    }
  }
  return originals;
}

bool Originals::copied(const at::Tensor& parameter) const {
  return has_copy(parameter) && frozen.contains(parameter.unsafeGetTensorImpl());
}

void keep_own_elements(const Bucket& bucket, std::vector<at::Tensor>& originals) {
  std::vector<at::Tensor> own(bucket.members().size());
  for (const auto& slice : bucket.layout().overlapping(bucket.kept_range())) {
    const auto& original = originals[bucket.members()[slice.piece]];
    own[slice.piece] = in_memory_order(original).narrow(0, slice.in_piece.begin, slice.in_piece.size()).clone();
  }
  for (size_t piece = 0; piece < own.size(); ++piece) originals[bucket.members()[piece]] = own[piece];
}

void list_pieces(FullyShardedCore::Shards::Frozen& frozen, const Group& shard, bool present,
                 const Originals& originals) {
  const auto& own = frozen.owners[static_cast<size_t>(shard.rank())];
  const auto& like = frozen.parameters.front().tensor;
  const bool copied = originals.copied(like);
  if (copied) {
    const auto options = like.options().dtype(at::kFloat).requires_grad(false);
    frozen.copies = present ? shard.allocate_host_shared(frozen.layout.size(), options, frozen.owners).tensor()
                            : at::zeros({own.size()}, options);
  }
  for (const auto& slice : frozen.layout.overlapping(own)) {
    auto& piece = frozen.pieces.emplace_back(FrozenPiece{.slice = slice, .elements = frozen.gather->elements(slice)});
    if (!copied) continue;
    const auto& original = originals.frozen.at(frozen.parameters[slice.piece].tensor.unsafeGetTensorImpl());
    piece.exact = frozen.copies.narrow(0, slice.in_flat.begin - (present ? 0 : own.begin), slice.in_flat.size());
    piece.exact.copy_(in_memory_order(original).narrow(0, slice.in_piece.begin, slice.in_piece.size()));
    piece.take_back();  // what an elastic job's program has written since
  }
}

}  // namespace shoal
