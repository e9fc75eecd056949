"""Strategies whose ranks differ between exchanges: LocalUpdates and DecentralizedDataParallel."""

import functools
import gc

import pytest
import torch
import torch.distributed as dist

import models
import shoal
from ranks import on_ranks
from test_wrappers import RATES, group_over, losses_of, matrix, mean_loss


def equal_on_ranks(net):
    different = torch.zeros(1)
    for parameter in net.parameters():
        first = parameter.detach().clone()
        dist.broadcast(first, 0)
        different += not torch.equal(first, parameter)
    dist.all_reduce(different)
    return different.item() == 0


@functools.cache
def simulated(strategy, name, autocast, steps):
    """Mean losses of the ranks' models, all in one process, which become their mean when the strategy says so."""
    nets = [models.make(name) for _ in range(2)]
    optimizers = [torch.optim.AdamW(net.parameters(), **RATES) for net in nets]

    @torch.no_grad()
    def average():
        for parameters in zip(*(net.parameters() for net in nets), strict=True):
            mean = sum(parameters) / 2
            for parameter in parameters:
                parameter.copy_(mean)

    losses = []
    for step in range(steps):
        total = 0.0
        for rank, net in enumerate(nets):
            x, y = models.batch(name, step, rank)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = models.loss_of(net(x), y)
            loss.backward()
            total += loss.item() / 2
        if strategy == "decentralized":  # the values that were published after the last step
            average()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if strategy == "shard_gossip" or (strategy == "local_updates" and step % 3 == 2):
            average()
        losses.append(total)
    return losses


def local_updates(net, group):
    return net, shoal.optim.LocalUpdates(net, torch.optim.AdamW(net.parameters(), **RATES), group, every=3)


def decentralized(net, group):
    model = shoal.nn.DecentralizedDataParallel(net, torch.optim.AdamW, group, topology="complete", **RATES)
    return model, model.optimizer


def shard_gossip(net, group):
    inside, across = shoal.distributed.host_groups(group, size=1)
    model = shoal.nn.FullyShardedDataParallel(net, inside, auto_wrap_policy=models.Block if isinstance(net, models.Gpt) else None)
    options = {"topology": "complete", "overlap": False}
    return model, shoal.optim.ShardGossipOptimizer(model, across, torch.optim.AdamW, **options, **RATES)


# As STRATEGIES.
LOCAL = {wrap.__name__: lambda net, group, kind, wrap=wrap: wrap(net, group) for wrap in (local_updates, decentralized, shard_gossip)}


@pytest.mark.parametrize("transport", ["host", "gloo"])
@pytest.mark.parametrize("wrap", [local_updates, decentralized, shard_gossip])
def test_PY05_losses_equal_a_simulation_in_one_process(wrap, transport):
    strategy, steps = wrap.__name__, 8
    expected = {(name, autocast): simulated(strategy, name, autocast, steps) for name, _, autocast in matrix(transport)}

    def trains(rank):
        group = group_over(transport)
        for name, kind, autocast in matrix(transport):
            model, optimizer = wrap(models.make(name, kind), group)
            run = 5 if kind else steps  # the ranks' models have met once
            losses = losses_of(model, optimizer, name, autocast, run)
            worst = max(abs(a - b) for a, b in zip(losses, expected[name, autocast][:run], strict=True))
            assert worst < 1e-6, (name, kind, autocast, worst)

    on_ranks(trains)


def test_PY05_local_updates_average_every_so_many_steps():
    def trains(rank):
        net, own = models.make("gpt"), models.make("gpt")
        inner = torch.optim.AdamW(net.parameters(), **RATES)
        optimizer = shoal.optim.LocalUpdates(net, inner, every=3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        alone = torch.optim.AdamW(own.parameters(), **RATES)
        alone_schedule = torch.optim.lr_scheduler.StepLR(alone, 1, 0.9)
        for step in range(3):
            for model, opt, rates in ((net, optimizer, schedule), (own, alone, alone_schedule)):
                x, y = models.batch("gpt", step, rank)
                models.loss_of(model(x), y).backward()
                opt.step()
                rates.step()
                opt.zero_grad()
            if step < 2:
                assert not equal_on_ranks(net)
                assert all(torch.equal(a, b) for a, b in zip(net.parameters(), own.parameters(), strict=True))
        assert equal_on_ranks(net)
        for parameter, mine in zip(net.parameters(), own.parameters(), strict=True):
            mean = mine.detach().clone()
            dist.all_reduce(mean)
            torch.testing.assert_close(parameter.detach(), mean / 2, rtol=0, atol=1e-7)
        assert optimizer.steps() == 3 and inner.param_groups[0]["lr"] == pytest.approx(3e-3 * 0.9**3)

    on_ranks(trains)


@pytest.mark.parametrize("outer", [shoal.optim.SlowMo(), shoal.optim.OuterNesterov()])
def test_PY05_local_updates_with_an_outer_optimizer_learn(outer):
    def trains(rank):
        net = models.make("lstm")
        optimizer = shoal.optim.LocalUpdates(net, models.adamw(net.parameters()), every=4, outer=outer, fragments=2)
        losses = losses_of(net, optimizer, "lstm", steps=24)
        assert sum(losses[-4:]) < sum(losses[:4])
        own = [parameter.detach().clone() for parameter in net.parameters()]
        with optimizer.mean_parameters():
            assert equal_on_ranks(net)
        assert all(torch.equal(a, b) for a, b in zip(own, net.parameters(), strict=True))
        with pytest.raises(shoal.UsageError, match="shoal.checkpoint"):
            optimizer.state_dict()

    on_ranks(trains)


def test_PY05_decentralized_training_learns_and_agrees():
    def trains(rank):
        net = models.make("gpt")
        model = shoal.nn.DecentralizedDataParallel(net, torch.optim.AdamW, topology="complete", **RATES)
        schedule = torch.optim.lr_scheduler.StepLR(model.optimizer, 12, 0.1)
        losses = []
        for step in range(20):
            x, y = models.batch("gpt", step, rank)
            loss = models.loss_of(model(x), y)
            loss.backward()
            model.optimizer.step()
            schedule.step()
            model.optimizer.zero_grad()
            losses.append(mean_loss(loss))
        assert sum(losses[-4:]) < sum(losses[:4])
        assert 0 < model.consensus_distance() < 1
        model.global_avg()
        assert equal_on_ranks(net) and model.consensus_distance() == 0

    on_ranks(trains)


def test_DEC01_the_norm_before_clipping_is_this_ranks():
    def trains(rank):
        net = torch.nn.Linear(2, 1)
        model = shoal.nn.DecentralizedDataParallel(net, torch.optim.SGD, topology="ring", clip_grad=1.0, lr=0.1)
        model(torch.full((1, 2), 2.0 * (rank + 1))).sum().backward()
        return model.last_norm()

    assert on_ranks(trains) == [pytest.approx(3.0), pytest.approx(33**0.5)]


def test_PY05_decentralized_rates_follow_schedules():
    def trains(rank):
        net = models.make("gpt")
        model = shoal.nn.DecentralizedDataParallel(net, torch.optim.SGD, lr=0.1)
        for group in model.optimizer.param_groups:
            group["lr"] = 0.0
        before = [parameter.detach().clone() for parameter in net.parameters()]
        for step in range(3):
            x, y = models.batch("gpt", step, rank)
            models.loss_of(model(x), y).backward()
        assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))

    on_ranks(trains)


# A rate that a schedule sets counts when backward updates, whoever runs forward.
@pytest.mark.parametrize("inside", [False, True])
def test_DEC03_rates_are_those_of_the_update(inside):
    def trains(rank):
        net = torch.nn.Linear(3, 1)
        model = shoal.nn.DecentralizedDataParallel(net, torch.optim.SGD, topology="complete", lr=0.1)
        before = None
        for step in range(4):
            loss = (model.module if inside else model)(torch.ones(2, 3)).sum()
            if step == 2:
                model.optimizer.param_groups[0]["lr"] = 0.0
                before = [parameter.detach().clone() for parameter in net.parameters()]
            loss.backward()
        for parameter, value in zip(net.parameters(), before, strict=True):
            torch.testing.assert_close(parameter.detach(), value)

    on_ranks(trains)


def test_PY05_gradients_of_local_updates_may_be_set_to_zero():
    def trains(rank):
        def losses(local):
            torch.manual_seed(0)
            net = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 2), "b": torch.nn.Linear(3, 2)})
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
            if local:
                optimizer = shoal.optim.LocalUpdates(net, optimizer, every=1)
            for step in range(4):
                x = torch.ones(4, 3)
                (net["a"](x) + (net["b"](x) if step == 0 else 0)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)  # so that b keeps its momentum
            return [parameter.detach() for parameter in net.parameters()]

        for value, expected in zip(losses(True), losses(False), strict=True):
            torch.testing.assert_close(value, expected)

    on_ranks(trains)


def test_DDP18_gradients_of_some_parameters_alone_are_not_dropped_without_a_word():
    """As DINO keeps its last layer for an epoch: dropped before step(), and zero_grad() follows."""

    def trains(rank):
        for act in (lambda one: setattr(one, "grad", None), lambda one: one.grad.zero_()):
            net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
            model = shoal.nn.DecentralizedDataParallel(net, torch.optim.SGD, topology="complete", lr=0.1)

            def closure(model=model):
                model.optimizer.zero_grad()
                loss = model(torch.ones(1, 2)).sum()
                loss.backward()
                return loss

            for part in (net, net[:0], net):  # all, or none
                closure()
                for parameter in part.parameters():
                    act(parameter)
                model.optimizer.step()
            assert model.optimizer.step(closure).shape == ()
            for parameter in net[1].parameters():
                act(parameter)
            with pytest.raises(shoal.UsageError, match="parameter 1.weight was zeroed or dropped.*freeze it before"):
                model.optimizer.step()

    on_ranks(trains)


def test_DEC01_a_parameter_that_no_group_has_is_named_unless_it_is_frozen():
    def wraps(rank):
        net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        with pytest.raises(shoal.UsageError, match="no param group has 1.weight, 1.bias.*nothing would train it.*freeze it"):
            shoal.nn.DecentralizedDataParallel(net, torch.optim.SGD, params=net[0].parameters(), lr=0.1)
        net[1].requires_grad_(False)
        shoal.nn.DecentralizedDataParallel(net, torch.optim.SGD, params=net[0].parameters(), lr=0.1)

    on_ranks(wraps)


def test_DEC01_an_optimizer_whose_wrapper_is_gone_says_so():
    def steps(rank):
        net = torch.nn.Linear(2, 1)
        optimizer = shoal.nn.DecentralizedDataParallel(net, torch.optim.SGD, lr=0.1).optimizer
        gc.collect()
        net(torch.ones(1, 2)).sum().backward()
        with pytest.raises(shoal.UsageError, match="wrapper of this optimizer is gone.*keep the wrapper"):
            optimizer.step()

    on_ranks(steps)


def test_DEC01_a_parameter_that_is_not_the_modules_is_named():
    def wraps(rank):
        net, weight = torch.nn.Linear(2, 1), torch.nn.Parameter(torch.ones(3))
        groups = [{"params": net.parameters()}, {"params": [weight], "lr": 1.0}]
        with pytest.raises(shoal.UsageError, match=r"a parameter \[3\] of param group 1 is not one of the module.*an optimizer of its own"):
            shoal.nn.DecentralizedDataParallel(net, torch.optim.SGD, params=groups, lr=0.1)

    on_ranks(wraps)
