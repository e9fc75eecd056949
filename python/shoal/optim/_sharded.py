"""The base of optimizers of which each rank runs a part."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .. import _C
from .._new import make_new_tensors_work
from ._recipe import Recipe
from ._state import check_state, is_number, items_of, loaded_options, number_of


@dataclass(frozen=True)
class StepResult:
    """What a step did. updated: False if some rank found inf or NaN and nothing was updated. grad_norm: with clip_grad,
    the norm before clipping. num_zeros: with log_num_zeros_in_grad."""

    updated: bool
    grad_norm: float | None
    num_zeros: int | None


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer whose param groups are those of the whole model, and whose state is spread over the ranks.

    Schedules change param_groups as usual. state_dict() has the format of torch.optim, with the whole state, so that an
    optimizer of one process, or another strategy, loads it; it is collective. Parameters without elements have no state,
    except under OSS.
    """

    def __init__(self, recipe: Recipe, core: Any, group: _C.Group) -> None:
        self._group = group
        make_new_tensors_work()
        self._core = None  # add_param_group is the base class's until there is one
        super().__init__(recipe.groups, recipe.defaults)
        self._core = core
        self._must_scale = False  # a loss scaler was asked for, and scale_loss() has not been called
        self._make = recipe.make
        self._kinds: dict[str, str] = {}
        self._learn_kinds(recipe)
        self._known = [list(group["params"]) for group in self.param_groups]
        self.last_step: StepResult | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates what this rank owns and publishes it to all ranks. Returns the closure's result. Collective."""
        return _C.uncompiled(self._update, closure)  # compiled, param_groups would be read together with the state

    def _update(self, closure: Callable[[], Any] | None) -> Any:
        """step(), which torch.compile does not look into."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._must_scale:
            raise _C.UsageError(
                f"{type(self).__name__}: with the option scaler, backward is optimizer.scale_loss(loss).backward(): the "
                "gradients would be divided by a scale that the loss never had"
            )
        self._push()
        self._check_gradients_by_hand()
        self.last_step = StepResult(*self._core.step())
        # Other ranks or other tensors have written parameters, of which autograd does not know; not those of OSS on one rank.
        if self.last_step.updated and (self._group.size > 1 or isinstance(self._core, _C.ShardedOptimizerCore)):
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            torch.autograd.graph.increment_version([one for one in parameters if one.grad is not None])
        return loss

    def _optimizer_step_code(self) -> None:
        """Where PyTorch's profiler, by the base class's code, reads gradients and state past the operators."""

    @property
    def state(self) -> Any:  # type: ignore[override]
        """UsageError: the state is spread over the ranks."""
        raise _C.UsageError(
            f"{type(self).__name__}: its state is spread over the ranks; read it with state_dict(), on every rank, and set "
            "it with load_state_dict()"
        )

    @state.setter
    def state(self, state: Any) -> None:
        if self._core is not None:  # not the base class's constructor
            raise _C.UsageError(f"{type(self).__name__}: its state is spread over the ranks; set it with load_state_dict()")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops or zeroes the gradients, reduced ones included."""
        self._core.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._core is not None:
            raise _C.UsageError(
                f"{type(self).__name__}: its parameters are those of the wrapped module; construct it again with all "
                "param groups"
            )
        super().add_param_group(param_group)

    def _regrouped(self, group: _C.Group) -> None:
        """The ranks are those of this group from now on."""
        self._group = group

    def _learn_kinds(self, recipe: Recipe) -> None:
        """Numbers of the state stay what they are in the optimizer's class, wherever they move."""
        self._kinds.update(recipe.kinds)
        self._core.know_kinds(self._kinds)

    def _push(self) -> None:
        """Options of param_groups, which schedules change, to C++."""
        same = len(self._known) == len(self.param_groups) and all(
            len(known) == len(group["params"]) and all(a is b for a, b in zip(known, group["params"], strict=True))
            for known, group in zip(self._known, self.param_groups, strict=True)
        )
        if not same:
            raise _C.UsageError(
                f"{type(self).__name__}: param_groups have other parameters than at construction; construct it again"
            )
        self._core.read_options(self.param_groups)

    def _check_gradients_by_hand(self) -> None:
        """DisagreeError if gradients were set by hand, and differ between ranks. OSS cannot tell them from others."""
        by_hand = self._core.gradients_by_hand() if isinstance(self._core, _C.ShardedOptimizerCore) else []
        if by_hand:
            names = self._names()
            items = [f"the gradient of {names[number]} with digest {_C.digest(gradient):x}" for number, gradient in by_hand]
            _C.agree(self._group, "gradients that were set by hand, which must be the same on every rank", items)

    def _check_local_state(self) -> None:
        """UsageError if this rank's part has the state of another optimizer."""
        local = self._core.local()
        check_state(self._make, local.param_groups, local.state.get)

    def _pull(self) -> None:
        """Options that C++ has loaded to param_groups."""
        self._core.write_options(self.param_groups)

    def _own_gradients(self) -> list[torch.Tensor] | None:
        """Reduced gradients of what this rank owns; None: grad of every parameter can be read as usual."""
        raise _C.UsageError(f"{type(self).__name__}: give it a loss scaler by its option scaler, and scale by scale_loss()")

    # State by index of the parameter, as torch.optim has it.

    def _names(self) -> list[str]:
        """Name in C++ of each parameter, in the order of param_groups."""
        raise NotImplementedError

    def _named_state(self) -> dict[str, dict[str, Any]]:
        return self._core.state_dict(None)

    def _load_named_state(self, state: dict[str, dict[str, Any]]) -> None:
        self._core.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """The whole state, on every rank, in the format of torch.optim. Collective."""
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        whole = self._whole_state()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, whole)
            whole = whole if changed is None else changed
        return whole

    def _whole_state(self) -> dict[str, Any]:
        named = self._named_state()
        state = {}
        for index, name in enumerate(self._names()):
            entry = named.pop(name, {})
            if entry:
                state[index] = {
                    key: value if isinstance(value, torch.Tensor) else number_of(self._kinds.get(key), value)
                    for key, value in entry.items()
                }
        groups, first = [], 0
        for group in self.param_groups:
            last = first + len(group["params"])
            groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": list(range(first, last))})
            first = last
        return {"state": state, "param_groups": groups, **({"others": named} if named else {})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the whole state, from this class, torch.optim, any strategy and number of ranks. Every rank must pass the
        same (DisagreeError). Collective."""
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = state_dict.copy()
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._load_whole_state(state_dict)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _load_whole_state(self, state_dict: dict[str, Any]) -> None:
        subject = f"the state that load_state_dict() of {type(self).__name__} was given"
        try:
            saved, keys, parameters = self._checked(state_dict)
            items = items_of(state_dict)
        except Exception as error:  # the other ranks wait for this one
            with contextlib.suppress(_C.DisagreeError):
                _C.agree(self._group, subject, [f"a state that it refuses: {error}"])
            raise
        _C.agree(self._group, subject, items)
        named: dict[str, dict[str, Any]] = dict(state_dict.get("others", {}))
        for name, key, parameter in zip(self._names(), keys, parameters, strict=True):
            entry = _plain(state_dict["state"].get(key, {}), parameter)
            if entry or parameter.requires_grad:
                named[name] = entry
        self._load_named_state(named)
        for theirs, ours in zip(saved, self.param_groups, strict=True):
            ours.update(loaded_options(self._make, ours, theirs))
        self._push()

    def _checked(self, state_dict: dict[str, Any]) -> tuple[list[Any], list[Any], list[torch.Tensor]]:
        """The saved param groups, the keys of their parameters, and the parameters. Raises what the state lacks."""
        saved = state_dict["param_groups"]
        if len(saved) != len(self.param_groups):
            raise ValueError(f"the state has {len(saved)} param groups, the optimizer {len(self.param_groups)}")
        for index, (theirs, ours) in enumerate(zip(saved, self.param_groups, strict=True)):
            if len(theirs["params"]) != len(ours["params"]):
                raise ValueError(
                    f"param group {index} has {len(theirs['params'])} parameters in the state, {len(ours['params'])} here"
                )
        keys = [key for group in saved for key in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        past = {id(parameter): state_dict["state"].get(key, {}) for key, parameter in zip(keys, parameters, strict=True)}
        groups = [
            {**ours, **{k: v for k, v in theirs.items() if k in ours and k != "params"}}
            for theirs, ours in zip(saved, self.param_groups, strict=True)
        ]
        check_state(self._make, groups, lambda parameter: past[id(parameter)])
        return saved, keys, parameters

    def __getstate__(self) -> Any:
        raise TypeError(f"a {type(self).__name__} cannot be pickled or copied: use state_dict(), on every rank")

    def __deepcopy__(self, memo: Any) -> None:
        self.__getstate__()


def _plain(entry: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """One parameter's state, with numbers for tensors that are numbers."""
    entry = {key: value for key, value in entry.items() if value is not None}
    return {
        key: value.item() if isinstance(value, torch.Tensor) and is_number(key, value, parameter) else value
        for key, value in entry.items()
    }
