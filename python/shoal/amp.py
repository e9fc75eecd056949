"""A loss scaler for sharded gradients."""

from __future__ import annotations

from typing import Any

import torch

from .optim import ShardedOptimizer

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler that also takes OSS and FullyShardedOptimizer, whose gradients lie on several ranks: each rank
    unscales what it owns, and all ranks skip a step together. unscale_() is collective.

    DistributedOptimizer has a scaler of its own: its option `scaler`, and scale_loss().
    """

    def __init__(self, device: str = "cpu", *values: Any, **options: Any) -> None:
        super().__init__(device, *values, **options)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        gradients = optimizer._own_gradients() if isinstance(optimizer, ShardedOptimizer) else None
        if gradients is None:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        found = found_inf.clone()
        if gradients:
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inv_scale)
        optimizer._core.all_reduce_max(found)
        return {found.device: found}
