"""The optimizer for FullyShardedDataParallel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .. import _C
from ..nn.fsdp import FullyShardedDataParallel
from ._recipe import OptimizerClass, Recipe, param_groups_of, recipe_of
from ._sharded import ShardedOptimizer
from ._state import names_in


class FullyShardedOptimizer(ShardedOptimizer):
    """Runs an optimizer of any class on this rank's shards of a FullyShardedDataParallel.

    optimizer = shoal.optim.FullyShardedOptimizer(model, torch.optim.AdamW, lr=3e-4)

    params: parameters or param groups, as for torch.optim; None: all that the wrapper trains. clip_grad: maximum norm of
    all gradients together; 0: no clipping. scaler: options of a loss scaler, such as {"initial_scale": 65536}, for
    float16. element_wise: whether the class updates each element by itself; None: known for torch.optim's classes, and
    False for others, which need a wrapper with shard_by_parameter=True. Other keyword arguments are those of the class.
    The constructor is collective.
    """

    def __init__(
        self,
        model: FullyShardedDataParallel,
        optimizer_class: OptimizerClass,
        params: Iterable[Any] | None = None,
        *,
        clip_grad: float = 0.0,
        scaler: dict[str, Any] | None = None,
        element_wise: bool | None = None,
        **defaults: Any,
    ) -> None:
        self._check_model(model)
        groups = param_groups_of(model.trainable_parameters() if params is None else params)
        recipe = recipe_of(type(self).__name__, groups, optimizer_class, defaults, element_wise)
        super().__init__(recipe, self._make_core(model, recipe, clip_grad, scaler), model._group)
        self._must_scale = scaler is not None
        self._mirror = model._mirror
        self._parallel = model._core

    def _make_core(self, model: FullyShardedDataParallel, recipe: Recipe, clip_grad: float, scaler: Any) -> Any:
        options = {"clip_grad": clip_grad, "scaler": scaler}
        return _C.FullyShardedOptimizerCore(model._core, *recipe.core_arguments(), recipe.element_wise, options)

    def _check_model(self, model: Any) -> None:
        if not isinstance(model, FullyShardedDataParallel):
            name = type(self).__name__
            raise _C.UsageError(
                f"{name}: its first argument is the FullyShardedDataParallel, not its parameters: {name}(model, ...)"
            )

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the scaler's factor; without a scaler, the loss."""
        self._must_scale = False
        return self._core.scale_loss(loss)

    def _own_gradients(self) -> list[torch.Tensor] | None:
        self._check_gradients_by_hand()  # which the core takes for its own from here on
        return self._parallel.summed_gradients()

    def _names(self) -> list[str]:
        return names_in(self._mirror, self.param_groups)
