"""FullyShardedDataParallel."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map

from .. import _C
from .._loaded import load_in_full_precision
from .._mirror import mirror_of, parameters_where, refuse_torch_ddp, require_constant_in_forward, with_ignored_of_torch
from ..distributed import group_of
from ._policy import Policy, unit_names
from ._torch_options import FSDP, without_cpu_options, without_torch_options
from ._wrapper import COMM_HOOK_ADVICE, Wrapper


class FullyShardedDataParallel(Wrapper):
    """Sharded parameters, gradients and optimizer state, after torch.distributed.fsdp's class of this name.

    model = shoal.nn.FullyShardedDataParallel(net, auto_wrap_policy=Block)
    optimizer = shoal.optim.FullyShardedOptimizer(model, torch.optim.AdamW, lr=3e-4)

    auto_wrap_policy: a class of modules or several, names of sub-modules, a function of a module, or a policy of
    torch.distributed.fsdp.wrap. None: the whole module is one unit. It replaces PyTorch's nested wrappers: a module with a
    sub-module that has a FullyShardedDataParallel of its own is a UsageError.

    Parameters keep their names and identity, and may be read anywhere. Between steps their gradients are tensors without
    memory: use model.clip_grad_norm_(), and the optimizer above; torch.optim on model.parameters() is an error in its
    step(). state_dict() has the whole parameters, under the names of the unwrapped module; it is collective, and so is
    load_state_dict() in that every rank must call it with the same values. State-dict hooks of modules inside see values of
    param_dtype: what they copy or convert has all bits in the state, what they compute has those of param_dtype.

    Options: sharding_strategy (PyTorch's enumeration or its names in lower case), sync_module_states as in PyTorch;
    param_dtype, reduce_dtype, buffer_dtype, shard_size, shard_by_parameter, ignored_modules, ignored_parameters (names),
    communication_hook, unit_limit, prefetch_units, byte_limit, check_unit_order as in the C++ library (fsdp.h).
    Other options of PyTorch's are taken where their value changes nothing (cpu_offload=None, limit_all_gathers=True).
    The constructor is collective.
    """

    _elsewhere = {
        **COMM_HOOK_ADVICE,
        **dict.fromkeys(("state_dict_type", "set_state_dict_type"), "model.state_dict() has the whole parameters on every rank"),
        **dict.fromkeys(("optim_state_dict", "full_optim_state_dict"), "optimizer.state_dict() has the whole state on every rank"),
        "optim_state_dict_to_load": "optimizer.load_state_dict() takes the whole state",
    }

    def __init__(
        self, module: torch.nn.Module, process_group: Any = None, *, auto_wrap_policy: Policy = None, **options: Any
    ) -> None:
        mirror = mirror_of(module)
        options = without_torch_options("FullyShardedDataParallel", without_cpu_options(options, module), FSDP)
        _refuse_nested(module)
        ignored = set(options.get("ignored_parameters", ()))
        below = tuple(f"{name}." for name in options.get("ignored_modules", ()) if name)
        left_out = parameters_where(module, lambda name: name in ignored or name.startswith(below or "\0"))
        taken = [one for one in module.parameters() if id(one) not in left_out]
        refuse_torch_ddp(module, "FullyShardedDataParallel", taken)
        trained = {id(one) for one in taken if one.requires_grad}
        options = with_ignored_of_torch("FullyShardedDataParallel", module, options, trained, "ignored_parameters")
        left_out |= parameters_where(module, set(options.get("ignored_parameters", ())).__contains__)
        options["auto_wrap_policy"] = unit_names(module, auto_wrap_policy)
        group = group_of(process_group)
        require_constant_in_forward(module, "FullyShardedDataParallel")
        super().__init__(module, mirror, _C.FullyShardedCore(mirror, group, options), left_out)
        _wrappers[module] = weakref.ref(self)
        self._group = group
        self._param_dtype = options.get("param_dtype")
        self._by_parameter = options.get("shard_by_parameter", False)
        if self._param_dtype is not None:
            converted = [one for one in module.parameters() if id(one) not in self._ignored]
            load_in_full_precision(module, converted, self)
        self.register_state_dict_post_hook(_whole_state)
        self._prefix = ""  # of the load in progress
        self.register_load_state_dict_pre_hook(_with_prefix)
        self.register_load_state_dict_post_hook(_without_prefix)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._param_dtype is not None:
            args, kwargs = tree_map(self._cast, (args, kwargs))
        return super().forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Attributes of the module inside, as in PyTorch; its parameters have the names of state_dict() here too."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or name in self._elsewhere:
                raise
            return getattr(super().__getattr__("module"), name)

    def __getitem__(self, key: Any) -> Any:
        """The module's own, for a Sequential or a list of modules."""
        return self.module[key]  # type: ignore[index]

    def _cast(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.to(self._param_dtype)
        if not dataclasses.is_dataclass(value) or isinstance(value, type):
            return value
        result = copy.copy(value)  # dataclasses.replace() refuses fields that __init__ does not take
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                part = tree_map(self._cast, getattr(value, field.name))
                object.__setattr__(result, field.name, part)  # also where it is frozen
        return result

    def trainable_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that the optimizer updates: those that require a gradient and are not ignored."""
        return [
            parameter
            for parameter in self.module.parameters()
            if parameter.requires_grad and id(parameter) not in self._ignored
        ]

    def clip_grad_norm_(self, max_norm: float, norm_type: float | str = 2.0) -> torch.Tensor:
        """Clips the reduced gradients to a total norm over all shards; returns the norm before. norm_type: also "inf".
        Collective."""
        return torch.tensor(self._core.clip_grad_norm_(float(max_norm), float(norm_type)), device="cpu")

    @contextlib.contextmanager
    def defer_all_reduce(self, defer: bool = True) -> Iterator[None]:
        """Scope for all micro-batches but the last: backward reduces within a host only (hybrid strategies)."""
        scope = self._core.defer_all_reduce() if defer else None
        try:
            yield
        finally:
            if scope is not None:
                scope.end()

    @contextlib.contextmanager
    def summon_full_params(self, **options: Any) -> Iterator[None]:
        """Scope in which parameters can be read and written as if they were not sharded, also through numpy(); write the
        same on all ranks. Arrays that share their memory end with the scope: copy what is to stay.
        Options: writeback, rank0_only, offload_to_cpu, with_grads, recurse. Collective."""
        self._mirror.refresh()
        scope = self._core.summon_full_params(options)
        try:
            yield
        finally:
            scope.end()

    def full_state_dict(self, rank: int | None = None) -> dict[str, torch.Tensor]:
        """Copies of all parameters and buffers by name, on `rank` only (empty elsewhere); None: on every rank. Buffers with
        persistent=False are left out. Collective."""
        self._mirror.refresh()
        whole = self._core.full_state_dict(rank)
        for prefix, module in self.module.named_modules():
            for name in module._non_persistent_buffers_set:
                whole.pop(f"{prefix}.{name}" if prefix else name, None)
        return whole

    def units(self) -> list[list[str]]:
        """Names of the parameters of each unit."""
        return self._core.units()

    def unwrap(self) -> torch.nn.Module:
        """Restores the module for use without this wrapper and returns it. The module may have been changed, as by
        remove_parametrizations(), but not with param_dtype, in which such changes compute. Collective."""
        try:
            self._mirror.refresh()
        except _C.UsageError as changed:
            if self._param_dtype is not None:
                raise _C.UsageError(
                    f"FullyShardedDataParallel: {changed}. Its new values are computed of those in {self._param_dtype}, which "
                    "lack bits: call unwrap() first, and change the module then (remove_parametrizations())"
                ) from None
        self._core.unwrap()
        _wrappers.pop(self.module, None)
        return self.module


# By the module that each one wraps.
_wrappers: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[FullyShardedDataParallel]] = weakref.WeakKeyDictionary()


def _refuse_nested(module: torch.nn.Module) -> None:
    for name, part in module.named_modules():
        wrapper = _wrappers.get(part)
        wrapped = name and wrapper is not None and wrapper() is not None
        if wrapped or isinstance(part, FullyShardedDataParallel):
            raise _C.UsageError(
                f"FullyShardedDataParallel: the sub-module {name} has a FullyShardedDataParallel of its own: unwrap() that one, "
                "and give the whole model to one wrapper, with auto_wrap_policy for the sub-modules that are units"
            )


def _whole_state(wrapper: FullyShardedDataParallel, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Puts whole values for sharded ones, and the names of the unwrapped module for the wrapper's. Leaves alone what hooks and
    modules inside have made of the values."""
    tensors = dict([*wrapper._mirror.names(), *wrapper.module.named_buffers(remove_duplicate=False)])
    # By place: hooks of modules inside, as checkpoint_wrapper()'s, change names.
    places = {_place_of(tensor): name for name, tensor in tensors.items() if _has_place(tensor)}
    storages = {storage for storage, *_ in places}
    whole = wrapper.full_state_dict()
    inner = f"{prefix}module."
    for key in [key for key in state if key.startswith(inner)]:
        name = key[len(inner) :]
        value = state.pop(key)
        if _has_place(value):
            own = places.get(_place_of(value))
        else:
            own = name if isinstance(value, torch.Tensor) and not _has_place(tensors.get(name)) else None
        if own in whole:
            value = whole[own]
        elif name in whole and _converts(value, tensors[name], whole[name]):
            value = whole[name].to(value.device, whole[name].dtype if value.dtype == tensors[name].dtype else value.dtype)
        elif _has_place(value) and _place_of(value)[0] in storages:
            value = value.clone()  # a view; all values of a state are copies
        state[prefix + name] = value
    versions = getattr(state, "_metadata", None)
    if versions is None:
        return
    for key in [key for key in versions if f"{key}.".startswith(inner)]:
        versions[f"{prefix}{key[len(inner) :]}".removesuffix(".")] = versions.pop(key)


def _has_place(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def _place_of(tensor: torch.Tensor) -> tuple[int, int, torch.Size, tuple[int, ...], torch.dtype]:
    """What a tensor and its detach() have in common."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _converts(value: torch.Tensor, tensor: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether the value is but a copy of the tensor, which may have less precision than the whole, in any floating dtype."""
    plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided and not value.is_meta
    if not plain or value.shape != whole.shape:
        return False
    if value.dtype != tensor.dtype and not (value.is_floating_point() and tensor.is_floating_point()):
        return False
    return torch.equal(value, whole.to(value.device, tensor.dtype).to(value.dtype))


def _with_prefix(
    wrapper: FullyShardedDataParallel,
    state: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    if metadata.get("assign_to_params_buffers", False):
        raise _C.UsageError("FullyShardedDataParallel: load_state_dict(assign=True) would replace sharded parameters; "
                            "call it without assign")
    wrapper._prefix = prefix
    for key in [key for key in state if key.startswith(prefix)]:
        state[f"{prefix}module.{key[len(prefix) :]}"] = state.pop(key)
    versions = getattr(state, "_metadata", None)  # of the modules, which look them up by the wrapper's names
    if versions is not None:
        own = [key for key in versions if f"{key}.".startswith(prefix)]
        versions.update({f"{prefix}module.{key[len(prefix) :]}".removesuffix("."): versions[key] for key in own})


def _without_prefix(wrapper: FullyShardedDataParallel, incompatible: Any) -> None:
    """Gives keys that are missing or unexpected the names that they have in the state."""
    inner = f"{wrapper._prefix}module."
    for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
        keys[:] = [wrapper._prefix + key.removeprefix(inner) if key.startswith(inner) else key for key in keys]
