"""ShardGossipOptimizer: decentralised training of hosts whose ranks share a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from .. import _C
from .._gossip import Gossip
from ..distributed import group_of
from ..nn.fsdp import FullyShardedDataParallel
from ._recipe import OptimizerClass, Recipe
from .fsdp import FullyShardedOptimizer

_options = ("topology", "overlap", "neighbour_timeout_seconds", "bucket_cap_mb", "exchange_dtype")


class ShardGossipOptimizer(Gossip, FullyShardedOptimizer):
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
        **options: Any,
    ) -> None:
        self._across = group_of(across)
        self._gossip = {name: options.pop(name) for name in _options if name in options}
        super().__init__(model, optimizer_class, params, **options)

    def _make_core(self, model: FullyShardedDataParallel, recipe: Recipe, clip_grad: float, scaler: Any) -> Any:
        return _C.ShardGossipOptimizerCore(
            model._core, self._across, *recipe.core_arguments(), recipe.element_wise, clip_grad, scaler, self._gossip
        )

    @contextlib.contextmanager
    def mean_parameters(self) -> Iterator[None]:
        """Scope in which parameters hold the mean over hosts, to evaluate, and for the model's state_dict(); steps and
        checkpoints in it are errors. A checkpoint has the mean, too. Collective over all ranks."""
        scope = self._core.mean_parameters()
        try:
            yield
        finally:
            scope.end()
