"""Every strategy around unmodified modules trains as one process does (PY05)."""

import functools
import itertools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import models
import shoal
from ranks import on_ranks

RATES = {"lr": 3e-3, "weight_decay": 0.1}
STEPS = 20


def group_over(transport):
    """The ranks of the default process group over another transport."""
    if transport == "host":
        return None
    store = dist.PrefixStore(transport, dist.distributed_c10d._get_default_store())
    return shoal._C.join_world(store, dist.get_rank(), dist.get_world_size(), timedelta(seconds=60), transport)


def ddp(net, group, kind):
    model = shoal.nn.DistributedDataParallel(net, group, static_graph=kind == "reentrant")
    return model, torch.optim.AdamW(net.parameters(), **RATES)


def zero1(net, group, kind):
    optimizer = shoal.optim.OSS(net.parameters(), torch.optim.AdamW, group, **RATES)
    return shoal.nn.DistributedDataParallel(net, group, static_graph=kind == "reentrant"), optimizer


def zero2(net, group, kind):
    optimizer = shoal.optim.OSS(net.parameters(), torch.optim.AdamW, group, **RATES)
    return shoal.nn.ShardedDataParallel(net, optimizer, group), optimizer


def megatron(net, group, kind):
    return net, shoal.optim.DistributedOptimizer(net, torch.optim.AdamW, group, **RATES)


def fsdp(net, group, kind):
    policy = models.Block if isinstance(net, models.Gpt) else None
    model = shoal.nn.FullyShardedDataParallel(net, group, auto_wrap_policy=policy)
    return model, shoal.optim.FullyShardedOptimizer(model, torch.optim.AdamW, **RATES)


STRATEGIES = {"ddp": ddp, "zero1": zero1, "zero2": zero2, "megatron": megatron, "fsdp": fsdp}


def mean_loss(loss):
    total = loss.detach().double().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


@functools.cache
def losses_alone(name, ranks, autocast):
    return models.losses_alone(name, ranks, STEPS, autocast=autocast)[0]


def losses_of(model, optimizer, name, autocast=False, steps=STEPS, schedule=None):
    losses = []
    for step in range(steps):
        x, y = models.batch(name, step, dist.get_rank())
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = models.loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        if schedule:
            schedule.step()
        optimizer.zero_grad()
        losses.append(mean_loss(loss))
    return losses


# Model, activation checkpointing, autocast.
MATRIX = [*itertools.product(models.MODELS, (None, "plain", "reentrant"), (False, True))]


@pytest.mark.parametrize(("ranks", "transport"), [(1, "host"), (2, "host"), (2, "gloo"), (3, "host"), (3, "gloo")])
def test_PY05_losses_equal_those_of_one_process(ranks, transport):
    cases = [(name, None, False) for name in models.MODELS]
    if ranks == 2:  # what modules do under autocast does not depend on the transport
        cases = [case for case in MATRIX if transport == "host" or case[1] is None or not case[2]]
    alone = {(name, autocast): losses_alone(name, ranks, autocast) for name, _, autocast in cases}

    def trains(rank):
        group = group_over(transport)
        for name, kind, autocast in cases:
            expected = alone[name, autocast]
            assert sum(expected[-4:]) < sum(expected[:4])
            for strategy, wrap in STRATEGIES.items():
                model, optimizer = wrap(models.make(name, kind), group, kind)
                # What checkpointing or autocast does differently shows in each step; that all learn, in the plain model.
                steps = 5 if kind or autocast else STEPS
                losses = losses_of(model, optimizer, name, autocast, steps)
                worst = max(abs(a - b) for a, b in zip(losses, expected[:steps], strict=True))
                assert worst < 1e-6, (strategy, name, kind, autocast, worst)

    on_ranks(trains, ranks, timeout=200)
