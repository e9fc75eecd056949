"""Optimizers of which each rank runs a part, or which exchange parameters now and then. Any optimizer of Python inside."""

from ._sharded import ShardedOptimizer, StepResult
from .fsdp import FullyShardedOptimizer
from .local_updates import Averaging, LocalUpdates, OuterNesterov, SlowMo
from .megatron import DistributedOptimizer
from .oss import OSS
from .shard_gossip import ShardGossipOptimizer

__all__ = [
    "Averaging",
    "DistributedOptimizer",
    "FullyShardedOptimizer",
    "LocalUpdates",
    "OSS",
    "OuterNesterov",
    "ShardGossipOptimizer",
    "ShardedOptimizer",
    "SlowMo",
    "StepResult",
]
