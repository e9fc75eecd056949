"""Join: training with different numbers of batches per rank."""

from __future__ import annotations

from typing import Any

import torch

from . import _C
from ._mirror import Wrapped, mirror_of
from .nn.decentralized import DecentralizedDataParallel
from .nn.sync_batch_norm import SyncBatchNorm
from .optim import DistributedOptimizer


class Join:
    """A loop that runs until the last rank has run out of batches.

    batches = iter(loader)
    with shoal.Join(model) as join:
        batch = next(batches, None)
        while join.next(batch is not None):
            if join.active:
                loss_fn(model(batch)).backward()
                batch = next(batches, None)
            else:
                join.shadow()      # matches forward and backward of the other ranks
            optimizer.step()       # on every rank, and so are schedules
            optimizer.zero_grad()

    Takes the wrappers of one process group, and DistributedOptimizers. Options: divide_by_initial_world_size (a mean counts
    ranks without a batch as zeros; False: it leaves them out) and throw_on_early_termination (InputsExhausted on all ranks
    as soon as one has no batch). After the last step every rank has the buffers, and the parameters if every rank holds
    all, of the lowest rank that took part in it. A rank whose batch cannot be made after next(True) calls abandon_step() of
    each wrapper, and the others get StepAbandoned.
    """

    def __init__(self, *joinables: Any, **options: Any) -> None:
        if not joinables or not all(isinstance(one, (Wrapped, DistributedOptimizer)) for one in joinables):
            kinds = ", ".join(type(one).__name__ for one in joinables) or "nothing"
            raise _C.UsageError(f"Join({kinds}): give wrappers of shoal.nn, or DistributedOptimizers")
        for one in joinables:
            if isinstance(one, DecentralizedDataParallel):
                raise _C.UsageError(
                    "Join: ranks of a DecentralizedDataParallel do not wait for each other, so one may end before the others: call "
                    "model.leave() on it once it has no batch"
                )
            inside = one.module.modules() if isinstance(one, Wrapped) else one._module.modules()
            if any(isinstance(module, (SyncBatchNorm, torch.nn.SyncBatchNorm)) for module in inside):
                raise _C.UsageError(
                    "Join: the module has a SyncBatchNorm, whose forward communicates, which a rank without a batch cannot "
                    "match; give every rank the same number of batches"
                )
        self._joinables = joinables
        self._options = options
        self._scope: Any = None

    def __enter__(self) -> Join:
        self._scope = _C.Join([one._core for one in self._joinables], self._options)
        return self

    def __exit__(self, *error: Any) -> None:
        self._scope = None

    def next(self, has_batch: bool) -> bool:
        """Whether some rank has a batch, so that another step follows. Collective."""
        scope = self._entered()
        for one in [] if has_batch else self._joinables:  # forward may have replaced buffers, which the end hands out
            mirror_of(one.module if isinstance(one, Wrapped) else one._module)
        return scope.next(has_batch)

    @property
    def active(self) -> bool:
        """Whether this rank has a batch in this step."""
        return self._entered().active()

    @property
    def active_ranks(self) -> int:
        """Number of ranks that have a batch in this step."""
        return self._entered().active_ranks()

    def shadow(self) -> None:
        """Communication of a step for which this rank has no batch, of all wrappers in order."""
        self._entered()
        for one in self._joinables:
            _C.shadow(one._core)

    def _entered(self) -> Any:
        if self._scope is None:
            raise _C.UsageError("Join: use it within `with shoal.Join(...) as join:`")
        return self._scope
