"""Options of PyTorch's wrappers that shoal's do not have, or not with PyTorch's default. A value that changes nothing is taken."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import torch

from .. import _C

# The values that change nothing, and what to use instead of others; None: shoal has the option, too.
Option = tuple[tuple[Any, ...], str | None]
Known = dict[str, Option]  # by name

_MESH: Option = ((None,), "give process_group the ranks")
_ORDER: Option = ((None, []), "the ranks share parameters in the order in which backward computes them")
DDP: Known = {
    "device_ids": ((None, []), "move the module to its device before it is wrapped"),
    "output_device": ((None,), "outputs stay where the module is"),
    "dim": ((0,), "each rank gives its own batch to forward"),
    "broadcast_buffers": ((None,), None),
    "forward_sync_buffers": ((None,), "use the option broadcast_buffers"),
    "init_sync": ((True,), "ranks begin with rank 0's values in any case"),
    "bucket_cap_mb": ((None,), None),
    "bucket_cap_mb_list": ((None, []), "the options bucket_cap_mb and first_bucket_mb set the sizes"),
    "check_reduction": ((False, True), "PyTorch does not use it any more"),
    "delay_all_reduce_named_params": _ORDER,
    "param_to_hook_all_reduce": _ORDER,
    "mixed_precision": ((None,), "use torch.autocast around forward, and the option reduce_dtype"),
    "device_mesh": _MESH,
    "skip_all_reduce_unused_params": ((False,), "the option find_unused_parameters allows parameters that no rank uses"),
    "batched_grad_copy": ((False,), "the option gradient_as_bucket_view saves the copies"),
}
FSDP: Known = {
    "sharding_strategy": ((None,), None),
    "use_orig_params": ((False, True), "parameters are the module's own in any case"),
    "limit_all_gathers": ((True,), "the option unit_limit bounds how many units are gathered"),
    "forward_prefetch": ((False,), "the option prefetch_units sets how many units are gathered ahead"),
    "backward_prefetch": ((None, "BACKWARD_PRE"), "the option prefetch_units sets how many units are gathered ahead"),
    "mixed_precision": (
        (None, "MixedPrecision()"),
        "use the options param_dtype, reduce_dtype and buffer_dtype; parameters have param_dtype outside of forward, too, so "
        "averages of the weights need model.state_dict(), which is float32",
    ),
    "ignored_modules": ((None,), None),
    "ignored_states": ((None, [], ()), "name them in ignored_parameters, or their modules in ignored_modules"),
    "cpu_offload": ((None, "CPUOffload()"), "parameters stay on the device where the module is"),
    "device_id": ((None,), "move the module to its device before it is wrapped"),
    "param_init_fn": ((None,), "initialise the module before it is wrapped"),
    "device_mesh": _MESH,
}
ZERO: Known = {
    "parameters_as_bucket_view": ((False, True), "parameters share buffers in any case"),
    "overlap_with_ddp": ((False,), "step() updates the parameters after backward"),
}


def without_torch_options(owner: str, options: dict[str, Any], known: Known) -> dict[str, Any]:
    """The other options. UsageError, which says what to use, for one of PyTorch's with a value that would change something."""
    rest = {}
    for name, value in options.items():
        if name not in known:
            rest[name] = value
            continue
        harmless, instead = known[name]
        plain = _plain(value)
        if any(type(plain) is type(one) and plain == one for one in harmless):
            continue
        if instead is not None:
            raise _C.UsageError(f"{owner} has no option {name}: {instead}")
        rest[name] = value
    return rest


def without_cpu_options(options: dict[str, Any], module: torch.nn.Module) -> dict[str, Any]:
    """Without those of FSDP that put parameters on the CPU, if that is where the module's are."""
    if any(tensor.device.type != "cpu" for tensor in (*module.parameters(), *module.buffers())):
        return options
    rest = dict(options)
    if getattr(rest.get("cpu_offload"), "offload_params", False):
        del rest["cpu_offload"]
    device = rest.get("device_id")
    if isinstance(device, (str, torch.device)) and str(device).partition(":")[0] == "cpu":
        del rest["device_id"]
    return rest


def _plain(value: Any) -> Any:
    """PyTorch's enumerations and objects of default options as text, since importing their classes takes long."""
    if isinstance(value, enum.Enum):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if all(getattr(value, field.name) == field.default for field in dataclasses.fields(value)):
            return f"{type(value).__name__}()"
    return value
