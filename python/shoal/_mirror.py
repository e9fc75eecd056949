"""Modules as C++ sees them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable

import torch

from . import _C
from ._new import make_new_tensors_work


class Wrapped(torch.nn.Module):
    """Base of all wrappers."""


# Mirrors of modules that live, so that two wrappers of one module know of each other. Wrappers keep them: a mirror refers to the
# module's children, and a child may refer to the module.
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
