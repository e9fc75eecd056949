"""DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import torch

from .. import _C
from .._mirror import mirror_of
from ..distributed import group_of
from ._wrapper import Wrapper


class DistributedDataParallel(Wrapper):
    """Data parallelism with a full replica of the model on every rank, after torch.nn.parallel's class of this name.

    model = shoal.nn.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)  # before or after; any optimizer
    ...
    loss_fn(model(x), y).backward()  # returns when grad of every parameter is the mean over ranks
    optimizer.step()
    optimizer.zero_grad()

    Options: broadcast_buffers, find_unused_parameters, static_graph, bucket_cap_mb, gradient_as_bucket_view as in
    PyTorch; first_bucket_mb, grad_reduce_in_fp32, reduce_dtype, ignored (names of parameters and buffers), and
    communication_hook ("fp16", "bf16", "int8", "powersgd:4", "topk:0.01") as in the C++ library, whose header ddp.h
    describes them. An unknown option is a UsageError.

    The constructor is collective. It compares the models of all ranks (DisagreeError) and broadcasts rank 0's values.
    """

    def __init__(self, module: torch.nn.Module, process_group: Any = None, **options: Any) -> None:
        core = _C.DistributedDataParallelCore(mirror_of(module), group_of(process_group), options)
        super().__init__(module, core)
