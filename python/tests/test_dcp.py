"""Files of PyTorch, of torch.distributed.checkpoint and of safetensors, under every strategy, between numbers of ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import models
import shoal
from loops import PREFIXED, assert_close, named, train_alone
from ranks import on_ranks
from test_wrappers import STRATEGIES, losses_of


def whole_run(ranks, steps, dtype=torch.float32):
    """One process with the batches of so many ranks: its model and optimizer after the steps."""
    net = models.make("gpt").to(dtype)
    optimizer = models.adamw(net.parameters())
    train_alone(net, optimizer, steps, ranks=ranks)
    return net, optimizer


def trained(steps, dtype=torch.float32):
    """Each strategy with its model and optimizer after the steps."""
    for strategy, wrap in STRATEGIES.items():
        model, optimizer = wrap(models.make("gpt").to(dtype), None, None)
        losses_of(model, optimizer, "gpt", steps=steps)
        yield strategy, model, optimizer


@pytest.mark.parametrize("ranks", [2, 3])
def test_PY07_distributed_checkpoints_of_pytorch(tmp_path, ranks):
    """Saved by two ranks, loaded by two or three, into a training that has other values. In float64, where the order in
    which ranks are added does not show."""
    net, optimizer = whole_run(2, 3, torch.float64)
    expected = train_alone(net, optimizer, 3, ranks=ranks)

    def saves(rank):
        for strategy, model, optimizer in trained(3, torch.float64):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
            dcp.save(state, checkpoint_id=tmp_path / strategy)

    def loads(rank):
        for strategy, model, optimizer in trained(1, torch.float64):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 0}
            dcp.load(state, checkpoint_id=tmp_path / strategy)
            assert state["step"] == 3
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            assert_close(losses_of(model, optimizer, "gpt", steps=3), expected)

    on_ranks(saves)
    on_ranks(loads, ranks)


def test_PY07_state_dict_helpers_of_pytorch(tmp_path):
    """get_model_state_dict and its like know PyTorch's own wrappers: right, or an error, never half a state."""
    from torch.distributed.checkpoint import state_dict as helpers

    def saves(rank):
        for strategy, model, _ in trained(2):
            expected, _ = whole_run(2, 2)
            state = helpers.get_model_state_dict(model)
            for name, value in named(strategy, expected.state_dict()).items():
                found = state.get(name, state.get(name.removeprefix("module.")))
                assert torch.equal(found, value), (strategy, name)

    on_ranks(saves)


def test_PY07_safetensors_both_ways(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    expected, _ = whole_run(2, 2)

    def exchanges(rank):
        for strategy, model, _ in trained(2):
            state = {name.removeprefix("module."): value.contiguous().clone() for name, value in model.state_dict().items()}
            file = tmp_path / f"{strategy}.safetensors"
            if rank == 0:
                safetensors.save_file(state, file)
            dist.barrier()
            loaded = safetensors.load_file(file)
            fresh, _ = STRATEGIES[strategy](models.make("gpt"), None, None)
            fresh.load_state_dict(named(strategy, loaded) if strategy in PREFIXED else loaded)
            for name, value in expected.state_dict().items():
                assert torch.equal(loaded[name], value), (strategy, name)
            inside = fresh.module if hasattr(fresh, "module") else fresh
            for parameter, one in zip(inside.parameters(), expected.parameters(), strict=True):
                assert torch.equal(parameter.detach(), one.detach()), strategy
            # By C++ too, which knows a tied parameter by its first name.
            other = models.make("gpt")
            shoal.checkpoint.load_module(file, other, partial=True)
            assert all(torch.equal(a, b) for a, b in zip(other.parameters(), expected.parameters(), strict=True))

    on_ranks(exchanges)


@pytest.mark.parametrize("transport", ["host", "gloo"])
def test_PY07_numpy_is_never_stale(transport):
    from test_wrappers import group_over

    def reads(rank):
        for strategy, wrap in STRATEGIES.items():
            net = models.make("gpt")
            views = {name: parameter.detach().numpy() for name, parameter in net.named_parameters()}
            model, optimizer = wrap(net, group_over(transport), None)
            one = models.make("gpt")
            alone = models.adamw(one.parameters())
            for step in range(2):
                losses_of(model, optimizer, "gpt", steps=1)
                train_alone(one, alone, steps=1)
                for (name, parameter), other in zip(net.named_parameters(), one.parameters(), strict=True):
                    assert (parameter.detach().numpy() == other.detach().numpy()).all(), (strategy, step, name)
            assert views.keys() == dict(net.named_parameters()).keys()

    on_ranks(reads)
