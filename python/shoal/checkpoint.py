"""Checkpoints of trainings: the same files as the C++ library's, for any strategy and number of ranks.

training = shoal.checkpoint.TrainingState(model, optimizer)
shoal.checkpoint.load_latest("runs/a", training)
for step in range(first, last):
    ...
    if step % 1000 == 0:
        shoal.checkpoint.save_async("runs/a", training, step=step, keep_last=3)
training.wait()

Schedules of Python are not part of it: save schedule.state_dict() as text in `position`, and make the schedule before
loading: `initial_lr` of a param group, which a schedule made with last_epoch= asks for, is not part of it either. Neither is
what modules give by get_extra_state(), nor, which Loaded.exact does not know, the state of shoal.amp.GradScaler and of generators
other than torch's (`random`, NumPy): save these in `position`, too. Errors are the library's: CheckpointError for files, on every rank.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import _C
from ._mirror import Wrapped, mirror_of, refuse_torch_fsdp
from .distributed import group_of
from .nn.ddp import DistributedDataParallel, compare_in_forward
from .nn.decentralized import DecentralizedDataParallel
from .nn.fsdp import FullyShardedDataParallel
from .optim import DistributedOptimizer, FullyShardedOptimizer, LocalUpdates, OSS, ShardedOptimizer, ShardGossipOptimizer
from .optim._state import check_shapes

__all__ = ["Loaded", "TrainingState", "load", "load_latest", "load_module", "save", "save_async", "save_module"]


@dataclass(frozen=True)
class Loaded:
    """What was loaded. exact: the same strategy and number of ranks and no differences, so that training goes on as if it
    had not been interrupted, as far as a checkpoint has its state. position: what this rank passed to save(), bytes where they are no UTF-8. differences: one sentence each."""

    path: str
    step: int
    strategy: str
    ranks: int
    exact: bool
    position: str | bytes
    differences: list[str]


class TrainingState:
    """State of a training. Arguments, by strategy:

    (DistributedDataParallel, any optimizer, or OSS), (ShardedDataParallel, OSS), (DistributedOptimizer),
    (module, DistributedOptimizer), (FullyShardedDataParallel, FullyShardedOptimizer), (FullyShardedDataParallel,
    ShardGossipOptimizer), (DecentralizedDataParallel), (LocalUpdates), and (module, optimizer) where all ranks hold the same
    values, which a save compares (DisagreeError). Not with PyTorch's FullyShardedDataParallel and ZeroRedundancyOptimizer.

    process_group: of the last one, and of ShardGossipOptimizer, the group that was given to host_groups(); None: all ranks.
    """

    def __init__(self, *parts: Any, process_group: Any = None) -> None:
        for part in parts:
            _refuse(part)
        self._parts = parts
        self._optimizer = next((part for part in parts if isinstance(part, ShardedOptimizer)), None)
        modules = [part.module if isinstance(part, Wrapped) else part for part in parts if isinstance(part, torch.nn.Module)]
        self._mirrors = [mirror_of(module) for module in modules]
        self._core = _core_of(parts, process_group)
        self._modules = [*modules, *(part._module for part in parts if isinstance(part, (DistributedOptimizer, LocalUpdates)))]

    def wait(self) -> None:
        """Waits for a background save and raises its error. Collective."""
        self._core.wait()

    def saving(self) -> bool:
        """Whether a background save is running."""
        return self._core.saving()

    def _request(self, path: str | Path, options: dict[str, Any]) -> Callable[[], tuple[bytes, dict[str, Any]]]:
        """What C++ calls first, and tells all ranks if it fails on one of them."""

        def request() -> tuple[bytes, dict[str, Any]]:
            self._before()
            return _path(path), options

        return request

    def _before(self) -> None:
        for mirror in self._mirrors:  # a forward may have replaced buffers since; what else has changed is a UsageError
            mirror.refresh()
        for part in self._parts:
            _refuse(part)  # an optimizer in another one may have got a state
            if isinstance(part, DistributedOptimizer):
                part._mirror.refresh()
            if isinstance(part, LocalUpdates):
                part._core.read()
            elif isinstance(part, DecentralizedDataParallel):
                part._core.read_options()
        if self._optimizer is not None:
            self._optimizer._push()

    def _after_loading(self) -> None:
        self._after()
        for part in self._parts:
            if isinstance(part, DistributedDataParallel):
                compare_in_forward(part.parameters())

    def _after(self) -> None:
        for part in self._parts:
            if isinstance(part, LocalUpdates):
                part._core.write()
            elif isinstance(part, DecentralizedDataParallel):
                part._core.write_local()
        if self._optimizer is not None:
            self._optimizer._core.write_local()
            self._optimizer._pull()
            self._optimizer._check_local_state()
        for part in self._parts:
            optimizer = part._inner if isinstance(part, LocalUpdates) else part
            if isinstance(optimizer, torch.optim.Optimizer) and not isinstance(optimizer, ShardedOptimizer):
                check_shapes(optimizer)


def _refuse(part: Any) -> None:
    """UsageError for what holds other values or another state than a checkpoint would have."""
    if isinstance(part, torch.nn.Module):
        refuse_torch_fsdp(part, "TrainingState")
    optimizer = part._inner if isinstance(part, LocalUpdates) else part
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, ShardedOptimizer):
        return
    if isinstance(optimizer, torch.optim.LBFGS):
        raise _C.UsageError(
            "TrainingState: L-BFGS keeps lists in its state, and shoal saves tensors and numbers: use another optimizer, or save "
            "the module alone, with shoal.checkpoint.save_module()"
        )
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        _refuse_inner(optimizer, "optim")
    for name, value in vars(optimizer).items():
        values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        for inner in values:
            if isinstance(inner, torch.optim.Optimizer) and inner.state is not optimizer.state and inner.state:
                _refuse_inner(optimizer, name)


def _refuse_inner(optimizer: torch.optim.Optimizer, name: str) -> None:
    raise _C.UsageError(
        f"TrainingState: {type(optimizer).__name__} keeps state in another optimizer, its {name}, which a checkpoint would not "
        "have: instead of PyTorch's ZeroRedundancyOptimizer use shoal.optim.OSS; elsewhere give the optimizer in it"
    )


def _core_of(parts: tuple[Any, ...], process_group: Any) -> Any:
    if len(parts) == 1:
        part = parts[0]
        if isinstance(part, (DistributedOptimizer, DecentralizedDataParallel)):
            return _C.TrainingState(part._core)
        if isinstance(part, LocalUpdates):
            return _C.TrainingState(part._core.core)
    if len(parts) == 2:
        model, optimizer = parts
        if isinstance(optimizer, DistributedOptimizer) and model is optimizer._module:
            return _C.TrainingState(optimizer._core)
        if isinstance(model, FullyShardedDataParallel) and isinstance(optimizer, ShardGossipOptimizer):
            return _C.TrainingState(model._core, optimizer._core, group_of(process_group))
        if isinstance(model, FullyShardedDataParallel) and isinstance(optimizer, FullyShardedOptimizer):
            return _C.TrainingState(model._core, optimizer._core)
        if isinstance(model, Wrapped) and isinstance(optimizer, OSS):
            return _C.TrainingState(model._core, optimizer._core)
        plain = isinstance(optimizer, torch.optim.Optimizer) and not isinstance(
            optimizer, (ShardedOptimizer, LocalUpdates)
        )
        if isinstance(model, DistributedDataParallel) and plain:
            return _C.TrainingState(model._core, optimizer)
        if isinstance(model, torch.nn.Module) and not isinstance(model, Wrapped) and plain:
            return _C.TrainingState(mirror_of(model), optimizer, group_of(process_group))
    kinds = ", ".join(type(part).__name__ for part in parts)
    raise _C.UsageError(
        f"TrainingState({kinds}): these parts do not make a training: give the wrapper and its optimizer, "
        "or the one that has both (DistributedOptimizer, DecentralizedDataParallel, LocalUpdates); see help(shoal.checkpoint.TrainingState)"
    )


def save(run: str | Path, training: TrainingState, **options: Any) -> None:
    """Saves to RUN/step-N. Options: step, position (text or bytes), keep_last, snapshot_mb. Collective."""
    training._core.save(training._request(run, options))


def save_async(run: str | Path, training: TrainingState, **options: Any) -> None:
    """Saves in the background: returns when the values are copied. Options as for save(). Collective.

    The next save or wait() raises the error of one that has failed. Call wait() before the program ends: without it, no more than
    a warning tells of the last one."""
    training._core.save_async(training._request(run, options))
    _saving.add(training)


_saving: weakref.WeakSet[TrainingState] = weakref.WeakSet()
os.register_at_fork(after_in_child=_saving.clear)  # the child has not the thread that saves


@atexit.register
def _end_saves() -> None:
    """Waits for saves in the background: the interpreter ends without destroying what modules or cycles still hold."""
    for training in list(_saving):
        try:
            training.wait()
        except Exception as error:
            print(f"shoal: a checkpoint's background save has failed, and nobody called wait(): {error}", file=sys.stderr)


def load(path: str | Path, training: TrainingState, **options: Any) -> Loaded:
    """Loads a checkpoint, the latest of a run, a safetensors file, or a .pt file. Options: partial, model_only, rates,
    options, verify. Collective."""
    loaded = training._core.load(training._request(path, options))
    training._after_loading()
    return _loaded(loaded, training._modules)


def load_latest(run: str | Path, training: TrainingState, **options: Any) -> Loaded | None:
    """Loads the latest checkpoint of a run if it has one; None: it has none, and nothing has changed. Collective."""
    loaded = training._core.load_latest(training._request(run, options))
    training._after_loading()
    return None if loaded is None else _loaded(loaded, training._modules)


def save_module(file: str | Path, module: torch.nn.Module) -> None:
    """Saves a module's parameters and buffers to one .safetensors or .pt file. Not collective."""
    refuse_torch_fsdp(module, "save_module")
    _C.save_module(_path(file), mirror_of(module))


def load_module(path: str | Path, module: torch.nn.Module, **options: Any) -> Loaded:
    """Loads parameters and buffers of any checkpoint into a module without a wrapper. Options: partial, verify, and prefix, of
    names in the checkpoint that the module's lack, such as "module." in files of PyTorch's wrappers. Not collective."""
    refuse_torch_fsdp(module, "load_module")
    return _loaded(_C.load_module(_path(path), mirror_of(module), options), [module])


def _path(path: str | Path) -> bytes:
    encoded = os.fsencode(path)
    if not encoded:
        raise _C.UsageError("the path of the checkpoint is empty: give the folder of the run, or a file")
    return encoded


def _loaded(found: dict[str, Any], modules: Iterable[torch.nn.Module]) -> Loaded:
    own = {
        name or "the module"
        for module in modules
        for name, part in module.named_modules()
        if type(part).get_extra_state is not torch.nn.Module.get_extra_state
    }
    for name in sorted(own):
        found["differences"].append(f"{name} has a state of its own, by get_extra_state(), which checkpoints do not hold")
    return Loaded(**{**found, "exact": found["exact"] and not own})
