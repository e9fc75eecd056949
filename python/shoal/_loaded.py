"""What wrappers do when a program loads values into a module, which load_state_dict() writes in place."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch


class _Hook:
    """A hook of load_state_dict that calls `act` with the owner, while it lives. Copies of the module call nobody."""

    def __init__(self, owner: Any, act: Callable[..., None] | None) -> None:
        self._owner = None if owner is None else weakref.ref(owner)
        self._act = act

    def __call__(self, *args: Any) -> None:
        owner = self._owner() if self._owner is not None else None
        if owner is not None and self._act is not None:
            self._act(owner, *args)

    def __deepcopy__(self, memo: Any) -> _Hook:
        return _Hook(None, None)

    def __reduce__(self) -> Any:
        return _Hook, (None, None)


def tell_of_loading(module: torch.nn.Module, core: Any) -> None:
    """Tells the core before and after each load_state_dict() of the module or a part of it, while the core lives."""
    before = _Hook(core, lambda core, *rest: core.before_loading())
    after = _Hook(core, lambda core, *rest: core.parameters_loaded())
    for part in module.modules():
        part.register_load_state_dict_pre_hook(before)
        part.register_load_state_dict_post_hook(after)


def load_in_full_precision(module: torch.nn.Module, parameters: Iterable[torch.Tensor], owner: Any) -> None:
    """Lets load_state_dict() of the module or a part of it give these parameters the precision of the values, while the owner
    lives: a wrapper that has converted them and keeps the values that they had."""
    converted = {id(one) for one in parameters}
    hook = _Hook(owner, functools.partial(_take_precision, converted))
    for part in module.modules():
        part.register_load_state_dict_pre_hook(hook)


def _take_precision(
    converted: set[int], owner: Any, module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any
) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        if id(parameter) not in converted:
            continue
        value = state_dict.get(prefix + name)
        if not isinstance(value, torch.Tensor) or value.shape != parameter.shape or not value.is_floating_point():
            continue
        if value.dtype != parameter.dtype and torch.promote_types(value.dtype, parameter.dtype) == value.dtype:
            parameter.data = value.detach().to(parameter.device, copy=True)
