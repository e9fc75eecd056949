"""Wrappers of torch.nn.Module: strategies that spread its training over the ranks of a process group."""

from .ddp import DistributedDataParallel
from .decentralized import DecentralizedDataParallel
from .fsdp import FullyShardedDataParallel
from .sharded_ddp import ShardedDataParallel
from .sync_batch_norm import SyncBatchNorm

__all__ = [
    "DecentralizedDataParallel",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "ShardedDataParallel",
    "SyncBatchNorm",
]
