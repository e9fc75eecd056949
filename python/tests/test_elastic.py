"""ELA01, ELA05: ranks of a Python program die, and the others go on."""

import os
import signal
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

import shoal
from elastic_loop import (
    DyingAdamW,
    EPOCHS,
    Moment,
    SAMPLES,
    STRATEGIES,
    X,
    Y,
    distance,
    flat,
    loss_of,
    make_net,
    make_optimizer,
    replay,
    sgd,
    train,
    trained_alone,
)
from ranks import Ranks

PLACES = ["forward", "backward", "computed", "update", "in update", "updated", "between", "evaluation"]


# Under DDP a rank's update is its own; under local SGD what the victim has trained since the last exchange is lost, so that no
# one process does the same.
NOT_HERE = {"ddp": ["in update"], "local_sgd": ["update", "in update", "updated"]}
# Rank 0 and another one in turns: each strategy and each place has both. tests/elastic has all of them for C++.
DEATHS = [
    (name, 2 * ((number + place) % 2), where)
    for number, name in enumerate(STRATEGIES)
    for place, where in enumerate(PLACES)
    if where not in NOT_HERE.get(name, ())
]


@pytest.mark.parametrize(("strategy", "victim", "where"), DEATHS)
def test_ELA01_a_rank_of_a_python_program_dies(strategy, victim, where, tmp_path):
    died_at = 0 if where in ("between", "evaluation") else 2

    def run(rank):
        seen = []
        end = Moment(rank, victim, where, died_at)
        nets, arrays = [], []

        def wrap(net):
            nets.append(net)
            return STRATEGIES[strategy](net)

        def moment(place, at):
            if (place, at, victim) == ("forward", 1, 2):  # as where another process evaluates
                for parameter in nets[0].parameters():
                    parameter.share_memory_()
                    arrays.append(parameter.detach().numpy())
            if (place, at) == ("forward", 2):
                assert all(np.isfinite(array).all() for array in arrays)
            if (place, at) == (end.where, end.step):
                torch.save(seen, tmp_path / "victim")
            if (place, at, where, rank) == ("update", died_at, "in update", victim):
                torch.save(seen, tmp_path / "victim")
                DyingAdamW.dies_after = 0
            end(place, at)

        return train(moment, seen, wrap), seen, dist.get_rank(), dist.get_world_size()

    outcomes = Ranks(run, ranks=3).outcomes(timeout=60)
    assert outcomes[victim][1] == "exit code -9"
    left = [rank for rank in range(3) if rank != victim]
    for number, rank in enumerate(left):
        assert outcomes[rank][0], outcomes[rank]
        parameters, _, at_end, size = outcomes[rank][1]
        assert (at_end, size) == (number, 2)
        assert parameters == outcomes[left[0]][1][0]
    steps = {}
    # Others never get what the victim's backward would have given, and a sharded step needs the victim in its commit.
    undone = where in ("forward", "backward") or (where == "computed" and strategy != "ddp")
    for seen in [torch.load(tmp_path / "victim")[: -1 if undone else None], *(outcomes[rank][1][1] for rank in left)]:
        for epoch, step, indices in seen:
            steps.setdefault((epoch, step), []).append(indices)
    optimizer_of = sgd if strategy == "local_sgd" else make_optimizer
    for epoch in range(EPOCHS):
        taken = sorted(index for (at, _), parts in steps.items() if at == epoch for part in parts for index in part)
        assert taken == list(range(SAMPLES))
    assert distance(outcomes[left[0]][1][0], replay([steps[key] for key in sorted(steps)], optimizer_of)) < 1e-12


@pytest.mark.parametrize(
    ("strategy", "victim", "where"),
    [("fsdp", 0, "backward"), ("fsdp", 1, "update"), ("megatron", 0, "updated"), ("zero1", 1, "updated")],
)
def test_ELA04_shards_over_sockets_have_second_owners(strategy, victim, where):
    def run(rank):
        seen, changes = [], []
        end = Moment(rank, victim, where, 3)
        net = train(end, seen, STRATEGIES[strategy], on_change=changes.append)
        return net, seen, dist.get_world_size(), [(change.step, change.finished_step) for change in changes]

    tcp = shoal.distributed.Options(transport="tcp")
    outcomes = Ranks(run, ranks=3, init={"pg_options": tcp}).outcomes(timeout=60)
    assert outcomes[victim][1] == "exit code -9"
    left = [rank for rank in range(3) if rank != victim]
    for rank in left:
        assert outcomes[rank][0], outcomes[rank]
        assert outcomes[rank][1][2] == 2
        assert outcomes[rank][1][0] == outcomes[left[0]][1][0]
        if where == "updated":  # the others are sending each other what they have updated
            assert outcomes[rank][1][3] == [(4, True)]


@pytest.mark.parametrize(("where", "victim"), [("forward", 1), ("backward", 0), ("evaluation", 1)])
def test_ELA04_a_rank_dies_while_the_others_gather_units(where, victim):
    """What an operator throws there has passed through PyTorch's bindings before Elastic sees it."""

    def make():
        torch.manual_seed(0)
        layers = [torch.nn.Linear(6, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 1)]
        return torch.nn.Sequential(*layers).double()

    def run(rank):
        net, now = make(), ["nowhere"]
        model = shoal.nn.FullyShardedDataParallel(net, auto_wrap_policy=torch.nn.Linear, unit_limit=2, prefetch_units=0)
        optimizer = shoal.optim.FullyShardedOptimizer(model, torch.optim.AdamW, lr=1e-2)
        elastic = shoal.Elastic(model, optimizer, on_change=lambda change: None)

        def come_by(module, inputs, output):
            end = Moment(rank, victim, where, 1)
            end(now[0], elastic.steps)
            if output.requires_grad:
                output.register_hook(lambda gradient: end("backward", elastic.steps))

        net[1].register_forward_hook(come_by)

        def evaluate():
            now[0] = "evaluation"
            with torch.no_grad():
                total = loss_of(model(X), Y)
            dist.all_reduce(total)
            return total.item() / dist.get_world_size()

        while elastic.steps < 3:
            now[0] = "forward"
            if elastic.step(1, lambda: loss_of(model(X), Y).backward(), optimizer.step):
                optimizer.zero_grad()
            assert elastic.together(evaluate) > 0
        return elastic.together(lambda: flat(model)), dist.get_world_size()

    tcp = shoal.distributed.Options(transport="tcp")
    outcomes = Ranks(run, ranks=3, init={"pg_options": tcp}).outcomes(timeout=60)
    assert outcomes[victim][1] == "exit code -9"
    net = trained_alone(3, make)
    for rank in {0, 1, 2} - {victim}:
        assert outcomes[rank][0], outcomes[rank]
        assert outcomes[rank][1][1] == 2
        assert distance(outcomes[rank][1][0], flat(net)) < 1e-12


def test_ELA05_a_python_program_keeps_the_global_batch():
    def losses_of(victims):
        def run(rank):
            seen = []
            moments = [Moment(rank, victim, where, step) for victim, where, step in victims]

            def moment(place, at):
                for one in moments:
                    one(place, at)

            parameters = train(moment, seen, keep_global_batch=16, batch_slices=4)
            return parameters, seen

        return Ranks(run, ranks=4).outcomes(timeout=60)

    calm = losses_of([])
    stormy = losses_of([(1, "forward", 1), (0, "computed", 3), (3, "updated", 4)])
    assert [outcome[0] for outcome in stormy] == [False, False, True, False]
    assert distance(stormy[2][1][0], calm[2][1][0]) < 1e-12
    assert [each[1] for each in stormy[2][1][1]] == list(range(6))


def test_ELA01_torch_distributed_is_that_of_the_ranks_that_are_left():
    def run(rank):
        changes = []
        net = make_net()
        model = shoal.nn.DistributedDataParallel(net)
        elastic = shoal.Elastic(model, make_optimizer(net), on_change=changes.append)
        former = dist.group.WORLD
        pair = dist.new_group([0, 2])
        if rank == 1:
            time.sleep(0.3)  # until the others have made the group
            os.kill(os.getpid(), signal.SIGKILL)
        assert not elastic.step(1, lambda: loss_of(model(X), Y).backward(), lambda: None) and elastic.steps == 0
        assert [str(change).split(";")[0] for change in changes] == ["rank 1 has ended"]
        assert (changes[0].lost, changes[0].ranks, changes[0].generation) == ([1], 2, elastic.generation)
        assert (dist.get_rank(), dist.get_world_size()) == (0 if rank == 0 else 1, 2)
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2, 2, 2]
        found = [None, None]
        dist.all_gather_object(found, rank)
        assert found == [0, 2]
        again = dist.new_group([0, 1])
        dist.all_reduce(tensor, group=again)
        assert tensor.tolist() == [4, 4, 4]
        for old in (former, pair):
            with pytest.raises((shoal.CommError, ValueError)):
                dist.all_reduce(tensor, group=old)
        return "went on"

    outcomes = Ranks(run, ranks=3).outcomes(timeout=60)
    assert [outcomes[0][1], outcomes[2][1]] == ["went on"] * 2, outcomes
