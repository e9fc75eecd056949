"""Modules as C++ sees them."""

from __future__ import annotations

import weakref

import torch

from . import _C


class Wrapped(torch.nn.Module):
    """Base of all wrappers."""


# Mirrors of modules that live, so that two wrappers of one module know of each other.
_mirrors: weakref.WeakKeyDictionary[torch.nn.Module, _C.Mirror] = weakref.WeakKeyDictionary()


def mirror_of(module: torch.nn.Module) -> _C.Mirror:
    """The module as C++ sees it."""
    if isinstance(module, Wrapped):
        raise _C.UsageError(f"the module is a {type(module).__name__} already; wrap the module in it: model.module")
    if not isinstance(module, torch.nn.Module):
        raise _C.UsageError(f"give a torch.nn.Module, not a {type(module).__name__}")
    known = _mirrors.get(module)
    if known is not None:
        try:
            known.refresh()
            return known
        except _C.UsageError:  # it has changed since, and no wrapper could have been used after that
            pass
    _mirrors[module] = _C.Mirror(module)
    return _mirrors[module]
