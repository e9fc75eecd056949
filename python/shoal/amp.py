"""A loss scaler for sharded gradients."""

from __future__ import annotations

from typing import Any

import torch

from ._C import DisagreeError
from .optim import ShardedOptimizer

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler that also takes OSS and FullyShardedOptimizer, whose gradients lie on several ranks: each rank
    unscales what it owns, and all ranks skip a step together. For these, unscale_() is collective, and a DisagreeError if
    ranks have different scales: what they have summed is gradients of losses that were scaled differently. Where each rank
    has an optimizer of torch.optim, scales are not compared: make and update the scaler alike on every rank. With
    shoal.Elastic, call unscale_() of a sharded optimizer in `prepare`: the second function, in which step() of the scaler would call
    it, may not communicate.

    DistributedOptimizer has a scaler of its own: its option `scaler`, and scale_loss().
    """

    def __init__(self, device: str = "cpu", *values: Any, **options: Any) -> None:
        super().__init__(device, *values, **options)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        if not isinstance(optimizer, ShardedOptimizer):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        gradients = optimizer._own_gradients()
        if gradients is None:  # every rank has all of them, alike but for what programs do to them
            found_on = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
            found = torch.stack([found_inf, *[one.to(found_inf.device) for one in found_on.values()]]).amax(0)
            return {**found_on, found.device: _found_anywhere(optimizer, found, inv_scale)}
        found = found_inf.clone()
        if gradients:
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inv_scale)
        return {found.device: _found_anywhere(optimizer, found, inv_scale)}


def _found_anywhere(optimizer: ShardedOptimizer, found: torch.Tensor, inv_scale: torch.Tensor) -> torch.Tensor:
    """Whether some rank has found inf or NaN. DisagreeError if ranks have different scales. Collective."""
    most = torch.stack((found, inv_scale, -inv_scale))
    optimizer._core.all_reduce_max(most)
    if most[1] != -most[2]:
        raise DisagreeError(
            f"GradScaler: ranks have loss scales from {1 / most[1].item():g} to {-1 / most[2].item():g}, and this one has "
            f"{1 / inv_scale.item():g}: make the scaler alike on every rank, and give its state to ranks that join an "
            "elastic job: shoal.Elastic(..., state={...})"
        )
    return most[0]
