"""Tensor.new_tensor() and Tensor.new() of parameters that a wrapper watches.

PyTorch takes the device of the new tensor from the dispatch keys of `self`, and does not know the one that marks these.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from . import _C


def _of_a_plain_tensor(original: Any) -> Any:
    @functools.wraps(original)
    def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        plain = torch.empty(0, dtype=self.dtype, device=self.device) if _C.is_watched(self) else self
        return original(plain, *args, **kwargs)

    return call


@functools.cache
def make_new_tensors_work() -> None:
    for name in ("new_tensor", "new"):
        setattr(torch.Tensor, name, _of_a_plain_tensor(getattr(torch.Tensor, name)))
