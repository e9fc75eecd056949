"""What a loader draws from a sampler, and whether the steps of a loop say so."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch.utils.data import BatchSampler

from . import _C


class Draws:
    """Of one iteration of a sampler, by a loader whose batches all have `batch_size` samples, but for the last one."""

    def __init__(self, indices: Iterator[Any], loader: BatchSampler) -> None:
        self._indices = indices  # of a list, which knows how many are left
        self._all = operator.length_hint(indices)
        self.batch_size = loader.batch_size
        self.batches = self._all // self.batch_size
        if not loader.drop_last and self._all % self.batch_size:
            self.batches += 1

    @property
    def drawn(self) -> int:
        """Samples so far. A loader with workers draws ahead of the loop."""
        return self._all - operator.length_hint(self._indices)

    @property
    def exhausted(self) -> bool:
        return self.drawn == self._all


def draws_of(indices: Iterator[Any], caller: FrameType) -> Draws | None:
    """None if the iteration is by something else, whose batches may have any size."""
    if caller.f_code is not BatchSampler.__iter__.__code__:
        return None
    return Draws(indices, caller.f_locals["self"])


class SaidSamples:
    """The samples that steps say they have. A loop that says len(batch) where the batch is a dict or a tuple, and so counts keys or
    tensors, trains as any other, until ranks change and the rest of the epoch begins at the wrong place.

    Loops may skip batches, divide one among several steps, or put several into one: only those are refused that take one step
    for each batch and say another number than its size each time.
    """

    def __init__(self) -> None:
        self._draws: Draws | None = None
        self._begin(None)

    def _begin(self, draws: Draws | None) -> None:
        self._ended = self._draws  # a loop may go on with batches that it has kept
        self._draws = draws
        self._steps = 0
        self._samples = 0
        self._alike = True  # all steps so far
        self._in_turn = True  # each step so far came when its batch had been drawn, and no other

    def step(self, draws: Draws | None, samples: int) -> None:
        """draws: the sampler's newest. UsageError in the second step of an iteration, where nothing is drawn ahead."""
        if draws is None or draws is self._ended:
            return
        if draws is not self._draws:
            self._begin(draws)
            self._samples = samples
        self._steps += 1
        self._alike = self._alike and samples == self._samples
        self._in_turn = self._in_turn and draws.drawn == self._steps * draws.batch_size
        if self._steps == 2 and self._in_turn:
            self._require_sizes(draws)

    def end_pass(self) -> None:
        """UsageError if each batch of an iteration that is over had its step."""
        draws = self._draws
        if draws is None:
            return
        if draws.exhausted and self._steps == draws.batches and self._steps > 1:
            self._require_sizes(draws)
        self._begin(None)

    def _require_sizes(self, draws: Draws) -> None:
        if not self._alike or self._samples == draws.batch_size:
            return
        raise _C.UsageError(
            f"Elastic: step() is given {self._samples} samples for each batch, and the loader's batches have {draws.batch_size} of the "
            "sampler's: give the size of a tensor in it, such as len(batch['x']); len(batch) is the number of keys of a dict and of "
            "parts of a tuple"
        )
