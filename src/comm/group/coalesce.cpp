#include "comm/group/coalesce.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <algorithm>
#include <functional>

#include "comm/group/group_state.h"

namespace shoal {
namespace {

void broadcast_chunk(const Group& group, const std::vector<at::Tensor>& chunk, int root, const Label& label) {
  if (chunk.empty()) return;
  int64_t numel = 0;
  for (const auto& tensor : chunk) numel += tensor.numel();
  auto flat = at::empty({numel}, chunk.front().options());
  const auto each = [&](auto&& visit) {
    int64_t offset = 0;
    for (const auto& tensor : chunk) {
      visit(tensor, flat.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
      offset += tensor.numel();
    }
  };
  if (group.rank() == root) each([](const at::Tensor& tensor, const at::Tensor& piece) { piece.copy_(tensor); });
  group.broadcast(flat, root, label).wait();
  if (group.rank() != root) {
    each([](const at::Tensor& tensor, const at::Tensor& piece) { tensor.copy_(piece); });
  }
}

}  // namespace

std::vector<std::vector<at::Tensor>> coalesced(std::vector<at::Tensor> tensors, int64_t chunk_bytes) {
  std::vector<std::vector<at::Tensor>> chunks;
  while (!tensors.empty()) {
    const auto dtype = tensors.front().dtype();
    const auto device = tensors.front().device();
    std::vector<at::Tensor> chunk;
    int64_t bytes = 0;
    bool full = false;
    std::erase_if(tensors, [&](const at::Tensor& tensor) {
      if (full || tensor.dtype() != dtype || tensor.device() != device) return false;
      full = !chunk.empty() && bytes + static_cast<int64_t>(tensor.nbytes()) > chunk_bytes;
      if (full) return false;
      chunk.push_back(tensor);
      bytes += static_cast<int64_t>(tensor.nbytes());
      return true;
    });
    chunks.push_back(std::move(chunk));
  }
  return chunks;
}

void broadcast_coalesced(const Group& group, const std::vector<at::Tensor>& tensors, int root, const Label& label,
                         int64_t chunk_bytes) {
  torch::NoGradGuard no_grad;
  // Writes through variable_data, which keeps autograd's version counters, so that buffers saved by a graph stay valid.
  std::vector<at::Tensor> data;
  for (const auto& tensor : tensors) data.push_back(tensor.variable_data());
  for (const auto& chunk : coalesced(std::move(data), chunk_bytes)) broadcast_chunk(group, chunk, root, label);
}

SparseSum all_reduce_sparse(const Group& group, const at::Tensor& sparse, at::IntArrayRef sizes,
                            const at::TensorOptions& options, double weight, const Label& label,
                            std::optional<std::chrono::milliseconds> timeout, std::optional<at::ScalarType> sum_in) {
  torch::NoGradGuard no_grad;
  const auto gather = [&](const at::Tensor& all, const at::Tensor& own) {
    issue(group, {.op = Op::all_gather, .inputs = {own}, .outputs = {all}, .label = label, .timeout = timeout}).wait();
  };
  const bool dense = sparse.defined() && sparse.layout() == at::kStrided;
  const auto own = !sparse.defined() ? at::Tensor() : (dense ? sparse.detach().to_sparse(1) : sparse).coalesce();
  const int64_t count = own.defined() ? own._nnz() : 0;
  const int64_t sparse_dim = own.defined() ? own.sparse_dim() : 0;
  const auto kind = fmt::format("{} [{}]", c10::toString(options.dtype().toScalarType()), fmt::join(sizes, ", "));
  // One small all-gather: number of entries, number of sparse dimensions (0: this rank has no tensor), weight, 53 bits
  // of a hash of dtype and sizes, and whether the tensor is dense, all exact in float64.
  constexpr int64_t fields = 5;
  auto headers = at::empty({group.size() * fields}, at::kDouble);
  gather(headers, at::tensor({static_cast<double>(count), static_cast<double>(sparse_dim), weight,
                              static_cast<double>(std::hash<std::string>()(kind) >> 11), dense ? 1.0 : 0.0},
                             at::kDouble));
  headers = headers.view({group.size(), fields});
  const auto sparse_dims = headers.select(1, 1);
  const auto dims = static_cast<int64_t>(sparse_dims.max().item<double>());
  const auto kinds = headers.select(1, 3);
  const bool alike =
      kinds.eq(kinds[0]).all().item<bool>() && sparse_dims.eq(0).logical_or(sparse_dims.eq(dims)).all().item<bool>();
  if (!alike) {
    agree(group, "sparse tensors", {fmt::format("{}, sparse dimensions: {}", kind, own.defined() ? sparse_dim : dims)});
  }
  SparseSum result{{}, headers.select(1, 2).sum().item<double>(), sparse_dims.gt(0).sum().item<int64_t>()};
  if (result.present == 0) return result;

  const auto longest = static_cast<int64_t>(headers.select(1, 0).max().item<double>());
  std::vector<int64_t> row(sizes.begin() + dims, sizes.end());
  int64_t row_numel = 1;
  for (const auto size : row) row_numel *= size;
  auto indices = at::zeros({dims, longest}, at::kLong);
  auto values = at::zeros({longest, row_numel}, options.layout(at::kStrided));
  if (count > 0) {
    indices.narrow(1, 0, count).copy_(own.indices());
    values.narrow(0, 0, count).copy_(own.values().reshape({count, row_numel}));
  }
  auto all_indices = at::empty({group.size(), dims, longest}, at::kLong);
  auto all_values = at::empty({group.size(), longest, row_numel}, values.options());
  gather(all_indices, indices);
  gather(all_values, values);
  std::vector<at::Tensor> index_list;
  std::vector<at::Tensor> value_list;
  for (int rank = 0; rank < group.size(); ++rank) {
    const auto entries = static_cast<int64_t>(headers[rank][0].item<double>());
    index_list.push_back(all_indices[rank].narrow(1, 0, entries));
    value_list.push_back(all_values[rank].narrow(0, 0, entries));
  }
  auto merged = at::cat(value_list);
  if (!sum_in && at::isReducedFloatingType(merged.scalar_type())) sum_in = at::kFloat;
  if (sum_in) merged = merged.to(*sum_in);
  row.insert(row.begin(), merged.size(0));
  result.sum =
      at::sparse_coo_tensor(at::cat(index_list, 1), merged.reshape(row), sizes, merged.options().layout(at::kSparse))
          .coalesce();
  if (headers.select(1, 4).any().item<bool>()) result.sum = result.sum.to_dense();
  return result;
}

}  // namespace shoal
