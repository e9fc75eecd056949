"""Strategies whose ranks differ between exchanges: LocalUpdates and DecentralizedDataParallel."""

import pytest
import torch
import torch.distributed as dist

import models
import shoal
from ranks import on_ranks
from test_wrappers import RATES, losses_of, mean_loss


def equal_on_ranks(net):
    different = torch.zeros(1)
    for parameter in net.parameters():
        first = parameter.detach().clone()
        dist.broadcast(first, 0)
        different += not torch.equal(first, parameter)
    dist.all_reduce(different)
    return different.item() == 0


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
