"""DistributedDataParallel."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from .. import _C
from .._loaded import Loads
from .._mirror import mirror_of, parameters_where, require_constant_in_forward, with_ignored_of_torch
from ..distributed import group_of
from ._torch_options import DDP, without_torch_options
from ._wrapper import COMM_HOOK_ADVICE, Wrapper

_WRITTEN = "parameters loaded or written, or gradients set by hand (do the same on every rank)"
# For errors of ranks that have nothing to compare, which have room for so much.
_WRITTEN_HERE = "agreement on parameters loaded or written, or gradients by hand; elsewhere not, or as they were"

# Wrappers that live.
_wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def _wrappers_of(parameters: Iterable[torch.Tensor]) -> list[DistributedDataParallel]:
    wanted = {id(parameter) for parameter in parameters}
    return [model for model in _wrappers if any(id(parameter) in wanted for _, parameter in model._watched)]


def note_equal_values(parameters: Iterable[torch.Tensor]) -> None:
    """Tells wrappers that these parameters get equal values on all ranks in a step. Only the ranks that own a parameter
    count it as written, and a comparison needs all ranks."""
    for model in _wrappers_of(parameters):
        model._equal = True


def compare_in_forward(parameters: Iterable[torch.Tensor]) -> None:
    """The next forward compares these parameters on all ranks, whether this one counts them as written or not."""
    for model in _wrappers_of(parameters):
        model._compares = True


class DistributedDataParallel(Wrapper):
    """Data parallelism with a full replica of the model on every rank, after torch.nn.parallel's class of this name.

    model = shoal.nn.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)  # before or after; any optimizer
    ...
    loss_fn(model(x), y).backward()  # returns when grad of every parameter is the mean over ranks
    optimizer.step()
    optimizer.zero_grad()

    Options: broadcast_buffers, find_unused_parameters, static_graph, bucket_cap_mb, gradient_as_bucket_view as in
    PyTorch; first_bucket_mb, grad_reduce_in_fp32, reduce_dtype, ignored (names of parameters and buffers), and
    communication_hook ("fp16", "bf16", "int8", "powersgd:4", "topk:0.01") as in the C++ library, whose header ddp.h
    describes them. Other options of PyTorch's are taken where their value changes nothing; an unknown
    option is a UsageError.

    The constructor is collective. It compares the models of all ranks (DisagreeError) and broadcasts rank 0's values.
    If parameters are loaded, or written and no step lies between, the next forward compares the values of all ranks. One
    rank may load other values for an evaluation by load_state_dict() if it restores its own before that.
    Writes in place after a step, or after a backward within no_sync() (perturbations by this rank's gradients), are not
    compared, as in PyTorch; those to `.data` are only before the first forward.
    """

    _elsewhere = {
        **COMM_HOOK_ADVICE,
        "join": "write the loop with shoal.Join(model)",
        "_set_static_graph": "give static_graph=True to its constructor",
        "_set_params_and_buffers_to_ignore_for_model": "give their names to its constructor, ignored=[...]",
        "_get_ddp_logging_data": "buckets() has the parameters of each bucket; the options are those of its constructor",
    }

    def __init__(self, module: torch.nn.Module, process_group: Any = None, **options: Any) -> None:
        options = without_torch_options("DistributedDataParallel", options, DDP)
        group = group_of(process_group)
        mirror = mirror_of(module)
        require_constant_in_forward(module, "DistributedDataParallel")
        options = with_ignored_of_torch("DistributedDataParallel", module, options)
        ignored = parameters_where(module, set(options.get("ignored", ())).__contains__)
        super().__init__(module, mirror, _C.DistributedDataParallelCore(mirror, group, options), ignored)
        self._watched = [one for one in module.named_parameters() if id(one[1]) not in ignored]
        self._loads = Loads(module, (parameter for _, parameter in self._watched))
        self._equal = False  # an optimizer of shoal has written values since
        self._first = True  # no forward has trained yet
        self._regrouped(group)
        _wrappers.add(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.training and torch.is_grad_enabled() and self.require_backward_grad_sync:
            _C.uncompiled(_compare_if_written, self)  # compiled, the versions of the first call would stay for good
        return super().forward(*args, **kwargs)

    def _set_sync(self, sync: bool) -> None:
        super()._set_sync(sync)
        if sync:
            self._local = True
        else:
            _C.uncompiled(_note_writes, self)

    def _regrouped(self, group: _C.Group) -> None:
        super()._regrouped(group)
        self._seen = self._versions(), self._core.steps()
        # Digests of the values of all ranks at _seen. None after steps: it would take a pass over the parameters in each.
        self._common: list[int] | None = self._digests()
        self._loads.clear()
        self._compares = False
        self._due: list[int] | None = None  # digests that the next forward compares
        self._local = False  # gradients of this rank alone may have changed values since

    def _versions(self) -> int:
        return sum(parameter._version for _, parameter in self._watched)

    def _digests(self) -> list[int]:
        return [_C.digest(parameter) for _, parameter in self._watched]


def _advice(parameter: torch.Tensor) -> str:
    return "" if parameter.requires_grad else " (frozen: if each rank writes its own values, name it in ignored)"


def _note_writes(model: DistributedDataParallel) -> None:
    """Takes the digests for a comparison if parameters were loaded, or written and nothing explains it: a step, or gradients of
    this rank within no_sync()."""
    versions, steps = model._seen
    now = model._versions(), model._core.steps()
    loaded = model._compares or model._loads.count()
    stepped = now[1] != steps or model._equal
    if stepped:
        model._common = None
    # Versions do not count writes to `.data`, of which functions that initialise a model are full.
    unseen = model._first and not stepped and model._digests() != model._common
    explained = stepped or model._local
    model._equal = model._first = model._local = False
    if now[0] == versions and not loaded and not unseen:
        return
    model._seen = now
    model._loads.clear()
    model._compares = False
    if loaded or not explained:
        model._due = model._digests()
    else:
        model._common = None


def _compare_if_written(model: DistributedDataParallel) -> None:
    """DisagreeError if parameters were written without a reduction since, and not with the same values on all ranks."""
    model._core.settle()  # a step that has failed: other ranks are still in its sums
    _note_writes(model)
    digests, model._due = model._due, None
    if digests is None:
        return
    if digests != model._common:
        named = zip(model._watched, digests, strict=True)
        items = [f"{name}{_advice(one)} with digest {digest:x}" for (name, one), digest in named]
        _C.agree_as(_WRITTEN_HERE, model._group, _WRITTEN, items)
    model._common = digests
