"""Loops under profilers and torch.compile."""

import functools
import importlib
import shutil

import pytest
import torch

import models
import shoal
from loops import SHARDED, assert_close, each_strategy, train_alone
from test_wrappers import RATES, losses_of


def small_steps(model, optimizer, compiled=lambda step: step):
    """Losses of steps that are the same on all ranks."""

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    chosen = compiled(step)
    return [chosen(torch.ones(2, 3) * (number + 1)).item() for number in range(3)]


def small_net():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def one_block():
    torch.manual_seed(7)
    return models.Gpt(blocks=1)


class Normed(torch.nn.Module):
    """Of kernels that inductor writes there are two or three, the first before all operators of PyTorch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.norm, self.head = torch.nn.LayerNorm(64), torch.nn.Linear(64, 5)

    def forward(self, x):
        return self.head(self.norm(x.flatten(1)))


def small_losses():
    net = small_net()
    return small_steps(net, torch.optim.AdamW(net.parameters(), **RATES))


def test_PY05_profilers_and_conversions_to_what_the_module_is_beside_the_step(capfd):
    def trains(strategy, wrap):
        model, optimizer = wrap(small_net())
        with torch.profiler.profile(with_stack=True, record_shapes=True):
            losses = small_steps(model, optimizer)
        assert_close(losses, small_losses())
        model.to("cpu").float()  # as evaluations begin, while gradients are there
        small_steps(model, optimizer)
        if strategy in SHARDED:
            with pytest.raises(shoal.UsageError, match=r"aten::_to_copy takes .*\(to convert the module, call zero_grad"):
                model.to(torch.float64)

    each_strategy(trains)
    assert "Exception" not in capfd.readouterr().err  # which the profiler prints where it cannot read a tensor


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_PY05_torch_compile(backend, tmp_path, monkeypatch):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("no g++")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    importlib.import_module("torch._inductor.compile_fx")  # once, and not on each rank
    name, make = ("gpt", one_block) if backend == "aot_eager" else ("cnn", Normed)
    net = make()
    expected = train_alone(net, models.adamw(net.parameters()), name=name)

    def trains(strategy, wrap):
        if strategy in {"ddp", "fsdp"}:
            torch._dynamo.reset()
            model, optimizer = wrap(make())
            assert_close(losses_of(torch.compile(model, backend=backend), optimizer, name, steps=3), expected)
        elif backend == "aot_eager" and strategy != "zero2":  # the whole step, with an optimizer of shoal
            model, optimizer = wrap(small_net())
            assert_close(small_steps(model, optimizer, functools.partial(torch.compile, backend=backend)), small_losses())

    def refuses(strategy, wrap):
        if strategy == "fsdp":
            torch._dynamo.reset()
            model, optimizer = wrap(make())
            with pytest.raises(RuntimeError, match="is sharded and not in memory on this rank"):
                losses_of(torch.compile(model, backend=backend), optimizer, name, steps=1)

    each_strategy(trains, timeout=250)
    if backend == "inductor":  # its code reads pages past the operators, here before any of them
        each_strategy(refuses, "gloo", timeout=100)
