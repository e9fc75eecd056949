"""A sampler that shares a data set out among ranks, also among ranks that change."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
import torch.distributed as dist

from . import _C

__all__ = ["DistributedSampler"]


class DistributedSampler(torch.utils.data.DistributedSampler[Any]):
    """torch.utils.data.DistributedSampler, with the same indices for the same seed, for loops whose ranks change.

    sampler = shoal.data.DistributedSampler(dataset)
    elastic = shoal.Elastic(model, optimizer, sampler)
    ...
    loader = DataLoader(dataset, batch_size=64, sampler=sampler)  # for each in_epoch()

    Elastic divides the rest of an epoch anew when ranks are lost or come; a loader that was made before has the former
    division. dataset: whatever has a length. num_replicas, rank: those of the default process group if left out.
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
        options = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last}
        self._core = _C.DistributedSampler(len(dataset), num_replicas, rank, options)
        self.dataset: Any = dataset
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last

    def set_epoch(self, epoch: int) -> None:
        """Another order of the samples. Call it before each epoch."""
        self._core.set_epoch(epoch)

    def seek(self, index: int) -> None:
        """This epoch begins behind the rank's first `index` samples; later epochs begin at their start."""
        self._core.seek(index)

    @property
    def epoch(self) -> int:  # type: ignore[override]
        return self._core.epoch()

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        return self._core.num_replicas()

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self._core.rank()

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        return self._core.num_samples()

    @property
    def total_size(self) -> int:  # type: ignore[override]
        return self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[Any]:
        return iter(self._core.indices())

    def __len__(self) -> int:
        """Samples of this rank in the present epoch, or in what is left of it since the ranks have changed."""
        return self.num_samples
