"""The base of all wrappers of a module."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch.utils.checkpoint import _StopRecomputationError

from .. import _C
from .._mirror import Wrapped, refuse_torch_ddp_around


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a result of forward: in lists, tuples, mappings, dataclasses and objects, however nested."""
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, torch.Tensor):
            found.append(value)
            continue
        if value is None or isinstance(value, (bool, int, float, str, bytes, torch.nn.Module, type)) or id(value) in seen:
            continue
        seen.add(id(value))
        left.extend(reversed(_parts_of(value)))
    return found


def _parts_of(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return list(value)
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in _slots_of(type(value)))]


def _slots_of(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            yield f"_{base.__name__.lstrip('_')}{name}" if private else name


COMM_HOOK_ADVICE = {
    "register_comm_hook": "give the hook to its constructor, such as communication_hook=shoal.hooks.bf16_compress_hook()"
}


class _Elsewhere:
    """A name of PyTorch's that a class does not have: no attribute of it, nor of its objects, and says what to write."""

    def __init__(self, owner: type, name: str, advice: str) -> None:
        self._owner, self._name, self._advice = owner, name, advice

    def __get__(self, instance: Any, kind: type) -> Any:
        try:
            return getattr(super(self._owner, kind if instance is None else instance), self._name)  # of another base
        except AttributeError:
            raise AttributeError(f"{kind.__name__} has no {self._name}(): {self._advice}") from None


class Wrapper(Wrapped):
    """A module with a strategy around its forward and backward. `module` is the user's own, with its own parameters."""

    _elsewhere: ClassVar[dict[str, str]] = {}  # what to write in place of a method of another library's wrapper

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for name, advice in vars(cls).get("_elsewhere", {}).items():
            if name not in vars(cls):
                setattr(cls, name, _Elsewhere(cls, name, advice))

    def __init__(self, module: torch.nn.Module, mirror: _C.Mirror, core: Any, ignored: Collection[int] = ()) -> None:
        super().__init__()
        self._core = core
        self._mirror = mirror
        self._ignored = ignored  # ids of parameters
        self._syncs = True  # in place of the scope for torch.compile, which guards what forward reads
        self._scope: Any = None  # of no_sync
        self.module = module

    def __getattr__(self, name: str) -> Any:
        if name in self._elsewhere:
            return getattr(type(self), name)  # raises it
        return super().__getattr__(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward. An exception outside no_sync() marks the step as failed on this rank: the other ranks get
        StepAbandoned from their backward, and all go on with the next step. Within no_sync() call abandon_step() for that."""
        refuse_torch_ddp_around(self, self._ignored)
        try:
            self._core.before_forward()
            result = self.module(*args, **kwargs)
            self._core.after_forward(tensors_in(result), self.training)
        except _StopRecomputationError:
            raise  # a checkpoint around this forward has all that backward needs
        except BaseException:
            self._core.forward_failed()
            raise
        return result

    @contextlib.contextmanager
    def no_sync(self, accumulate: bool = True) -> Iterator[None]:
        """Scope in which backward accumulates gradients on this rank only; the first backward after it reduces them.

        for i, batch in enumerate(micro_batches):
            with model.no_sync(i + 1 < len(micro_batches)):
                loss(model(batch)).backward()
        """
        if not accumulate:
            yield
            return
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @property
    def require_backward_grad_sync(self) -> bool:
        """False: backward accumulates as within no_sync(), until it is True again. An attribute of PyTorch's
        DistributedDataParallel, which many programs set in place of the scope."""
        return self._syncs

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        if bool(value) != self.require_backward_grad_sync:
            self._set_sync(bool(value))

    def _set_sync(self, sync: bool) -> None:
        if sync:
            self._scope.end()
        self._scope = None if sync else self._core.no_sync()
        self._syncs = sync

    def backward(self, loss_sum: torch.Tensor, weight: float) -> None:
        """Backward of a loss that is a sum over `weight` samples or tokens: gradients become the sum over all ranks and
        micro-batches of the step, divided by their total weight."""
        self._core.backward(loss_sum, weight)

    def abandon_step(self) -> None:
        """Ends the step on this rank: after an exception in the loss or in backward, or where a batch is skipped after forward, and
        after any exception within no_sync(), whose micro-batches have begun the step. The other ranks get StepAbandoned from the
        backward that ends it. After an exception in forward outside no_sync() the next one of any wrapper in that thread does so by
        itself. Ranks that have agreed to leave a step, which some of them may not have begun, call zero_grad() alone instead."""
        self._core.abandon_step()

    def _regrouped(self, group: _C.Group) -> None:
        """The ranks are those of this group from now on, with equal parameters."""
        self._group = group

    def join_hook(self, **options: Any) -> Any:
        """UsageError: of torch.distributed.algorithms.Join, which does not know the exchanges of this wrapper."""
        raise _C.UsageError(f"{type(self).__name__}: use shoal.Join(model), a loop, instead of torch.distributed.algorithms.Join")

    def buckets(self) -> list[list[str]]:
        """Names of the parameters of each bucket, in the order in which buckets are reduced."""
        return self._core.buckets()

    def extra_repr(self) -> str:
        return f"steps={self._core.steps()}"

    def __deepcopy__(self, memo: Any) -> None:
        raise TypeError(f"a {type(self).__name__} cannot be copied: copy its module (model.module) and wrap the copy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"a {type(self).__name__} cannot be pickled: save model.state_dict(), or the module in it")
