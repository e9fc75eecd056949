"""DistributedOptimizer, after Megatron-LM."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from .. import _C
from .._mirror import mirror_of, refuse_torch_ddp, require_constant_in_forward, with_ignored_of_torch
from ..distributed import group_of
from ._recipe import OptimizerClass, groups_of_module, recipe_of
from ._sharded import ShardedOptimizer
from ._state import names_in

_options = (
    "overlap_grad_reduce",
    "overlap_param_gather",
    "reuse_grad_buf_for_param_gather",
    "shard_within_host",
    "grad_reduce_in_fp32",
    "clip_grad",
    "log_num_zeros_in_grad",
    "scaler",
    "ignored",
    "communication_hook",
    "bucket_size",
)


# Optimizers in use: two of them would move the same gradients.
_optimizers: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[DistributedOptimizer]] = weakref.WeakKeyDictionary()


class DistributedOptimizer(ShardedOptimizer):
    """Gradients in contiguous buffers, of which each rank reduces, updates and publishes an equal range.

    optimizer = shoal.optim.DistributedOptimizer(net, torch.optim.AdamW, lr=1e-3)
    ...
    loss_fn(net(x), y).backward()  # the module needs no wrapper
    optimizer.step()
    optimizer.zero_grad()

    16-bit parameters have float32 main copies. After backward, grad is a tensor without memory: clip with the option
    clip_grad, or read main_grad(). params and element_wise as for FullyShardedOptimizer. Options: overlap_grad_reduce,
    overlap_param_gather, reuse_grad_buf_for_param_gather, shard_within_host, grad_reduce_in_fp32, clip_grad,
    log_num_zeros_in_grad, scaler (a dictionary), ignored, communication_hook, bucket_size as in the C++ library (megatron.h); other keyword
    arguments are those of the class. The constructor is collective.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer_class: OptimizerClass,
        process_group: Any = None,
        params: Iterable[Any] | None = None,
        *,
        element_wise: bool | None = None,
        **defaults: Any,
    ) -> None:
        options = {name: defaults.pop(name) for name in _options if name in defaults}
        if module in _optimizers and _optimizers[module]() is not None:
            gc.collect()  # schedules and optimizers refer to each other
        if module in _optimizers and _optimizers[module]() is not None:
            raise _C.UsageError(
                "DistributedOptimizer: another one of this module is still in use (by a schedule, or under another name); "
                "drop it first, or change its param_groups"
            )
        mirror = mirror_of(module)
        groups = groups_of_module(module, params, options.get("ignored", ()))
        trained = [one for group in groups for one in group["params"]]
        refuse_torch_ddp(module, "DistributedOptimizer", trained)
        options = with_ignored_of_torch("DistributedOptimizer", module, options, {id(one) for one in trained})
        recipe = recipe_of("DistributedOptimizer", groups, optimizer_class, defaults, element_wise, _options)
        group = group_of(process_group)
        require_constant_in_forward(module, "DistributedOptimizer")
        core = _C.DistributedOptimizerCore(mirror, *recipe.core_arguments(), recipe.element_wise, group, options)
        super().__init__(recipe, core, group)
        self._must_scale = options.get("scaler") is not None
        self._mirror = mirror
        self._module = module
        _optimizers[module] = weakref.ref(self)

    def _update(self, closure: Any) -> Any:
        self._mirror.refresh()
        return super()._update(closure)

    @contextlib.contextmanager
    def no_sync(self, accumulate: bool = True) -> Iterator[None]:
        """Scope in which backward only accumulates into the gradient buffers."""
        scope = self._core.no_sync() if accumulate else None
        try:
            yield
        finally:
            if scope is not None:
                scope.end()

    def backward(self, loss_sum: torch.Tensor, weight: float) -> None:
        """Backward of a loss that is a sum over `weight` samples or tokens."""
        self._core.backward(loss_sum, weight)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the scaler's factor; without a scaler, the loss."""
        self._must_scale = False
        return self._core.scale_loss(loss)

    def reduce_model_grads(self) -> None:
        """Reduces the accumulated gradients, with overlap_grad_reduce=False. Collective."""
        self._core.reduce_model_grads()

    def finish_param_sync(self) -> None:
        """Waits for the parameters of other ranks (overlap_param_gather)."""
        self._core.finish_param_sync()

    def abandon_step(self) -> None:
        """Ends a step that this rank cannot finish: the other ranks get StepAbandoned, whose handler may call this too."""
        self._core.abandon_step(isinstance(sys.exc_info()[1], _C.StepAbandoned))

    def main_grad(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The parameter's gradient in the gradient buffer."""
        return self._core.main_grad(parameter)

    def _names(self) -> list[str]:
        return names_in(self._mirror, self.param_groups)
