"""DecentralizedDataParallel."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .. import _C
from .._gossip import Gossip
from .._loaded import tell_of_loading
from .._mirror import mirror_of, parameters_where, refuse_torch_ddp, with_ignored_of_torch
from .._words import in_words
from ..distributed import group_of
from ..optim._recipe import OptimizerClass, Recipe, groups_of_module, recipe_of
from ..optim._state import names_in, without_hooks_of_all
from ._wrapper import Wrapper

_options = (
    "topology",
    "topology_local_size",
    "seed",
    "clip_grad",
    "scaler",
    "average_buffers",
    "ignored",
    "neighbour_timeout_seconds",
    "bucket_cap_mb",
    "param_as_bucket_view",
    "exchange_dtype",
)


class Rates(torch.optim.Optimizer):
    """The param groups of a DecentralizedDataParallel, for schedules. Backward has made the step already."""

    def __init__(self, recipe: Recipe, core: Any) -> None:
        self._made = False
        self._core = weakref.ref(core)
        super().__init__(recipe.groups, recipe.defaults)
        self._made = True
        self._opt_called = True  # PyTorch's schedules warn until step() was called, which there is no need to

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Without the hooks of all optimizers, which the updates in backward have called."""
        step = torch.optim.Optimizer.profile_hook_step(func)

        @functools.wraps(func)
        def run(*arguments: Any, **keywords: Any) -> Any:
            return without_hooks_of_all(step, *arguments, **keywords)

        return run

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._made:
            raise _C.UsageError(
                "DecentralizedDataParallel: its parameters are those of the wrapped module, which backward updates; construct "
                "it again with all param groups (params=...)"
            )
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluates the closure, if there is one; backward updates the parameters. UsageError if gradients of some of them were
        zeroed or dropped since, and if the wrapper is gone."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        core = self._core()
        if core is None:
            raise _C.UsageError(
                "DecentralizedDataParallel: the wrapper of this optimizer is gone, and backward has updated nothing: keep the "
                "wrapper, and call its forward"
            )
        core.check_gradients()
        return result

    def _optimizer_step_code(self) -> None:
        """Where PyTorch's profiler, by the base class's code, reads gradients past the operators."""

    def state_dict(self) -> Any:
        raise _C.UsageError("DecentralizedDataParallel: save its state with shoal.checkpoint")

    def load_state_dict(self, state_dict: Any) -> None:
        raise _C.UsageError("DecentralizedDataParallel: load its state with shoal.checkpoint")


def _items(recipe: Recipe, mirror: Any) -> list[str]:
    """The optimizer in words, for comparison over ranks."""
    items = [recipe.name]
    for number, group in enumerate(recipe.groups):
        items += [f"param group {number}: {key} {in_words(value)}" for key, value in group.items() if key != "params"]
        items += [f"param group {number}: {name}" for name in names_in(mirror, [group])]
    return items


def _refuse_foreign(module: torch.nn.Module, groups: list[dict[str, Any]]) -> None:
    own = {id(parameter) for parameter in module.parameters()}
    for number, group in enumerate(groups):
        for parameter in group["params"]:
            if id(parameter) not in own:
                raise _C.UsageError(
                    f"DecentralizedDataParallel: a parameter {list(parameter.shape)} of param group {number} is not one of the "
                    "module, whose backward updates: put it into the module, or give it to an optimizer of its own"
                )


class DecentralizedDataParallel(Gossip, Wrapper):
    """Decentralised training: every rank trains its own parameters and averages them with a few neighbours per step.

    model = shoal.nn.DecentralizedDataParallel(net, torch.optim.AdamW, topology="ring", lr=1e-3)
    ...
    loss_fn(model(x), y).backward()  # averages, updates and publishes, bucket by bucket
    model.optimizer.step()           # does nothing; schedules take model.optimizer

    Options: topology (a name, see `shoal topology --list`), topology_local_size, seed, clip_grad, scaler (a dictionary),
    average_buffers, ignored, neighbour_timeout_seconds, bucket_cap_mb, param_as_bucket_view, exchange_dtype as in the C++
    library (decentralized.h); other keyword arguments are those of the optimizer's class. params: param groups, or None for
    all that require a gradient. The constructor is collective, and compares options, optimizers and models of all ranks.
    Rates may differ from then on: a rank updates its own parameters, by a rate that its own loss may have lowered.
    """

    _elsewhere = {"set_accumulate_grad": "run the micro-batches before the last within no_sync()"}

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer_class: OptimizerClass,
        process_group: Any = None,
        params: Iterable[Any] | None = None,
        **defaults: Any,
    ) -> None:
        options = {name: defaults.pop(name) for name in _options if name in defaults}
        mirror = mirror_of(module)
        groups = groups_of_module(module, params, options.get("ignored", ()))
        trained = [one for group in groups for one in group["params"]]
        _refuse_foreign(module, groups)
        refuse_torch_ddp(module, "DecentralizedDataParallel", trained)
        options = with_ignored_of_torch("DecentralizedDataParallel", module, options, {id(one) for one in trained})
        recipe = recipe_of("DecentralizedDataParallel", groups, optimizer_class, defaults, options=_options)
        group = group_of(process_group)
        core = _C.DecentralizedDataParallelCore(mirror, *recipe.core_arguments(), group, options)
        super().__init__(module, mirror, core, parameters_where(module, set(options.get("ignored", ())).__contains__))
        self._make = recipe.make  # which the core refers to
        self.optimizer = Rates(recipe, core)
        core.follow(self.optimizer)
        tell_of_loading(module, core)
        _C.agree(group, "the optimizer of DecentralizedDataParallel", _items(recipe, mirror))

    def parameters_loaded(self) -> None:
        """Call it after values were loaded into the parameters by other means than load_state_dict(), such as copy_()."""
        self._core.parameters_loaded()

    def global_avg(self) -> None:
        """Sets the parameters of all ranks to their mean. Collective over all ranks."""
        mirror_of(self.module)  # forward may have replaced buffers
        super().global_avg()

    def last_norm(self) -> float:
        """Norm of this rank's gradients in the last step before clipping, with clip_grad."""
        return self._core.last_norm()

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the scaler's factor; without a scaler, the loss."""
        return self._core.scale_loss(loss)
