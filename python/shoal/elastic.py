"""Training that goes on when ranks die, and that ranks may join."""

from __future__ import annotations

import base64
import io
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, Protocol, TypeVar

import torch

from . import _C, distributed
from ._C import CommError, ElasticChange, UsageError
from ._draws import SaidSamples
from .data import DistributedSampler
from .distributed import group_of
from .nn import DistributedDataParallel, FullyShardedDataParallel, ShardedDataParallel
from .nn._wrapper import Wrapper
from .nn.sync_batch_norm import SyncBatchNorm
from .optim import OSS, DistributedOptimizer, FullyShardedOptimizer, LocalUpdates, ShardedOptimizer, ShardGossipOptimizer

__all__ = ["Elastic"]

Result = TypeVar("Result")


class HasState(Protocol):
    """Schedules, loss scalers, and whatever else has a state."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any) -> Any: ...


class Elastic:
    """A loop whose ranks may die at any moment: the others go on in memory, with the bits of the last complete step.

    elastic = shoal.Elastic(model, optimizer, sampler)  # or DistributedOptimizer's, LocalUpdates' module
    for epoch in range(elastic.first_epoch, epochs):
        sampler.set_epoch(epoch)
        while elastic.in_epoch():  # again with each change of the ranks
            for x, y in DataLoader(dataset, batch_size=64, sampler=sampler):
                def compute():
                    loss_fn(model(x), y).backward()
                if not elastic.step(len(x), compute, optimizer.step):
                    break  # the ranks have changed, and the loader has the former division
                optimizer.zero_grad()

    When the ranks change, the default process group is made again, and earlier groups end (CommError). A process that
    comes (`shoal launch --elastic MIN:MAX`) is rank 0 of 1 until this constructor has returned, without a checkpoint.

    min_ranks: JobLost if fewer are left. straggler_seconds, silent_host_seconds: after which a rank that does nothing
    is killed (0: never), and a silent host left out. keep_global_batch, batch_slices: samples of a step over all ranks that
    stay, and into how many parts (begin, end) for `compute` they are divided. tensors, state: what a newcomer gets;
    state has objects with state_dict() and load_state_dict(): schedules, a GradScaler. on_change: called with an
    ElasticChange, but in newcomers. metrics: file of changes. checkpoints: folder whose last one JobLost names.

    UsageError names what is not supported. Collective, in a newcomer with the ranks that it comes to. For one thread.
    docs/guides/elastic.md says more, and "Elastic training" in docs/python.md.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        sampler: DistributedSampler | None = None,
        *,
        min_ranks: int = 1,
        straggler_seconds: float = 0,
        silent_host_seconds: float = 10,
        keep_global_batch: int = 0,
        batch_slices: int = 0,
        tensors: Sequence[torch.Tensor] = (),
        state: Mapping[str, HasState] | None = None,
        on_change: Callable[[ElasticChange], Any] | None = None,
        metrics: str | PathLike[str] = "",
        checkpoints: str | PathLike[str] = "",
    ) -> None:
        _require_supported(model, optimizer, sampler)
        self._model = model
        self._optimizer = optimizer
        self._told = on_change
        self._by_slice = keep_global_batch != 0
        self._sampler = sampler
        self._said = SaidSamples()
        self._trainer: _C.ElasticTrainer | None = None
        own = weakref.ref(self)

        def changed(change: ElasticChange) -> None:
            elastic = own()
            if elastic is not None:
                elastic._follow()
                elastic._tell(change)

        options = {
            "min_ranks": min_ranks,
            "straggler_seconds": straggler_seconds,
            "silent_host_seconds": silent_host_seconds,
            "keep_global_batch": keep_global_batch,
            "batch_slices": batch_slices,
            "tensors": list(tensors),
            "metrics": metrics,
            "checkpoints": checkpoints,
            "on_change": changed,
        }
        objects = dict(state or {})
        _require_no_optimizer(objects)
        self._scalers = [one for one in objects.values() if isinstance(one, torch.amp.GradScaler)]
        options |= {"save_state": lambda: _text_of(objects), "load_state": lambda text: _load(objects, text)}
        options["state_has_scaler"] = bool(self._scalers)
        core = None if sampler is None else sampler._core
        self._push()
        if isinstance(optimizer, (DistributedOptimizer, LocalUpdates)):
            self._trainer = _C.ElasticTrainer(optimizer._core, core, options)
        else:
            assert isinstance(model, Wrapper)
            if isinstance(optimizer, ShardGossipOptimizer):
                self._trainer = _C.ElasticTrainer(group_of(None), model._core, optimizer._core, core, options)
            else:
                own_optimizer = optimizer._core if isinstance(optimizer, ShardedOptimizer) else optimizer
                self._trainer = _C.ElasticTrainer(model._core, own_optimizer, core, options)
        self._end = weakref.finalize(self, self._trainer.close)
        if self._trainer.joining():
            if isinstance(optimizer, ShardedOptimizer):
                optimizer._pull()
            self._follow()

    def in_epoch(self) -> bool:
        """True at the beginning of a pass through the samples, after sampler.set_epoch(), and again after each change of the
        ranks while samples are left: the loop then makes a new loader. False at the end of the pass, which is wherever the loop
        asks again without a change: one that leaves `while elastic.in_epoch()` itself must call set_epoch() for the next pass.
        Ranks must make the same passes."""
        self._said.end_pass()
        return self._running.in_epoch()

    def step(
        self,
        samples: int,
        compute: Callable[..., Any],
        update: Callable[[], Any],
        prepare: Callable[[], Any] | None = None,
    ) -> bool:
        """One step with `samples` samples of this rank: compute() runs forward and backward, update() the optimizer. True: it is
        complete on all ranks. False: the ranks have changed, and in_epoch() says whether to make another loader. `samples` are those
        that the sampler gave for the batch: of a dict, len(batch["x"]) and not len(batch), which UsageError says after a step or a pass.

        compute() may run partly, and again for the same samples on any rank; update() runs once per complete step and must not
        communicate. prepare() runs between them, and may: clipping of gradients belongs there, or in compute(). With
        keep_global_batch, compute(begin, end) runs once for each slice [begin, end) of the batch, and its loss is the mean over
        these samples. Collective."""
        if self._sampler is not None and not self._by_slice and isinstance(samples, int):  # slices are counted anyway
            self._said.step(self._sampler._draws, samples)
        self._push()
        before = None if prepare is None else _naming_ended_groups(prepare)
        return self._running.step(samples, self._again(_naming_ended_groups(compute)), update, before, self._by_slice)

    @property
    def batch_size(self) -> int:
        """This rank's samples in a step with keep_global_batch; more once ranks are lost. For each loader, after in_epoch()."""
        return self._running.batch_size()

    def together(self, work: Callable[[], Result]) -> Result:
        """The result of work(), which communicates: an evaluation, or a checkpoint. It runs again from its beginning on all ranks
        whenever they change in it, and ends with a barrier. Collective."""
        result: Result = self._running.together(_naming_ended_groups(work))
        return result

    def recover(self) -> None:
        """Makes the process group of the ranks that are left, for a loop that catches CommError between steps itself. Collective
        over them."""
        self._running.recover()

    def begin_loop(self) -> None:
        """A newcomer's loop begins: for one that calls together() before its first in_epoch() or step(). Elsewhere nothing."""
        self._running.begin_loop()

    @property
    def first_epoch(self) -> int:
        """0, or the job's present epoch in a process that has joined it: the passes that have ended, where the job's loop never calls
        set_epoch()."""
        return self._running.first_epoch()

    @property
    def steps(self) -> int:
        """Complete steps of the job since its beginning."""
        return self._running.steps()

    @property
    def generation(self) -> int:
        """1, and more after each change of the ranks."""
        return self._running.generation()

    @property
    def joining(self) -> bool:
        """Whether this process has come to a job that was running already, as shoal.distributed.joining()."""
        return self._running.joining()

    @property
    def _running(self) -> _C.ElasticTrainer:
        assert self._trainer is not None  # set by the constructor
        return self._trainer

    def _again(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """`compute` for a step that may have been undone, in which a loss scaler has unscaled the gradients."""
        if not self._scalers:
            return compute

        def from_the_beginning(*place: int) -> Any:
            if not place or place[0] == 0:
                for scaler in self._scalers:
                    scaler._per_optimizer_states.clear()
            return compute(*place)

        return from_the_beginning

    def _push(self) -> None:
        if isinstance(self._optimizer, ShardedOptimizer):
            self._optimizer._push()  # rates that a schedule has changed

    def _follow(self) -> None:
        """Process group, wrapper and optimizer are those of the present ranks."""
        self._running.follow()
        group = self._running.group()
        distributed._replace_default_group(group, self._running.store(), self.generation)
        if isinstance(self._optimizer, ShardGossipOptimizer):  # the model's ranks are those of this host
            group = self._running.shard_group()
        for one in (self._model, self._optimizer):
            if isinstance(one, (Wrapper, ShardedOptimizer)):
                one._regrouped(group)

    def _tell(self, change: ElasticChange) -> None:
        if self._told is not None:
            self._told(change)
        elif self._running.group().rank == 0:
            print(f"shoal: {change}", file=sys.stderr, flush=True)


def _naming_ended_groups(work: Callable[..., Result]) -> Callable[..., Result]:
    """`work`, in which the use of a process group of former ranks is the error that says so. torch.distributed logs it with the
    group's name, which it does not know any more, and so raises a ValueError over it."""

    def named(*arguments: Any) -> Result:
        try:
            return work(*arguments)
        except ValueError as error:
            ended = error.__context__
            if isinstance(ended, CommError) and ended.group_ended:
                raise ended from None
            raise

    return named


def _is_supported(model: Any, optimizer: Any) -> bool:
    if isinstance(model, DistributedDataParallel):
        whole = isinstance(optimizer, torch.optim.Optimizer) and not isinstance(optimizer, (ShardedOptimizer, LocalUpdates))
        return whole or isinstance(optimizer, OSS)
    if isinstance(model, ShardedDataParallel):
        return isinstance(optimizer, OSS)
    if isinstance(model, FullyShardedDataParallel):
        return isinstance(optimizer, FullyShardedOptimizer)
    return isinstance(optimizer, (DistributedOptimizer, LocalUpdates)) and model is optimizer._module


def _require_supported(model: Any, optimizer: Any, sampler: Any) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError("Elastic: L-BFGS communicates in its step, by its closure, and cannot be finished after a death")
    if not _is_supported(model, optimizer):
        raise UsageError(
            f"Elastic: {type(model).__name__} with {type(optimizer).__name__} is not supported: give a "
            "shoal.nn.DistributedDataParallel with an optimizer of torch.optim or an OSS, a ShardedDataParallel with its OSS, a "
            "FullyShardedDataParallel with its FullyShardedOptimizer or ShardGossipOptimizer, or a module with its DistributedOptimizer or LocalUpdates"
        )
    for name, module in model.named_modules():
        if isinstance(module, SyncBatchNorm):
            raise UsageError(f"Elastic: {name} is a SyncBatchNorm, which keeps its group")
    if sampler is not None and not isinstance(sampler, DistributedSampler):
        raise UsageError(
            f"Elastic: the sampler is a {type(sampler).__name__} of {type(sampler).__module__}, which cannot divide the rest of an "
            "epoch among other ranks: give a shoal.data.DistributedSampler, which has the same indices"
        )


def _require_no_optimizer(objects: Mapping[str, Any]) -> None:
    for name, one in objects.items():
        if isinstance(one, (torch.optim.Optimizer, torch.nn.Module)):
            raise UsageError(
                f"Elastic: state has {name}, a {type(one).__name__}: model and optimizer come with the job anyway; give schedules, "
                "scalers and the like, and other tensors by the option tensors"
            )


def _text_of(objects: Mapping[str, HasState]) -> str:
    data = io.BytesIO()
    torch.save({name: one.state_dict() for name, one in objects.items()}, data)
    return base64.b64encode(data.getvalue()).decode()


def _load(objects: Mapping[str, HasState], text: str) -> None:
    # From a rank of the same job, as torch.distributed's objects are; a schedule's state may be of any class.
    states = torch.load(io.BytesIO(base64.b64decode(text)), weights_only=False)
    if set(states) != set(objects):
        raise UsageError(f"Elastic: this process gives state {sorted(objects)}, and the job {sorted(states)}")
    for name, one in objects.items():
        one.load_state_dict(states[name])
