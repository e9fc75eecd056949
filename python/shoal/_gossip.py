"""What DecentralizedDataParallel and ShardGossipOptimizer have in common."""

from __future__ import annotations

from typing import Any


class Gossip:
    """Decentralised training by a core of C++: what a program asks of it besides its steps."""

    _core: Any

    def global_avg(self) -> None:
        """Sets the parameters of all ranks to their mean. Collective over all ranks."""
        self._core.global_avg()

    def consensus_distance(self) -> float:
        """Root mean square distance of the parameters that ranks, or hosts, train from their mean. Collective over all
        ranks."""
        return self._core.consensus_distance()

    def step_without_update(self) -> None:
        """A step without a batch: averages and publishes, but does not update, and drops gradients
        that no_sync() left. Collective over ranks that share a model."""
        self._core.step_without_update()

    def leave(self) -> None:
        """Ends the training of this rank; its neighbours go on without it, or without its shards."""
        self._core.leave()
