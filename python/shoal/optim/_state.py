"""Whether a state that was loaded is of the optimizer that it was loaded into."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from .._C import UsageError
from .._words import in_words

# State that is one number even where the parameter is one element without dimensions.
_scalars = {"step", "mu_product", "mu", "eta"}


def is_number(name: str, value: Any, parameter: torch.Tensor) -> bool:
    """Whether an entry of a parameter's state is one number, rather than values of its elements."""
    return not isinstance(value, torch.Tensor) or (value.dim() == 0 and (parameter.dim() > 0 or name in _scalars))


def check_state(
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    groups: list[dict[str, Any]],
    state: Callable[[torch.Tensor], dict[str, Any] | None],
) -> None:
    """UsageError if a parameter's state has other entries than such an optimizer keeps, or entries of another shape:
    torch.optim would take it, and begin anew without a word, or write past its end. `make`: makes the optimizer of param
    groups; state: of a parameter, if it has one."""
    for entry, parameter, kept in _loaded_entries(make, groups, state):
        # Entries that a class adds in later steps are not among those of its first.
        if kept.entries.keys() - entry.keys() or not kept.entries:
            raise UsageError(
                f"the optimizer state has {', '.join(sorted(entry))} for a parameter, the optimizer keeps "
                f"{', '.join(sorted(kept.entries)) or 'nothing'}: it is the state of another optimizer"
            )
        _check_shapes(entry, parameter, kept)


def maker_of(optimizer: torch.optim.Optimizer) -> Callable[[list[dict[str, Any]]], torch.optim.Optimizer]:
    """Makes an optimizer of this one's class and default options from param groups."""
    kind = type(optimizer)
    taken = inspect.signature(kind).parameters
    defaults = {key: value for key, value in optimizer.defaults.items() if key in taken}
    return lambda groups: kind(groups, **defaults)


def check_shapes(optimizer: torch.optim.Optimizer) -> None:
    """UsageError if a parameter's state has entries of another shape than such an optimizer keeps. Which entries it has may
    depend on options that have changed since it was saved."""
    for entry, parameter, kept in _loaded_entries(maker_of(optimizer), optimizer.param_groups, optimizer.state.get):
        _check_shapes(entry, parameter, kept)


def _loaded_entries(
    make: Callable[..., torch.optim.Optimizer],
    groups: list[dict[str, Any]],
    state: Callable[[torch.Tensor], dict[str, Any] | None],
) -> Iterator[tuple[dict[str, Any], torch.Tensor, _Kept]]:
    """The state of each parameter that has one, and what the optimizer would keep of such a parameter."""
    known: dict[tuple[int, int], _Kept | None] = {}
    for number, group in enumerate(groups):
        for parameter in group["params"]:
            entry = {key: value for key, value in (state(parameter) or {}).items() if value is not None}
            entry.pop("main_param", None)
            if not entry:
                continue
            key = (number, parameter.dim())
            if key not in known:
                known[key] = _kept(make, group, parameter.dim())
            kept = known[key]
            if kept is not None:
                yield entry, parameter, kept


def _check_shapes(entry: dict[str, Any], parameter: torch.Tensor, kept: _Kept) -> None:
    for name, value in entry.items():
        shape = _shape(value)
        if name in kept.like_parameter and shape != parameter.shape:
            raise UsageError(
                f"the optimizer state has {name} of shape {list(shape)} for a parameter of shape {list(parameter.shape)}, of "
                "whose shape it must be: it is the state of another model"
            )


class _HookOfAll:
    """A hook of all optimizers that is not called in this thread's steps without hooks."""

    here = threading.local()

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, *arguments: Any) -> Any:
        return None if getattr(self.here, "without", False) else self._hook(*arguments)


def without_hooks_of_all(step: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """A step without the hooks of all optimizers (register_optimizer_step_post_hook)."""
    for hooks in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks):
        for key, hook in list(hooks.items()):
            if not isinstance(hook, _HookOfAll):
                hooks[key] = _HookOfAll(hook)
    before = getattr(_HookOfAll.here, "without", False)
    _HookOfAll.here.without = True
    try:
        return step(*arguments, **keywords)
    finally:
        _HookOfAll.here.without = before


def step_within(optimizer: torch.optim.Optimizer) -> None:
    """A step of an optimizer that works for another one, or on trial, without the hooks of all optimizers, which the other
    one's step() calls, once per step."""
    without_hooks_of_all(optimizer.step)


def _on_trial(
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer], group: dict[str, Any], parameters: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """Such an optimizer of other parameters. Tensors among its options are copies, as step() may change them."""
    optimizer = make([{**group, "params": parameters}])
    for own in optimizer.param_groups:
        own.update({key: value.clone() for key, value in own.items() if isinstance(value, torch.Tensor)})
    return optimizer


def _random_states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None


def _same_states(ones: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    # NumPy's are tuples with an array.
    return torch.equal(ones[0], others[0]) and pickle.dumps(ones[1:]) == pickle.dumps(others[1:])


@contextlib.contextmanager
def _keeps_random_states() -> Iterator[None]:
    """A class may draw random numbers, which are the program's."""
    of_torch, of_python, of_numpy = _random_states()
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        if of_numpy is not None:
            sys.modules["numpy"].random.set_state(of_numpy)


_P = ParamSpec("_P")
_R = TypeVar("_R")


def _on_the_cpu(call: Callable[_P, _R]) -> Callable[_P, _R]:
    """For steps on trial: the program may have another default device, such as "meta", whose tensors have no values."""

    @functools.wraps(call)
    def on_the_cpu(*arguments: _P.args, **keywords: _P.kwargs) -> _R:
        with torch.device("cpu"):
            return call(*arguments, **keywords)

    return on_the_cpu


@_on_the_cpu
def changed_options(
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer], group: dict[str, Any], dimensions: int
) -> list[str]:
    """Options that the optimizer itself changes in a step of a small parameter."""
    parameter = torch.nn.Parameter(torch.ones((2,) * dimensions))
    parameter.grad = torch.ones_like(parameter)
    try:
        with _keeps_random_states():
            optimizer = _on_trial(make, group, [parameter])
            before = dict(optimizer.param_groups[0])
            step_within(optimizer)
        after = optimizer.param_groups[0]
        return sorted(key for key in after if key != "params" and (key not in before or after[key] != before[key]))
    except Exception:  # it cannot take such a step
        return []


@_on_the_cpu
def depends_on_others(
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer], group: dict[str, Any], dimensions: int
) -> bool:
    """Whether the update of a small parameter is another beside a second one, as where step() clips by the norm of all. False
    for a class that cannot take such steps, or draws random numbers."""
    shape = tuple(range(2, 2 + dimensions))
    values = torch.linspace(0.5, 1.5, math.prod(shape), dtype=torch.float64).reshape(shape)

    def steps(count: int) -> list[torch.Tensor]:
        parameters = [torch.nn.Parameter(values.clone()) for _ in range(count)]
        optimizer = _on_trial(make, group, parameters)
        for own in optimizer.param_groups:
            if own.get("lr") == 0:  # a schedule begins with it
                own["lr"] = 1e-2
        for gradients in ((30.0, 1e4), (20.0, 1.0)):  # another ratio each time: Adam's update does not depend on the scale
            for parameter, gradient in zip(parameters, gradients, strict=False):
                parameter.grad = gradient * values.square()
            step_within(optimizer)
        kept = optimizer.state[parameters[0]].values()
        return [parameters[0].detach() - values, *(value.double() for value in kept if isinstance(value, torch.Tensor))]

    def same(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
        # Classes that work on all parameters in a 16-bit type round otherwise.
        return all((one - other).norm() <= 0.02 * other.norm() for one, other in zip(ones, others, strict=True))

    try:
        with _keeps_random_states():
            before = _random_states()
            alone, again = steps(1), steps(1)
            beside, beside_again = steps(2), steps(2)
            if not _same_states(before, _random_states()):
                return False
        return same(alone, again) and same(beside, beside_again) and not same(alone, beside)
    except Exception:  # of a class of the user's own
        return False


@_on_the_cpu
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


@_on_the_cpu
def number_kinds(
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer], groups: list[dict[str, Any]]
) -> dict[str, str]:
    """What numbers of its state are in such an optimizer, by name: "int", "float", "bool", or a tensor of a dtype,
    "torch.float64". A class that takes no step of a small parameter, or adds a number in later steps, has tensors."""
    kinds = {}
    for group in groups:
        for dimensions in sorted({parameter.dim() for parameter in group["params"]}):
            kept = _kept(make, group, dimensions)
            for name, value in kept.entries.items() if kept else ():
                if is_number(name, value, torch.empty((1,) * dimensions)):
                    kinds[name] = _kind(value)
    return kinds


def number_of(kind: str | None, value: float) -> Any:
    """A number as the optimizer has it. None: the kind is unknown, and the number what PyTorch's optimizers make of it."""
    if kind in _plain_kinds:
        return _plain_kinds[kind](value)
    wide = torch.get_default_dtype() == torch.float64 or torch.tensor(value, dtype=torch.float32, device="cpu").item() != value
    dtype = getattr(torch, kind.removeprefix("torch.")) if kind else torch.float64 if wide else torch.float32
    return torch.tensor(value, dtype=dtype, device="cpu")


_plain_kinds: dict[str | None, Callable[[float], Any]] = {"bool": bool, "int": int, "float": float}


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return str(value.dtype)
    return "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float"


def _shape(value: Any) -> torch.Size:
    return value.shape if isinstance(value, torch.Tensor) else torch.Size()


@dataclass
class _Kept:
    """What an optimizer keeps of a parameter after its first step, and which entries have the parameter's shape."""

    entries: dict[str, Any]
    like_parameter: set[str]


@_on_the_cpu
def _kept(make: Callable[..., torch.optim.Optimizer], group: dict[str, Any], dimensions: int) -> _Kept | None:
    """What the optimizer keeps of a small parameter, whose sizes differ; None: it cannot take a step of one."""
    parameter = torch.nn.Parameter(torch.ones(tuple(range(2, 2 + dimensions))))
    parameter.grad = torch.ones_like(parameter)
    try:
        with _keeps_random_states():
            optimizer = _on_trial(make, group, [parameter])
            step_within(optimizer)
    except Exception:  # of a class of the user's own
        return None
    entries = {key: value for key, value in optimizer.state[parameter].items() if value is not None}
    return _Kept(entries, {key for key, value in entries.items() if _shape(value) == parameter.shape})


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
