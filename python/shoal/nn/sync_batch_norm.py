"""SyncBatchNorm."""

from __future__ import annotations

import copy
from typing import Any

import torch

from .. import _C
from ..distributed import group_of


class SyncBatchNorm(torch.nn.modules.batchnorm._BatchNorm):
    """Batch normalisation with statistics over the samples of all ranks, after torch.nn.SyncBatchNorm, for CPU tensors.

    Input [n, c] or [n, c, ...]; ranks may have different numbers of samples. In training mode forward and backward are
    collective. Double backward is refused.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype, bias=bias)
        self._group = group_of(process_group)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise _C.UsageError(
                f"SyncBatchNorm: the input is {list(input.shape)}; give [n, {self.num_features}, ...], with "
                f"num_features={self.num_features} channels"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        # Programs switch the attribute off for a while, so that some forwards leave the running statistics alone.
        used = self.track_running_stats or not self.training
        return _C.sync_batch_norm(
            input,
            self.weight,
            self.bias,
            self.running_mean if used else None,
            self.running_var if used else None,
            self.num_batches_tracked if used else None,
            self.eps,
            self.momentum,
            self.training,
            self._group,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        """A copy of the same ranks, as averages of a model (AveragedModel) make it."""
        memo[id(self._group)] = self._group
        memo[id(self)] = made = type(self).__new__(type(self))
        made.__setstate__(copy.deepcopy(self.__dict__, memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a SyncBatchNorm cannot be pickled, since it holds a process group: save its state_dict(); to copy it, use "
            "copy.deepcopy()"
        )

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module, process_group: Any = None) -> torch.nn.Module:
        """The module with a SyncBatchNorm for every batch norm in it, with the same parameters and buffers, as
        torch.nn.SyncBatchNorm.convert_sync_batchnorm. Call it before wrapping. Not collective."""
        return _converted(module, cls, group_of(process_group), {})


def _converted(
    module: torch.nn.Module,
    kind: type[SyncBatchNorm],
    group: Any,
    known: dict[int, tuple[torch.nn.Module, torch.nn.Module]],
) -> torch.nn.Module:
    """known: modules by id, which may have several names, with what has become of them."""
    if id(module) in known:
        return known[id(module)][1]
    if isinstance(module, torch.nn.modules.batchnorm._LazyNormBase):
        raise _C.UsageError("convert_sync_batchnorm: a lazy batch norm has no shape yet: run the module once before")
    made = module
    if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and not isinstance(module, kind):
        made = kind(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats, group)
        for table in (module._parameters, module._buffers):
            for name, value in table.items():
                setattr(made, name, value)
        made.train(module.training)
    known[id(module)] = module, made
    for name, child in list(module._modules.items()):
        if child is not None:
            made.add_module(name, _converted(child, kind, group, known))
    return made
