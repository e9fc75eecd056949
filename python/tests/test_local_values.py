"""Values that programs write, load and show between the exchanges of ranks that train on their own."""

import copy
import io

import pytest
import torch
import torch.distributed as dist

import shoal
from ranks import on_ranks


OUTER = shoal.optim.OuterNesterov(lr=0.7, momentum=0.9)


def diloco_alone(batches, every, steps, between=lambda net, step: None, reset=False):
    """DiLoCo of two ranks in one process; returns the parameters of both."""
    torch.manual_seed(2)
    net = torch.nn.Linear(3, 1).double()
    nets = [net, torch.nn.Linear(3, 1).double()]
    nets[1].load_state_dict(net.state_dict())
    inner = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in nets]
    theta = [parameter.detach().clone() for parameter in net.parameters()]
    momentum = [torch.zeros_like(one) for one in theta]
    for step in range(steps):
        for rank, one in enumerate(nets):
            inner[rank].zero_grad()
            one(batches(step, rank)).square().mean().backward()
            inner[rank].step()
        if (step + 1) % every == 0:
            with torch.no_grad():
                for i, pair in enumerate(zip(*(one.parameters() for one in nets), strict=True)):
                    delta = theta[i] - sum(pair) / 2
                    momentum[i] = OUTER.momentum * momentum[i] + delta
                    theta[i] = theta[i] - OUTER.lr * delta - OUTER.lr * OUTER.momentum * momentum[i]
                    for parameter in pair:
                        parameter.copy_(theta[i])
            if reset:
                for one in inner:
                    one.state.clear()
        for one in nets:
            between(one, step)
    return [[parameter.detach().clone() for parameter in one.parameters()] for one in nets]


def batch_at(step, rank):
    return torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


@torch.no_grad()
def swap_averages_in_and_out(net, step):
    own = {name: value.clone() for name, value in net.state_dict().items()}
    net.load_state_dict({name: value + 1 for name, value in own.items()})
    net.load_state_dict(own)


@torch.no_grad()
def clamp(net, step):
    for parameter in net.parameters():
        parameter.clamp_(-0.3, 0.3)


@torch.no_grad()
def copy_averages_in_and_out(net, step):
    if step == 1:
        own = [parameter.clone() for parameter in net.parameters()]
        for parameter, value in zip(net.parameters(), own, strict=True):
            parameter.add_(1).copy_(value)


@pytest.mark.parametrize(
    ("between", "reset"),
    [
        (lambda net, step: None, False),
        (lambda net, step: None, True),
        (clamp, False),
        (copy_averages_in_and_out, False),
        (swap_averages_in_and_out, False),
    ],
    ids=["nothing", "reset_optimizer", "clamp", "copied averages", "loaded averages"],
)
def test_BEY22_what_programs_write_between_steps_is_local_training(between, reset):
    def trains(rank):
        expected = diloco_alone(batch_at, every=3, steps=8, between=between, reset=reset)[rank]
        torch.manual_seed(2)
        net = torch.nn.Linear(3, 1).double()
        inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        optimizer = shoal.optim.LocalUpdates(net, inner, every=3, outer=OUTER, reset_optimizer=reset)
        for step in range(8):
            optimizer.zero_grad()
            net(batch_at(step, rank)).square().mean().backward()
            optimizer.step()
            between(net, step)
        for parameter, value in zip(net.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.detach(), value, rtol=1e-9, atol=1e-12)

    on_ranks(trains)


def test_BEY22_values_that_are_loaded_replace_the_shared_ones():
    def trains(rank):
        torch.manual_seed(2)
        net = torch.nn.Linear(3, 1).double()
        inner = torch.optim.SGD(net.parameters(), lr=0.0)
        optimizer = shoal.optim.LocalUpdates(net, inner, every=2, outer=OUTER)

        def step():
            net(batch_at(0, rank)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        net.load_state_dict({name: torch.full_like(value, 5 + rank) for name, value in net.state_dict().items()})
        step()
        assert all((parameter == 5.5).all() for parameter in net.parameters()), "the mean of what ranks have loaded"
        step()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(3)
        step()
        assert all((parameter == 3).all() for parameter in net.parameters()), "what all ranks have written"

    on_ranks(trains)


def test_BEY22_a_rate_that_is_a_tensor_stays_the_programs():
    def trains(rank):
        net = torch.nn.Linear(3, 1)
        rate = torch.tensor(0.1)
        optimizer = shoal.optim.LocalUpdates(net, torch.optim.SGD(net.parameters(), lr=rate), every=1)
        for step in range(3):
            if step == 2:
                rate.fill_(0.0)
                before = [parameter.detach().clone() for parameter in net.parameters()]
            net(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.param_groups[0]["lr"] is rate
        for parameter, value in zip(net.parameters(), before, strict=True):
            assert torch.equal(parameter.detach(), value)

    on_ranks(trains)


def test_BEY22_a_step_in_the_scope_of_the_mean_is_an_error():
    def trains(rank):
        net = torch.nn.Linear(3, 1)
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer = shoal.optim.LocalUpdates(net, inner, every=2)
        with pytest.raises(AttributeError, match="inner"):
            optimizer.inner = torch.optim.SGD(net.parameters(), lr=0.2)
        with optimizer.mean_parameters():
            net(torch.ones(2, 3)).sum().backward()
            with pytest.raises(shoal.UsageError, match=r"within a scope of mean_parameters\(\)"):
                optimizer.step()
        optimizer.step()
        assert optimizer.steps() == 1

    on_ranks(trains)


def test_BEY22_checkpoints_in_the_scope_of_the_mean_are_errors_and_have_it_outside(tmp_path):
    def trains(rank):
        net = torch.nn.Linear(3, 1)
        optimizer = shoal.optim.LocalUpdates(net, torch.optim.SGD(net.parameters(), lr=0.1), every=9)
        training = shoal.checkpoint.TrainingState(optimizer)
        (net(torch.ones(2, 3)).sum() * (rank + 1)).backward()
        optimizer.step()
        own = net.weight.detach().clone()
        shoal.checkpoint.save(tmp_path / "run", training, step=1)
        with optimizer.mean_parameters():
            mean = net.weight.detach().clone()
            for use in (
                lambda: shoal.checkpoint.save(tmp_path / "run", training, step=2),
                lambda: shoal.checkpoint.save_async(tmp_path / "run", training, step=2),
                lambda: shoal.checkpoint.load_latest(tmp_path / "run", training),
                lambda: shoal.checkpoint.load(tmp_path / "run", training, model_only=True),
            ):
                with pytest.raises(shoal.UsageError, match=r"checkpoint within a scope of mean_parameters\(\)"):
                    use()
            if rank == 0:
                shoal.checkpoint.save_module(tmp_path / "mean.pt", net)
        assert torch.equal(net.weight, own) and not torch.equal(own, mean)
        for path in (tmp_path / "run", tmp_path / "mean.pt"):
            dist.barrier()
            alone = torch.nn.Linear(3, 1)
            assert shoal.checkpoint.load_module(path, alone).step in (0, 1)
            torch.testing.assert_close(alone.weight.detach(), mean)
        assert shoal.checkpoint.load(tmp_path / "run", training).exact
        assert torch.equal(net.weight, own)

    on_ranks(trains)


def test_DEC01_loaded_values_are_refused_until_they_are_averaged():
    def trains(rank):
        net = torch.nn.Linear(3, 1)
        model = shoal.nn.DecentralizedDataParallel(net, torch.optim.SGD, topology="complete", lr=0.0)
        with pytest.raises(TypeError, match="grad_clip_norm.*clip_grad"):
            shoal.nn.DecentralizedDataParallel(torch.nn.Linear(3, 1), torch.optim.SGD, lr=0.1, grad_clip_norm=1.0)
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()
        copied = copy.deepcopy(net)
        best = {name: torch.full_like(value, 2.0) for name, value in net.state_dict().items()}
        copied.load_state_dict(best)
        torch.save(net, io.BytesIO())
        model(torch.ones(2, 3)).sum().backward()  # a copy of the module tells nobody
        swap_averages_in_and_out(net, 0)
        model(torch.ones(2, 3)).sum().backward()
        net.load_state_dict(best)
        with pytest.raises(shoal.UsageError, match="has been loaded or replaced.*global_avg"):
            model(torch.ones(2, 3)).sum().backward()
        model.global_avg()
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()
        assert all((parameter == 2).all() for parameter in net.parameters())

    on_ranks(trains)
