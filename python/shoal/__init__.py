"""Data-parallel training: a backend of torch.distributed, and strategies around nn.Module.

Importing the package registers the backend "shoal":

    torch.distributed.init_process_group("shoal")
"""

from ._load import __version__  # before the extension: checks that it fits the installed torch
from . import _C
from ._C import (
    CheckpointError,
    CommError,
    DisagreeError,
    ElasticChange,
    Error,
    Group,
    InputsExhausted,
    JobLost,
    StepAbandoned,
    UsageError,
)
from . import amp, checkpoint, data, distributed, hooks, launch, nn, optim
from .elastic import Elastic
from .join import Join

__all__ = [
    "CheckpointError",
    "CommError",
    "DisagreeError",
    "Elastic",
    "ElasticChange",
    "Error",
    "Group",
    "InputsExhausted",
    "JobLost",
    "Join",
    "StepAbandoned",
    "UsageError",
    "amp",
    "__version__",
    "checkpoint",
    "data",
    "distributed",
    "hooks",
    "launch",
    "nn",
    "optim",
]
