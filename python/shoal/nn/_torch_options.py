"""Options of PyTorch's wrappers that shoal's do not have. A value that changes nothing is taken."""

from __future__ import annotations

from typing import Any

from .. import _C

# By name: the values that change nothing, and what to use instead of others.
Known = dict[str, tuple[tuple[Any, ...], str]]

_MESH = ((None,), "give process_group the ranks")
DDP: Known = {
    "device_ids": ((None,), "move the module to its device before it is wrapped"),
    "output_device": ((None,), "outputs stay where the module is"),
    "dim": ((0,), "each rank gives its own batch to forward"),
    "init_sync": ((True,), "ranks begin with rank 0's values in any case"),
    "delay_all_reduce_named_params": ((None,), "the ranks share parameters in the order in which backward computes them"),
    "mixed_precision": ((None,), "use torch.autocast around forward, and the option reduce_dtype"),
    "device_mesh": _MESH,
}
FSDP: Known = {
    "use_orig_params": ((True,), "parameters are the module's own in any case"),
    "limit_all_gathers": ((True,), "the option unit_limit bounds how many units are gathered"),
    "forward_prefetch": ((False,), "the option prefetch_units sets how many units are gathered ahead"),
    "backward_prefetch": ((None,), "the option prefetch_units sets how many units are gathered ahead"),
    "mixed_precision": ((None,), "use the options param_dtype, reduce_dtype and buffer_dtype"),
    "ignored_states": ((None,), "name them in ignored_parameters, or their modules in ignored_modules"),
    "cpu_offload": ((None,), "shards of a module on the CPU stay there"),
    "device_id": ((None,), "move the module to its device before it is wrapped"),
    "param_init_fn": ((None,), "initialise the module before it is wrapped"),
    "device_mesh": _MESH,
}


def without_torch_options(owner: str, options: dict[str, Any], known: Known) -> dict[str, Any]:
    """The other options. UsageError, which says what to use, for one of PyTorch's with a value that would change something."""
    rest = {}
    for name, value in options.items():
        if name not in known:
            rest[name] = value
            continue
        harmless, instead = known[name]
        if not any(value is one for one in harmless):
            raise _C.UsageError(f"{owner} has no option {name}: {instead}")
    return rest
