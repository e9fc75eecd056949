"""Every strategy around unmodified modules trains as one process does (PY05)."""

import functools
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


# Activation checkpointing and autocast, for all models and strategies: each pair over one transport, each of either over both.
KINDS = {
    "host": [(None, False), (None, True), ("plain", False), ("reentrant", True)],
    "gloo": [(None, False), ("plain", True), ("reentrant", False)],
}


def matrix(transport):
    """Model, activation checkpointing, autocast."""
    return [(name, *kind) for name in models.MODELS for kind in KINDS[transport]]


@pytest.mark.parametrize(("ranks", "transport"), [(1, "host"), (2, "host"), (2, "gloo"), (3, "host"), (3, "gloo")])
def test_PY05_losses_equal_those_of_one_process(ranks, transport):
    cases = matrix(transport) if ranks == 2 else [(name, None, False) for name in models.MODELS]
    alone = {(name, autocast): losses_alone(name, ranks, autocast) for name, _, autocast in cases}

    def trains(rank):
        group = group_over(transport)
        for name, kind, autocast in cases:
            expected = alone[name, autocast]
            assert sum(expected[-4:]) < sum(expected[:4])
            for strategy, wrap in STRATEGIES.items():
                model, optimizer = wrap(models.make(name, kind), group, kind)
                # What ranks, transports, checkpointing and autocast do differently shows in each step; that all learn, once.
                steps = STEPS if (ranks, transport, kind, autocast) == (2, "host", None, False) else 5
                losses = losses_of(model, optimizer, name, autocast, steps)
                worst = max(abs(a - b) for a, b in zip(losses, expected[:steps], strict=True))
                assert worst < 1e-6, (strategy, name, kind, autocast, worst)

    on_ranks(trains, ranks, timeout=200)
