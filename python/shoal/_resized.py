"""Buffers that a module gives another shape when it loads a state, as observers of quantization do, whose values have one element per
channel once they have seen some."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch


def resize(module: torch.nn.Module, shapes: dict[str, Sequence[int]]) -> Callable[[], None]:
    """Lets a module with a _load_from_state_dict() of its own give these buffers the shapes that they have in a state, with any
    values. What it leaves as it is does not fit. Returns what gives them back their shapes and values."""
    buffers = {name: (module._buffers[name], module._buffers[name].clone()) for name in shapes}

    @torch.no_grad()
    def undo() -> None:
        for name, (buffer, values) in buffers.items():
            module._buffers[name] = buffer.resize_(values.shape).copy_(values)

    if type(module)._load_from_state_dict is torch.nn.Module._load_from_state_dict:
        return undo
    state = {name: buffers[name][0].new_zeros(shape) for name, shape in shapes.items()}
    hooks = module._load_state_dict_pre_hooks  # of wrappers, which would take it for a load
    module._load_state_dict_pre_hooks = OrderedDict()
    try:
        with torch.no_grad():
            module._load_from_state_dict(state, "", {"version": getattr(module, "_version", None)}, False, [], [], [])
            for name, (buffer, _) in buffers.items():
                module._buffers[name] = buffer.resize_(module._buffers[name].shape)  # the tensor that wrappers know
    except Exception:  # of a class that wants the whole state
        undo()
    finally:
        module._load_state_dict_pre_hooks = hooks
    return undo
