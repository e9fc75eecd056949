"""ShardGossipOptimizer: decentralised training of hosts whose ranks share a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from .. import _C
from ..distributed import group_of
from ..nn.fsdp import FullyShardedDataParallel
from ._recipe import OptimizerClass, param_groups_of, recipe_of
from .fsdp import FullyShardedOptimizer

_options = ("topology", "overlap", "neighbour_timeout_seconds", "bucket_cap_mb", "exchange_dtype")


class ShardGossipOptimizer(FullyShardedOptimizer):
    """Decentralised training of hosts: the ranks of a host shard the model, and every rank averages its shards with the
    ranks of the same index on a few other hosts.

    inside, across = shoal.distributed.host_groups()
    model = shoal.nn.FullyShardedDataParallel(net, inside)
    optimizer = shoal.optim.ShardGossipOptimizer(model, across, torch.optim.AdamW, lr=1e-3)

    Options: topology (of the hosts; a name, see `shoal topology --list`), overlap, neighbour_timeout_seconds, bucket_cap_mb,
    exchange_dtype as in the C++ library (shard_gossip.h); the others as for FullyShardedOptimizer. state_dict() is that of
    this host. The constructor is collective over all ranks.
    """

    def __init__(
        self,
        model: FullyShardedDataParallel,
        across: Any,
        optimizer_class: OptimizerClass,
        params: Iterable[Any] | None = None,
        *,
        clip_grad: float = 0.0,
        scaler: dict[str, Any] | None = None,
        element_wise: bool | None = None,
        **defaults: Any,
    ) -> None:
        self._check_model(model)
        options = {name: defaults.pop(name) for name in _options if name in defaults}
        groups = param_groups_of(model.trainable_parameters() if params is None else params)
        recipe = recipe_of("ShardGossipOptimizer", groups, optimizer_class, defaults, element_wise)
        core = _C.ShardGossipOptimizerCore(
            model._core, group_of(across), *recipe.core_arguments(), recipe.element_wise, clip_grad, scaler, options
        )
        self._adopt(model, recipe, core, scaler)

    def global_avg(self) -> None:
        """Sets the parameters of all hosts to their mean. Collective over all ranks."""
        self._core.global_avg()

    @contextlib.contextmanager
    def mean_parameters(self) -> Iterator[None]:
        """Scope in which parameters hold the mean over hosts, to evaluate and to save. Collective over all ranks."""
        self._core.hold_mean()
        try:
            yield
        finally:
            self._core.hold_own()

    def consensus_distance(self) -> float:
        """Root mean square distance of the hosts' parameters from their mean. Collective over all ranks."""
        return self._core.consensus_distance()

    def pass_step(self) -> None:
        """A step without an update: averages and publishes. Collective over the host."""
        self._core.pass_step()

    def leave(self) -> None:
        """Ends the training of this rank; other hosts go on without its shards."""
        self._core.leave()
