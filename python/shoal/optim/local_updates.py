"""LocalUpdates: local SGD, SlowMo, DiLoCo."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .. import _C
from .._loaded import tell_of_loading
from .._mirror import mirror_of, with_ignored_of_torch
from ..distributed import group_of


@dataclass(frozen=True)
class Averaging:
    """Outer optimizer: the shared parameters become the mean of the ranks' (local SGD)."""


@dataclass(frozen=True)
class SlowMo:
    """Outer optimizer with momentum in units of the inner learning rate."""

    slow_lr: float = 1.0
    slow_momentum: float = 0.5


@dataclass(frozen=True)
class OuterNesterov:
    """Outer optimizer with Nesterov momentum (DiLoCo)."""

    lr: float = 0.7
    momentum: float = 0.9


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """LBFGS does, and classes whose step() has no default for it."""
    parameters = inspect.signature(optimizer.step).parameters
    return "closure" in parameters and parameters["closure"].default is inspect.Parameter.empty


class LocalUpdates(torch.optim.Optimizer):
    """Local training with an exchange of parameters every many steps.

    inner = torch.optim.AdamW(net.parameters(), lr=4e-4)
    optimizer = shoal.optim.LocalUpdates(net, inner, every=500, outer=shoal.optim.OuterNesterov())
    ...
    loss_fn(net(x), y).backward()  # no communication
    optimizer.step()               # inner.step(), and an exchange if one is due
    optimizer.zero_grad()

    param_groups and state are the inner optimizer's, so schedules work on either. Gradients are this rank's own: clip
    them as in one process. A GradScaler is refused. Every rank must call step() equally often; a rank without a batch calls
    step(update=False). Options: every, outer, fragments, delay, alpha, warmup_steps, reset_optimizer, average_buffers,
    ignored, reduce_dtype as in the C++ library (local_updates.h). The constructor is collective and broadcasts rank 0's values.

    Values that load_state_dict() loads between steps, or that all ranks write alike, are where training goes on on all ranks.
    Other writes in place count as local training; either way all ranks write the same parameters, or none.
    """

    def __init__(
        self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, process_group: Any = None, **options: Any
    ) -> None:
        outer = options.pop("outer", Averaging())
        if not isinstance(outer, (Averaging, SlowMo, OuterNesterov)):
            raise _C.UsageError(f"LocalUpdates: outer is {outer!r}; give Averaging(), SlowMo() or OuterNesterov()")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise _C.UsageError("LocalUpdates: its second argument is an optimizer that holds the module's parameters")
        if _needs_closure(optimizer):
            raise _C.UsageError(
                f"LocalUpdates: step() of {type(optimizer).__name__} needs a closure, which LocalUpdates does not hand on: give an "
                "optimizer that updates by the gradients of one backward"
            )
        self._inner = optimizer
        self._module = module
        super().__init__(optimizer.param_groups, optimizer.defaults)
        options["outer"] = {"kind": type(outer).__name__, **asdict(outer)}
        self._mirror = mirror_of(module)
        options = with_ignored_of_torch("LocalUpdates", module, options)
        self._core = _C.LocalUpdates(self._mirror, optimizer, group_of(process_group), options)
        tell_of_loading(module, self._core)

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The optimizer that it was constructed with. Construct it again for another one."""
        return self._inner

    # torch.amp.GradScaler then always calls step(), and says so by attributes.
    _step_supports_amp_scaling = True

    # The base class keeps groups and state of its own; these are the inner optimizer's, also after it has loaded others.

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        pass

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        pass

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "_core" in self.__dict__:
            raise _C.UsageError("LocalUpdates: construct it again with an optimizer that has all param groups")

    def step(self, closure: Callable[[], Any] | None = None, *, update: bool = True) -> Any:
        """A step of the inner optimizer, unless update is False, and an exchange if one is due. Returns the closure's
        result. Collective if an exchange is sent or applied."""
        if hasattr(self, "found_inf"):
            del self.found_inf
            raise _C.UsageError(
                "LocalUpdates: a GradScaler leaves steps out on one rank alone, and every rank must call step() equally often: "
                "train in bfloat16, or scale the loss by a constant"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._core.step(update)
        return loss

    def parameters_loaded(self) -> None:
        """Call it after values that differ between ranks were loaded into the parameters by other means than
        load_state_dict(), such as copy_()."""
        self._core.parameters_loaded()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._core.zero_grad(set_to_none)
        self.inner.zero_grad(set_to_none)

    @contextlib.contextmanager
    def mean_parameters(self) -> Iterator[None]:
        """Scope in which parameters hold the mean over ranks, to evaluate, and for the module's state_dict() and save_module();
        steps and checkpoints in it are errors. A checkpoint has the mean, too. Collective, after the same number of steps on
        all ranks."""
        scope = self._core.mean_parameters()
        try:
            yield
        finally:
            scope.end()

    def steps(self) -> int:
        """Number of steps so far, the warm-up included."""
        return self._core.steps()

    def fragments(self) -> list[list[str]]:
        """Names of the parameters that are exchanged together."""
        return self._core.fragments()

    def state_dict(self) -> Any:
        raise _C.UsageError(
            "LocalUpdates: its state is this rank's and that of all ranks: save it with shoal.checkpoint, or "
            "inner.state_dict() for the optimizer alone"
        )

    def load_state_dict(self, state_dict: Any) -> None:
        raise _C.UsageError("LocalUpdates: load it with shoal.checkpoint, or inner.load_state_dict() for the optimizer alone")

    def __getstate__(self) -> Any:
        raise TypeError("a LocalUpdates cannot be pickled or copied: save it with shoal.checkpoint")

    def __deepcopy__(self, memo: Any) -> None:
        self.__getstate__()
