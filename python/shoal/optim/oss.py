"""OSS (ZeRO-1 and, with ShardedDataParallel, ZeRO-2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from .. import _C
from ..distributed import group_of
from ..nn._torch_options import ZERO, without_torch_options
from ..nn.ddp import note_equal_values
from ._recipe import OptimizerClass, param_groups_of, recipe_of
from ._sharded import ShardedOptimizer

_options = ("broadcast_buffer_size", "broadcast_fp16")


class OSS(ShardedOptimizer):
    """An optimizer with state sharded over ranks by whole parameters, after fairscale's class of this name and
    torch.distributed.optim.ZeroRedundancyOptimizer.

    optimizer = shoal.optim.OSS(net.parameters(), torch.optim.AdamW, lr=1e-3)

    Takes any optimizer class that updates parameters independently of each other. Use it with
    shoal.nn.DistributedDataParallel, or with shoal.nn.ShardedDataParallel, which shards gradients too. Other keyword
    arguments than broadcast_buffer_size and broadcast_fp16 (zero.h) are those of the class; options of
    ZeroRedundancyOptimizer are taken where their value changes nothing. Param groups may be added later. The constructor is
    collective and broadcasts rank 0's values.
    """

    def __init__(
        self, params: Iterable[Any], optimizer_class: OptimizerClass, process_group: Any = None, **defaults: Any
    ) -> None:
        defaults = without_torch_options("OSS", defaults, ZERO)
        options = {name: defaults.pop(name) for name in _options if name in defaults}
        recipe = recipe_of("OSS", param_groups_of(params), optimizer_class, defaults, options=_options)
        self._recipe = (optimizer_class, defaults)
        self._reduced_to_owners = False  # by a ShardedDataParallel
        group = group_of(process_group)
        super().__init__(recipe, _C.OSSCore(*recipe.core_arguments(), group, options), group)

    def _update(self, closure: Callable[[], Any] | None) -> Any:
        loss = super()._update(closure)
        note_equal_values(self._parameters())
        return loss

    def clip_grad_norm(self, max_norm: float, norm_type: float | str = 2.0) -> torch.Tensor:
        """Clips the gradients to a total norm over all ranks' shares; returns the norm before. norm_type: also "inf".
        Collective."""
        return torch.tensor(self._core.clip_grad_norm(float(max_norm), float(norm_type)), device="cpu")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops or zeroes the gradients."""
        if self._reduced_to_owners:
            super().zero_grad(set_to_none)  # torch.optim's, with fused or foreach, reads them
        else:
            torch.optim.Optimizer.zero_grad(self, set_to_none)

    def refresh_trainable(self) -> None:
        """Adopts changes of requires_grad and balances the shares again. Collective."""
        self._core.refresh_trainable()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, with rank 0's values. Collective."""
        if self._core is None:
            super().add_param_group(param_group)
            return
        optimizer_class, defaults = self._recipe
        recipe = recipe_of("OSS", param_groups_of([param_group]), optimizer_class, defaults)
        group = recipe.groups[0]
        self._core.add_param_group(group, recipe.name)
        self._learn_kinds(recipe)
        core, self._core = self._core, None
        try:
            super().add_param_group(group)
        finally:
            self._core = core
        self._known.append(list(group["params"]))

    @property
    def consolidate_state_dict(self) -> None:
        """AttributeError: of ZeroRedundancyOptimizer and fairscale, whose state_dict() is then called on one rank. Programs for
        both kinds of optimizers ask with hasattr()."""
        raise AttributeError(
            "OSS has no consolidate_state_dict(): call state_dict(), which has the whole state, on every rank, and save it on one"
        )

    def _own_gradients(self) -> list[torch.Tensor] | None:
        return self._core.own_gradients() if self._reduced_to_owners else None

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _names(self) -> list[str]:
        return [str(index) for index in range(len(self._parameters()))]

    def _named_state(self) -> dict[str, dict[str, Any]]:
        return self._core.state_dict(self._parameters(), None)

    def _load_named_state(self, state: dict[str, dict[str, Any]]) -> None:
        self._core.load_state_dict(self._parameters(), state)
