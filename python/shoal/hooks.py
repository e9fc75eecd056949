"""Communication hooks: how gradients are reduced. Options of wrappers named communication_hook take one, or its text.

model = shoal.nn.DistributedDataParallel(net, communication_hook=shoal.hooks.bf16_compress_hook())

A hook with error feedback, or one that counts steps, serves one wrapper at a time: make one for each. Settings are those
of the C++ library (hooks.h) and, where PyTorch has them, of torch.distributed.algorithms.ddp_comm_hooks; they must be
equal on all ranks (DisagreeError).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from . import _C
from ._C import CommunicationHook
from .distributed import group_of

__all__ = [
    "CommunicationHook",
    "PeriodicModelAverager",
    "bf16_compress_hook",
    "fp16_compress_hook",
    "int8_quantize_hook",
    "post_local_sgd_hook",
    "power_sgd_hook",
    "topk_hook",
]


def fp16_compress_hook() -> CommunicationHook:
    """Gradients are reduced in float16."""
    return _C.compress_hook(torch.float16)


def bf16_compress_hook() -> CommunicationHook:
    """Gradients are reduced in bfloat16."""
    return _C.compress_hook(torch.bfloat16)


def int8_quantize_hook(**options: Any) -> CommunicationHook:
    """Gradients are sent as 8-bit integers with a scale per block. Options: block, error_feedback."""
    return _C.quantize_hook(options)


def topk_hook(**options: Any) -> CommunicationHook:
    """Only the largest elements of each gradient are sent. Options: fraction, error_feedback."""
    return _C.topk_hook(options)


def power_sgd_hook(*, carrier: CommunicationHook | str | None = None, **options: Any) -> CommunicationHook:
    """PowerSGD: gradients of matrices are sent as two low-rank factors, by `carrier` (None: as they are). Options: rank,
    start_iteration, min_compression_rate, error_feedback, warm_start, batched, seed; rank is PyTorch's
    matrix_approximation_rank, start_iteration its start_powerSGD_iter. For DistributedDataParallel."""
    return _C.powersgd_hook(carrier, options)


def post_local_sgd_hook(
    local: Any, start_iteration: int, *, carrier: CommunicationHook | str | None = None
) -> CommunicationHook:
    """From step start_iteration on, gradients are averaged over the process group `local` only, which has the same size on
    all ranks; a PeriodicModelAverager averages the parameters. For DistributedDataParallel."""
    return _C.post_local_sgd_hook(group_of(local), start_iteration, carrier)


class PeriodicModelAverager:
    """Averages parameters over ranks every `period` steps, after `warmup_steps`."""

    def __init__(self, period: int, warmup_steps: int = 0, process_group: Any = None) -> None:
        self._core = _C.PeriodicModelAverager(group_of(process_group), period, warmup_steps)

    def average_parameters(self, params: Iterable[torch.Tensor] | Iterable[dict[str, Any]]) -> bool:
        """Call it after every optimizer step, with parameters or an optimizer's param_groups. True if it was one in which
        parameters were averaged; then it was collective."""
        if isinstance(params, (torch.Tensor, torch.nn.Module)):
            raise _C.UsageError(f"average_parameters: give parameters or param groups, not a {type(params).__name__}")
        tensors: list[torch.Tensor] = []
        for one in params:
            tensors.extend(one["params"] if isinstance(one, dict) else [one])
        return self._core.average(tensors)
