"""Modules as C++ sees them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Container, Iterable
from typing import Any

import torch

from . import _C
from ._new import make_new_tensors_work


class Wrapped(torch.nn.Module):
    """Base of all wrappers."""


# Mirrors of modules that live, so that two wrappers of one module know of each other. Wrappers keep them.
_mirrors: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[_C.Mirror]] = weakref.WeakKeyDictionary()


def mirror_of(module: torch.nn.Module) -> _C.Mirror:
    """The module as C++ sees it. Keep it as long as it is in use."""
    if isinstance(module, Wrapped):
        raise _C.UsageError(f"give the module in the {type(module).__name__}, model.module, not the wrapper")
    if not isinstance(module, torch.nn.Module):
        raise _C.UsageError(f"give a torch.nn.Module, not a {type(module).__name__}")
    make_new_tensors_work()
    kept = _mirrors.get(module)
    known = None if kept is None else kept()
    if known is not None:
        try:
            known.refresh()
            return known
        except _C.UsageError:  # it has changed since, and no wrapper could have been used after that
            pass
    mirror = _C.Mirror(module)
    _mirrors[module] = weakref.ref(mirror)
    return mirror


def parameters_where(module: torch.nn.Module, named: Callable[[str], bool]) -> set[int]:
    """ids of the parameters of which some name is such; a tied one has several."""
    return {id(parameter) for name, parameter in module.named_parameters(remove_duplicate=False) if named(name)}


def with_ignored_of_torch(
    owner: str, module: torch.nn.Module, options: dict[str, Any], trained: Container[int] = (), option: str = "ignored"
) -> dict[str, Any]:
    """The options, with those parameters and buffers ignored that the program has PyTorch's DistributedDataParallel ignore, by an
    attribute of the module. UsageError for one of `trained` (ids), the parameters of an optimizer of all ranks."""
    named = {name.removeprefix(".") for name in getattr(module, "_ddp_params_and_buffers_to_ignore", None) or ()}
    if not named:
        return options
    given = list(options.get(option, ()))
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    elsewhere = {id(tensor) for name, tensor in tensors if name not in named}  # a tied one has to be named in full
    names = [name for name, tensor in tensors if name in named and id(tensor) not in elsewhere and name not in given]
    for name, tensor in tensors:
        if name in names and id(tensor) in trained:
            raise _C.UsageError(
                f"{owner}: the module's _ddp_params_and_buffers_to_ignore, for PyTorch's DistributedDataParallel, has the parameter "
                f"{name}, which the optimizer here would train as one of all ranks: use DistributedDataParallel, or delete the "
                f"attribute, give {option}=[...] and an optimizer of your own for it"
            )
    return {**options, option: [*given, *names]} if names else options


def refuse_torch_ddp(module: torch.nn.Module, wrapper: str, used: Iterable[torch.Tensor]) -> None:
    """UsageError if PyTorch's DistributedDataParallel is in it and has a parameter of those that the wrapper trains: both would
    reduce its gradient, and the wrapper has used it up by then."""
    trained = {id(parameter) for parameter in used if parameter.requires_grad}
    for name, part in module.named_modules():
        is_ddp = isinstance(part, torch.nn.parallel.DistributedDataParallel)
        if is_ddp and any(id(parameter) in trained for parameter in part.parameters()):
            raise _C.UsageError(
                f"{wrapper}: {name or 'the module'} is PyTorch's DistributedDataParallel, which reduces gradients, too: give the "
                "module in it, model.module"
            )


def refuse_torch_ddp_around(model: Wrapped, ignored: Collection[int]) -> None:
    """UsageError in a forward of PyTorch's DistributedDataParallel that reduces the gradients of this wrapper, too: it would take
    for this rank's own what the wrapper has reduced."""
    around = getattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
    if around is None or not torch.is_grad_enabled():
        return
    reduced = {id(parameter) for parameter in getattr(around, "_module_parameters", around.parameters())}
    if any(id(one) in reduced and id(one) not in ignored for one in model.parameters() if one.requires_grad):
        raise _C.UsageError(
            f"{type(model).__name__}: PyTorch's DistributedDataParallel is around this model and would reduce its gradients a second "
            "time: give the module to one of them alone (Accelerate: only the other objects to prepare())"
        )


def refuse_torch_fsdp(module: torch.nn.Module, what: str) -> None:
    """UsageError if PyTorch's FullyShardedDataParallel is in it and its parameters are this rank's shards at present."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    for name, part in module.named_modules():
        if isinstance(part, kind):
            whole = "SUMMON_FULL_PARAMS" in str(getattr(part, "training_state", ""))  # within summon_full_params()
            if whole or "NO_SHARD" in str(getattr(part, "sharding_strategy", "")):
                continue
            raise _C.UsageError(
                f"{what}: {name or 'the module'} is PyTorch's FullyShardedDataParallel, whose parameters are shards that this rank "
                "alone has: save with torch.distributed.checkpoint, or train with shoal.nn.FullyShardedDataParallel"
            )


def require_constant_in_forward(module: torch.nn.Module, wrapper: str) -> None:
    """UsageError if forward changes the rows of this rank's batch: ranks would no longer hold the same parameters."""
    for name, part in module.named_modules():
        embeds = isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag))
        if not embeds or part.max_norm is None:
            continue
        raise _C.UsageError(
            f"{wrapper}: {name or 'the module'} is an embedding with max_norm, whose forward changes the rows that this rank "
            "looks up, so that ranks would no longer hold the same parameters: leave max_norm out, and after each step() call "
            "weight.data.renorm_(2, 0, max_norm) on all ranks"
        )
