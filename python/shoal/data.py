"""A sampler that shares a data set out among ranks, also among ranks that change."""

from __future__ import annotations

import copy
import operator
import sys
from collections.abc import Iterator, Sized
from typing import Any

import torch
import torch.distributed as dist

from . import _C
from ._draws import Draws, draws_of

__all__ = ["DistributedSampler"]


class DistributedSampler(torch.utils.data.DistributedSampler[Any]):
    """torch.utils.data.DistributedSampler, with the same indices for the same seed, for loops whose ranks change.

    sampler = shoal.data.DistributedSampler(dataset)
    elastic = shoal.Elastic(model, optimizer, sampler)
    ...
    loader = DataLoader(dataset, batch_size=64, sampler=sampler)  # for each in_epoch()

    Elastic divides the rest of an epoch anew when ranks are lost or come; a loader that was made before has the former
    division. dataset: whatever has a length. num_replicas, rank: those of the default process group if left out.
    shuffle, seed and drop_last may be set later; ranks must do so alike. A copy, and one that was pickled, is at the same
    place of the same epoch.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if (num_replicas is None) != (rank is None):
            raise _C.UsageError("DistributedSampler: give both num_replicas and rank, or neither")
        if num_replicas is None or rank is None:
            if not dist.is_initialized():
                raise _C.UsageError("DistributedSampler: there is no process group; give num_replicas and rank")
            num_replicas, rank = dist.get_world_size(), dist.get_rank()
        options = {"shuffle": shuffle, "seed": _seed(seed), "drop_last": drop_last}
        self._core = _C.DistributedSampler(
            len(dataset), _count("num_replicas", num_replicas), _count("rank", rank), options
        )
        self.dataset: Any = dataset
        self._seed = _index("seed", seed)
        self._draws: Draws | None = None  # of the newest iteration
        self._sought = False  # seek() holds
        self._indices: Iterator[Any] | None = None  # of the newest iteration since then

    def set_epoch(self, epoch: int) -> None:
        """Another order of the samples. Call it before each epoch."""
        self._core.set_epoch(_count("epoch", epoch))

    def seek(self, index: int) -> None:
        """This epoch begins behind the rank's first `index` samples. Once a pass has come to its end, further passes begin at
        their start, as do later epochs."""
        self._core.seek(_count("index", index))
        self._sought, self._indices = True, None

    @property
    def shuffle(self) -> bool:  # type: ignore[override]
        return self._core.options()["shuffle"]

    @shuffle.setter
    def shuffle(self, shuffle: bool) -> None:
        self._set(shuffle=shuffle)

    @property
    def seed(self) -> int:  # type: ignore[override]
        return self._seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._set(seed=_seed(seed))
        self._seed = _index("seed", seed)

    @property
    def drop_last(self) -> bool:  # type: ignore[override]
        return self._core.options()["drop_last"]

    @drop_last.setter
    def drop_last(self, drop_last: bool) -> None:
        self._set(drop_last=drop_last)

    def _set(self, **changed: Any) -> None:
        self._core.set_options({**self._core.options(), **changed})

    @property
    def epoch(self) -> int:  # type: ignore[override]
        return self._core.epoch()

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        raise _C.UsageError(f"DistributedSampler: epoch cannot be assigned to: call set_epoch({epoch})")

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        return self._core.num_replicas()

    @num_replicas.setter
    def num_replicas(self, num_replicas: int) -> None:
        raise _C.UsageError("DistributedSampler: num_replicas cannot be assigned to: make a sampler with it")

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self._core.rank()

    @rank.setter
    def rank(self, rank: int) -> None:
        raise _C.UsageError("DistributedSampler: rank cannot be assigned to: make a sampler with it")

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        return self._core.remaining()

    @property
    def total_size(self) -> int:  # type: ignore[override]
        return self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[Any]:
        if self._sought and self._indices is not None and operator.length_hint(self._indices) == 0:
            self.seek(0)
            self._sought = False
        self._indices = indices = iter(self._core.indices())
        self._draws = draws_of(indices, sys._getframe(1))
        return indices

    def __len__(self) -> int:
        """Samples of this rank in the present epoch, or in what is left of it since the ranks have changed, or behind seek() until
        another pass begins."""
        return self.num_samples

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_core": copy.copy(self._core), "_draws": None, "_indices": None}


def _index(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        kind = type(value).__name__
        raise _C.UsageError(f"DistributedSampler: {name} is {value!r}, a {kind}; give a whole number") from None


def _count(name: str, value: Any) -> int:
    count = _index(name, value)
    if not 0 <= count < 2**63:
        raise _C.UsageError(f"DistributedSampler: {name} is {count}; give a whole number from 0 to 2^63 - 1")
    return count


def _seed(seed: Any) -> int:
    return _index("seed", seed) % 2**64  # as PyTorch's generators take a negative one
