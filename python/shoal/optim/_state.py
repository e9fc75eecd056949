"""Whether a state that was loaded is of the optimizer that it was loaded into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._C import UsageError
from .._words import in_words


def check_state(
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    groups: list[dict[str, Any]],
    state: Callable[[torch.Tensor], dict[str, Any] | None],
) -> None:
    """UsageError if a parameter's state has other entries than such an optimizer keeps: torch.optim would take it, and
    begin anew without a word. `make`: makes the optimizer of param groups; state: of a parameter, if it has one."""
    known: dict[tuple[int, int], set[str] | None] = {}
    for number, group in enumerate(groups):
        for parameter in group["params"]:
            entry = state(parameter)
            found = {key for key, value in (entry or {}).items() if value is not None} - {"main_param"}
            if not found:
                continue
            key = (number, parameter.dim())
            if key not in known:
                known[key] = _kept(make, group, parameter.dim())
            kept = known[key]
            # Entries that a class adds in later steps are not among those of its first.
            if kept is not None and (kept - found or not kept):
                raise UsageError(
                    f"the optimizer state has {', '.join(sorted(found))} for a parameter, the optimizer keeps "
                    f"{', '.join(sorted(kept)) or 'nothing'}: it is the state of another optimizer"
                )


def changed_options(
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer], group: dict[str, Any], dimensions: int
) -> list[str]:
    """Options that the optimizer itself changes in a step of a small parameter."""
    parameter = torch.nn.Parameter(torch.ones((2,) * dimensions))
    parameter.grad = torch.ones_like(parameter)
    try:
        optimizer = make([{**group, "params": [parameter]}])
        before = dict(optimizer.param_groups[0])
        optimizer.step()
        after = optimizer.param_groups[0]
        return sorted(key for key in after if key != "params" and (key not in before or after[key] != before[key]))
    except Exception:  # it cannot take such a step
        return []


def loaded_options(
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer], group: dict[str, Any], saved: dict[str, Any]
) -> dict[str, Any]:
    """The options of a param group once the optimizer has loaded a saved one: a class may keep some, as AdamW keeps that its
    weight decay is decoupled when it loads Adam's."""
    given = {key: value for key, value in saved.items() if key != "params"}
    try:
        optimizer = make([{**group, "params": [torch.nn.Parameter(torch.ones(1))]}])
        optimizer.load_state_dict({"state": {}, "param_groups": [{**given, "params": [0]}]})
    except Exception:  # it cannot be made for such a parameter
        return given
    return {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}


def _kept(make: Callable[..., torch.optim.Optimizer], group: dict[str, Any], dimensions: int) -> set[str] | None:
    """Entries that the optimizer keeps after a step of a small parameter; None: it cannot take one."""
    parameter = torch.nn.Parameter(torch.ones((2,) * dimensions))
    parameter.grad = torch.ones_like(parameter)
    try:
        optimizer = make([{**group, "params": [parameter]}])
        optimizer.step()
    except Exception:  # of a class of the user's own
        return None
    return {key for key, value in optimizer.state[parameter].items() if value is not None}


def items_of(state_dict: dict[str, Any]) -> list[str]:
    """A state in the format of torch.optim as lines that are equal on ranks with an equal state."""
    items = []
    for number, group in enumerate(state_dict["param_groups"]):
        items += [f"param group {number}: {key} {value}" for key, value in sorted(group.items())]
    for parameter, entry in state_dict["state"].items():
        items += [f"{key} of parameter {parameter} {in_words(value)}" for key, value in entry.items()]
    return items


def names_in(mirror: Any, groups: list[dict[str, Any]]) -> list[str]:
    """Names of the groups' parameters; a tied one has its first."""
    names: dict[int, str] = {}
    for name, parameter in mirror.names():
        names.setdefault(id(parameter), name)
    return [names[id(parameter)] for group in groups for parameter in group["params"]]
