"""Join: ranks with different numbers of batches."""

import pytest
import torch
import torch.distributed.algorithms

import models
import shoal
from loops import assert_same_parameters
from ranks import on_ranks
from test_wrappers import STRATEGIES, group_over


def batches_of(rank):
    """Rank 0 has four batches, rank 1 has two, rank 2 has three, and rank 3 has none."""
    return (4, 2, 3, 0)[rank]


def joined_alone(divide_by_all, ranks):
    """One process that takes what all ranks have."""
    net = models.make("gpt")
    optimizer = models.adamw(net.parameters())
    for step in range(4):
        takes = [rank for rank in range(ranks) if step < batches_of(rank)]
        for rank in takes:
            x, y = models.batch("gpt", step, rank)
            (models.loss_of(net(x), y) / (ranks if divide_by_all else len(takes))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


@pytest.mark.parametrize(("ranks", "transport"), [(1, "host"), (2, "host"), (2, "gloo"), (3, "host"), (4, "host")])
def test_PY05_join_with_different_numbers_of_batches(ranks, transport):
    expected = {divide: [p.detach() for p in joined_alone(divide, ranks).parameters()] for divide in (True, False)}

    def trains(rank):
        group = group_over(transport)
        for strategy, wrap in STRATEGIES.items():
            for divide in (True, False):
                net = models.make("gpt")
                model, optimizer = wrap(net, group, None)
                joined = optimizer if strategy == "megatron" else model
                batches = iter([models.batch("gpt", step, rank) for step in range(batches_of(rank))])
                with shoal.Join(joined, divide_by_initial_world_size=divide) as join:
                    batch = next(batches, None)
                    while join.next(batch is not None):
                        if join.active:
                            models.loss_of(model(batch[0]), batch[1]).backward()
                            batch = next(batches, None)
                        else:
                            assert 0 < join.active_ranks < ranks
                            join.shadow()
                        optimizer.step()
                        optimizer.zero_grad()
                assert_same_parameters(net, expected[divide], strategy)

    on_ranks(trains, ranks)


def test_PY05_join_ends_early_or_refuses():
    def trains(rank):
        model, _ = STRATEGIES["ddp"](models.make("gpt"), None, None)
        with shoal.Join(model, throw_on_early_termination=True) as join:
            assert join.next(True)
            models.loss_of(model(models.batch("gpt", 0, rank)[0]), models.batch("gpt", 0, rank)[1]).backward()
            with pytest.raises(shoal.InputsExhausted):
                join.next(rank == 0)
        with pytest.raises(shoal.UsageError, match="within `with shoal.Join"):
            shoal.Join(model).next(True)
        with pytest.raises(shoal.UsageError, match=r"Join\(Linear\): give wrappers"):
            shoal.Join(torch.nn.Linear(2, 2))
        decentralised = shoal.nn.DecentralizedDataParallel(torch.nn.Linear(2, 2), lambda p: torch.optim.SGD(p, lr=0.1))
        with pytest.raises(shoal.UsageError, match="do not wait for each other"):
            shoal.Join(decentralised)
        with pytest.raises(shoal.UsageError, match=r"use shoal.Join\(model\), a loop"):
            torch.distributed.algorithms.Join([model])
        synced = shoal.nn.SyncBatchNorm.convert_sync_batchnorm(models.make("cnn"))
        with pytest.raises(shoal.UsageError, match="SyncBatchNorm, whose forward communicates"):
            shoal.Join(shoal.nn.DistributedDataParallel(synced))

    on_ranks(trains)


class Counts(torch.nn.Module):
    """Replaces its buffer in forward."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen = self.seen + x.sum()
        return self.net(x)


def test_PY05_buffers_that_forward_replaces_are_handed_out_at_the_end():
    def joins(rank):
        net = Counts()
        model = shoal.nn.DistributedDataParallel(net)
        left = (1, 3)[rank]
        with shoal.Join(model) as join:
            while join.next(left > 0):
                if join.active:
                    model(torch.ones(1, 2)).sum().backward()
                    left -= 1
                else:
                    join.shadow()
        return net.seen.item()

    assert on_ranks(joins) == [6, 6]

    def averages(rank):
        net = Counts()
        model = shoal.nn.DecentralizedDataParallel(net, torch.optim.SGD, lr=0.1, average_buffers=True)
        for _ in range(2):
            model(torch.full((1, 2), rank + 1.0)).sum().backward()
        model.global_avg()
        return net.seen.item()

    assert on_ranks(averages) == [6, 6]
