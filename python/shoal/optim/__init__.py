"""Optimizers of which each rank runs a part. Each takes an optimizer class of Python and its arguments."""

from ._sharded import ShardedOptimizer, StepResult
from .fsdp import FullyShardedOptimizer
from .megatron import DistributedOptimizer
from .oss import OSS

__all__ = ["DistributedOptimizer", "FullyShardedOptimizer", "OSS", "ShardedOptimizer", "StepResult"]
