"""ShardedDataParallel (ZeRO-2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import _C
from .._mirror import mirror_of, parameters_where, refuse_torch_ddp, require_constant_in_forward, with_ignored_of_torch
from ..distributed import group_of
from ..optim.oss import OSS
from ._wrapper import Wrapper


class ShardedDataParallel(Wrapper):
    """ZeRO-2: reduces each gradient only to the rank whose OSS optimizer owns its parameter.

    optimizer = shoal.optim.OSS(net.parameters(), torch.optim.AdamW, lr=1e-3)
    model = shoal.nn.ShardedDataParallel(net, optimizer)

    Call forward of the wrapper, not of the module. After backward, grad of the parameters that this rank owns is the mean
    over ranks. For other parameters it is a tensor without memory: reading it is an error that names the right call, such
    as optimizer.clip_grad_norm().

    Options: broadcast_buffers, find_unused_parameters, sync_models_at_startup, auto_refresh_trainable,
    grad_reduce_in_fp32, ignored, communication_hook, reduce_buffer_size, reduce_fp16, log_sizes as in the C++ library
    (zero.h). The constructor is collective.
    """

    def __init__(
        self, module: torch.nn.Module, sharded_optimizer: OSS | Sequence[OSS], process_group: Any = None, **options: Any
    ) -> None:
        several = isinstance(sharded_optimizer, (list, tuple))
        optimizers = list(sharded_optimizer) if several else [sharded_optimizer]
        for optimizer in optimizers:
            if not isinstance(optimizer, OSS):
                raise _C.UsageError(f"ShardedDataParallel: give a shoal.optim.OSS, not a {type(optimizer).__name__}")
        self.__dict__["_optimizers"] = optimizers  # they must outlive the core
        group = group_of(process_group)
        mirror = mirror_of(module)
        trained = [one for optimizer in optimizers for one in optimizer._parameters()]
        refuse_torch_ddp(module, "ShardedDataParallel", trained)
        require_constant_in_forward(module, "ShardedDataParallel")
        options = with_ignored_of_torch("ShardedDataParallel", module, options, {id(one) for one in trained})
        core = _C.ShardedDataParallelCore(mirror, [optimizer._core for optimizer in optimizers], group, options)
        super().__init__(module, mirror, core, parameters_where(module, set(options.get("ignored", ())).__contains__))
        for optimizer in optimizers:
            optimizer._reduced_to_owners = True
        self.__dict__["_optimizers"] = optimizers

    def refresh_trainable(self) -> None:
        """Adopts changes of requires_grad, dtype or device. Forward does so by itself. Collective."""
        self._core.refresh_trainable()

    def reduce(self) -> None:
        """Reduces gradients that are in grad and not reduced yet, without a backward. Collective."""
        self._core.reduce()
