"""An optimizer that each rank makes for its part of the param groups."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from .. import _C
from .._mirror import parameters_where
from ._state import changed_options, depends_on_others, number_kinds

OptimizerClass = Callable[..., torch.optim.Optimizer]

# Optimizers that update each element by itself, so that a rank may update any range of a parameter.
_element_wise = {
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
}


@dataclass
class Recipe:
    """An optimizer to be made of a rank's part of the param groups."""

    groups: list[dict[str, Any]]
    defaults: dict[str, Any]
    name: str
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
    element_wise: bool
    kinds: dict[str, str]  # of numbers of the state; of torch.optim's element-wise classes, all are tensors

    def core_arguments(self) -> tuple[list[dict[str, Any]], dict[str, Any], str, Any]:
        return self.groups, self.defaults, self.name, self.make


def param_groups_of(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Param groups from what torch.optim takes: tensors, (name, tensor) pairs, or dictionaries."""
    if isinstance(params, torch.nn.Module):
        raise _C.UsageError("give the parameters of the module, module.parameters(), not the module")
    if isinstance(params, (int, float)):
        raise _C.UsageError(f"{params} stands where the parameters go: give the options of the optimizer by name, lr={params}")
    if isinstance(params, (set, frozenset)):
        raise TypeError("parameters are in a set, whose order differs from rank to rank: give a list")
    given = list(params)
    if not given:
        raise ValueError("optimizer got an empty parameter list")
    if not isinstance(given[0], dict):
        given = [{"params": given}]
    groups = []
    for group in given:
        held = group["params"]
        if isinstance(held, (set, frozenset)):
            raise TypeError("parameters are in a set, whose order differs from rank to rank: give a list")
        held = [held] if isinstance(held, torch.Tensor) else list(held)
        held = [one[1] if isinstance(one, tuple) else one for one in held]
        groups.append({**group, "params": held})
    return groups


def groups_of_module(
    module: torch.nn.Module, params: Iterable[Any] | None, ignored: Iterable[str]
) -> list[dict[str, Any]]:
    """Param groups that the user has given, or one of all parameters that are trained and not ignored (names)."""
    if params is not None:
        return param_groups_of(params)
    left_out = parameters_where(module, set(ignored).__contains__)
    return param_groups_of(p for p in module.parameters() if p.requires_grad and id(p) not in left_out)


def _probe(parameter: torch.Tensor) -> torch.nn.Parameter:
    """A parameter without elements, of the same dtype, device and number of dimensions."""
    empty = torch.empty((0,) * parameter.dim(), dtype=parameter.dtype, device=parameter.device)
    return torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)


def recipe_of(
    owner: str,
    groups: list[dict[str, Any]],
    optimizer_class: OptimizerClass,
    defaults: dict[str, Any],
    element_wise: bool | None = None,
    options: Iterable[str] = (),
) -> Recipe:
    """Resolves the groups' options as the class does, on an optimizer of parameters without elements. options: those that
    the owner has besides, for errors."""
    if isinstance(optimizer_class, torch.optim.Optimizer):
        raise _C.UsageError(
            f"{owner}: give the class of the optimizer and its arguments, such as torch.optim.AdamW, lr=1e-3, not an "
            "optimizer that holds the parameters already"
        )
    probes = [{**group, "params": [_probe(one) for one in group["params"][:1]]} for group in groups]
    try:
        sample = optimizer_class(probes, **defaults)
    except TypeError as error:
        if not options or "unexpected keyword argument" not in str(error):
            raise
        raise TypeError(f"{error}; besides the optimizer's own options, {owner} has {', '.join(options)}") from error
    if isinstance(sample, torch.optim.LBFGS):
        raise _C.UsageError(
            f"{owner}: LBFGS needs all parameters on one rank and evaluates its closure several times per step; use it "
            "with DistributedDataParallel, and return from the closure the mean of the loss over ranks "
            "(torch.distributed.all_reduce), so that all take the same steps"
        )
    make = functools.partial(_make, optimizer_class, defaults)
    first = next((one for group in groups for one in group["params"]), None)
    known = type(sample) in _element_wise or first is None
    changed = [] if known else changed_options(make, groups[0], first.dim())
    if changed:
        raise _C.UsageError(
            f"{owner}: {type(sample).__name__} keeps {', '.join(changed)} in its param group, which would differ between the "
            "ranks' parts; use it with DistributedDataParallel"
        )
    firsts = [(group, group["params"][0].dim()) for group in groups if group["params"]]
    if not known and any(depends_on_others(make, group, dimensions) for group, dimensions in firsts):
        raise _C.UsageError(
            f"{owner}: {type(sample).__name__} updates a parameter by what it has of all of them, as where step() clips by their "
            "common norm, and here it has a part of them at a time: switch that off and clip with shoal's clip_grad or "
            "clip_grad_norm, or use it with DistributedDataParallel"
        )
    resolved = [{**full, "params": group["params"]} for full, group in zip(sample.param_groups, groups, strict=True)]
    kind = type(sample)
    return Recipe(
        groups=resolved,
        defaults=sample.defaults,
        name=kind.__qualname__ if kind.__module__.startswith("torch.optim") else f"{kind.__module__}.{kind.__qualname__}",
        make=make,
        element_wise=kind in _element_wise if element_wise is None else element_wise,
        kinds={} if known else number_kinds(make, resolved),
    )


def _make(optimizer_class: OptimizerClass, defaults: dict[str, Any], groups: list[dict[str, Any]]) -> Any:
    return optimizer_class(groups, **defaults)
