"""What wrappers do when a program loads values into a module, which load_state_dict() writes in place."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from . import _C


class _Hook:
    """A hook of load_state_dict that calls `act` with the owner, while it lives. Copies of the module call nobody."""

    def __init__(self, owner: Any, act: Callable[..., None] | None) -> None:
        self._owner = None if owner is None else weakref.ref(owner)
        self._act = act

    def lives(self) -> bool:
        return self._owner is not None and self._owner() is not None

    def __call__(self, *args: Any) -> None:
        owner = self._owner() if self._owner is not None else None
        if owner is not None and self._act is not None:
            self._act(owner, *args)

    def __deepcopy__(self, memo: Any) -> _Hook:
        return _Hook(None, None)

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")  # does nothing, and needs no shoal where the module is read


def _add_hooks(
    module: torch.nn.Module, owner: Any, before: Callable[..., None], after: Callable[..., None] | None = None
) -> None:
    """Hooks of each load_state_dict() of the module or a part of it, in place of those whose owners are gone. These do nothing,
    and cannot go with their owners: that may be in the middle of a load, which walks over the hooks."""
    for part in module.modules():
        _remove_dead(part._load_state_dict_pre_hooks)
        _remove_dead(part._load_state_dict_post_hooks)
        part.register_load_state_dict_pre_hook(_Hook(owner, before))
        if after is not None:
            part.register_load_state_dict_post_hook(_Hook(owner, after))


def _remove_dead(hooks: dict[int, Any]) -> None:
    for key, value in list(hooks.items()):
        hook = getattr(value, "hook", value)  # PyTorch wraps those before a load
        read = isinstance(getattr(hook, "__self__", None), contextlib.nullcontext)  # with a module, see __reduce__
        if read or (isinstance(hook, _Hook) and not hook.lives()):
            del hooks[key]


class Loads:
    """Loads into parameters since the last clear(). Those that together leave the values as they were do not count, such as
    averages that rank 0 swaps in and out for an evaluation: the other ranks know nothing of them. One that changes nothing by
    itself counts, because other ranks may have got these values by it."""

    def __init__(self, module: torch.nn.Module, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = {id(parameter): parameter for parameter in parameters}
        self.clear()
        _add_hooks(module, self, Loads._begin, Loads._end)

    def clear(self) -> None:
        self._first: dict[int, int] = {}  # digests before the first load, by id
        self._last: dict[int, int] = {}  # before the load in progress
        self._depth = 0  # of modules that it has begun with
        self._same = False

    def count(self) -> bool:
        self._depth = 0  # a load that has failed is over
        return self._same or any(self._digest(key) != value for key, value in self._first.items())

    def _digest(self, key: int) -> int:
        return _C.digest(self._parameters[key].detach())

    def _begin(self, module: torch.nn.Module, *rest: Any) -> None:
        if self._depth == 0:
            self._last = {}
        self._depth += 1
        for parameter in module.parameters(recurse=False):
            key = id(parameter)
            if key in self._parameters:
                if key not in self._last:  # a tied one is loaded under each of its names
                    self._last[key] = self._digest(key)
                self._first.setdefault(key, self._last[key])

    def _end(self, module: torch.nn.Module, *rest: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth == 0 and all(self._digest(key) == value for key, value in self._last.items()):
            self._same = True


def tell_of_loading(module: torch.nn.Module, core: Any) -> None:
    """Tells the core before and after each load_state_dict() of the module or a part of it, while the core lives."""
    _add_hooks(module, core, lambda core, *rest: core.before_loading(), lambda core, *rest: core.parameters_loaded())


def load_in_full_precision(module: torch.nn.Module, parameters: Iterable[torch.Tensor], owner: Any) -> None:
    """Lets load_state_dict() of the module or a part of it give these parameters the precision of the values, while the owner
    lives: a wrapper that has converted them and keeps the values that they had."""
    converted = {id(one) for one in parameters}
    _add_hooks(module, owner, functools.partial(_take_precision, converted))


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
