"""Wrap policies: which sub-modules FullyShardedDataParallel makes units of."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .._C import UsageError

Policy = Any


def unit_names(module: torch.nn.Module, policy: Policy) -> list[str] | None:
    """Names of the sub-modules that a policy selects. A policy is one of:

    a class of modules, or several;
    names of sub-modules, as in named_modules();
    a function of a module that returns whether it is a unit;
    a policy of torch.distributed.fsdp.wrap.
    """
    if policy is None:
        return None
    if isinstance(policy, torch.nn.Module):
        name = type(policy).__name__
        raise UsageError(f"auto_wrap_policy is a module, a {name}: give its class, auto_wrap_policy={name}, or names of sub-modules")
    classes = _classes_of(policy)
    if classes is not None:
        return [name for name, child in module.named_modules() if name and isinstance(child, classes)]
    if type(policy).__name__ == "CustomPolicy":
        return [name for name, child in module.named_modules() if name and _is_unit(policy, name, child)]
    if callable(policy):
        if "recurse" in inspect.signature(policy).parameters:
            names: list[str] = []
            _from_leaves_up(module, "", policy, names, set())
            return names
        return [name for name, child in module.named_modules() if name and policy(child)]
    if isinstance(policy, Iterable) and not isinstance(policy, str):
        names = list(policy)
        if all(isinstance(name, str) for name in names):
            return names
    raise UsageError(
        f"auto_wrap_policy {policy!r}: give a class of modules or several, a list of names of sub-modules, or a function "
        "of a module"
    )


def _classes_of(policy: Policy) -> tuple[type, ...] | None:
    if isinstance(policy, type) and issubclass(policy, torch.nn.Module):
        return (policy,)
    owner = type(policy)
    if owner.__name__ == "ModuleWrapPolicy":
        return tuple(policy._module_classes)
    if isinstance(policy, functools.partial) and policy.func.__name__ == "transformer_auto_wrap_policy":
        return tuple(policy.keywords["transformer_layer_cls"])
    if isinstance(policy, (list, tuple, set, frozenset)) and policy and all(isinstance(one, type) for one in policy):
        return tuple(policy)
    return None


def _is_unit(policy: Policy, name: str, module: torch.nn.Module) -> bool:
    answer = policy._lambda_fn(module)
    if isinstance(answer, dict) and answer:
        raise UsageError(
            f"auto_wrap_policy: the CustomPolicy gives {name} options of its own, {', '.join(answer)}; units have those of the "
            "wrapper: return True"
        )
    return bool(answer)


def _from_leaves_up(
    module: torch.nn.Module, name: str, policy: Callable[..., bool], names: list[str], seen: set[int]
) -> int:
    """Elements of the module's parameters that are in no unit yet, as PyTorch's policies count them."""
    own = 0
    for parameter in module.parameters(recurse=False):
        if id(parameter) not in seen:
            seen.add(id(parameter))
            own += parameter.numel()
    total = own
    for key, child in module.named_children():
        total += _from_leaves_up(child, f"{name}.{key}" if name else key, policy, names, seen)
    if name and policy(module=module, recurse=False, nonwrapped_numel=total):
        names.append(name)
        return 0
    return total
