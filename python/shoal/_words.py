"""Options and states of optimizers as text that is equal on ranks with equal values."""

from __future__ import annotations

from typing import Any

import torch

from ._C import digest

# Keys of a param group that name its parameters, or how an optimizer computes, which results do not depend on.
about_computing = {"params", "param_names", "initial_lr", "foreach", "fused", "capturable", "differentiable"}


def in_words(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return str(value)
    if value.numel() == 1:
        return str(value.item())
    return f"{list(value.shape)} with digest {digest(value):x}"
