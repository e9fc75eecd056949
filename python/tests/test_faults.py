"""PY04: Ctrl-C, killed ranks and late ranks."""

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import shoal
from ranks import Ranks, errors_on_ranks, on_ranks

WAITS = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(5)),
    "recv": lambda: dist.recv(torch.ones(5), src=0),
    "async wait": lambda: dist.all_reduce(torch.ones(5), async_op=True).wait(),
    "barrier": lambda: dist.barrier(),
    "new group": lambda: dist.new_group([0, 1], use_local_synchronization=True),
}


def seconds_until_interrupted(wait):
    """Time from Ctrl-C to the end of the wait."""
    signalled = []

    def press():
        signalled.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(1, press).start()
    with pytest.raises(KeyboardInterrupt):
        wait()
    return time.monotonic() - signalled[0]


def require_interrupted_at_once(wait, **ranks):
    """wait(): on rank 1, where rank 0 does nothing for 3 s."""

    def run(rank):
        return time.sleep(3) if rank == 0 else seconds_until_interrupted(wait)

    outcomes = Ranks(run, **ranks).outcomes(timeout=20)
    assert outcomes[1][0], outcomes[1]
    assert outcomes[1][1] < 0.3


@pytest.mark.parametrize("name", WAITS)
def test_PY04_ctrl_c_ends_a_wait(name):
    require_interrupted_at_once(WAITS[name])


def test_PY04_ctrl_c_ends_the_wait_at_the_end_of_summon_full_params():
    def run(rank):
        model = shoal.nn.FullyShardedDataParallel(torch.nn.Linear(4, 4))

        def summon():
            with model.summon_full_params(writeback=False):
                time.sleep(0 if rank == 1 else 3)

        return seconds_until_interrupted(summon) if rank == 1 else summon()

    outcomes = Ranks(run).outcomes(timeout=20)
    assert outcomes[1][0] and outcomes[1][1] < 0.3, outcomes[1]


def test_PY04_ctrl_c_ends_the_wait_at_the_end_of_mean_parameters_of_shard_gossip():
    def run(rank):
        inside, across = shoal.distributed.host_groups()
        model = shoal.nn.FullyShardedDataParallel(torch.nn.Linear(4, 4), inside)
        optimizer = shoal.optim.ShardGossipOptimizer(model, across, torch.optim.SGD, lr=0.1)

        def evaluate():
            with optimizer.mean_parameters():
                time.sleep(0 if rank == 1 else 3)

        return seconds_until_interrupted(evaluate) if rank == 1 else evaluate()

    outcomes = Ranks(run).outcomes(timeout=20)
    assert outcomes[1][0] and outcomes[1][1] < 0.3, outcomes[1]


@pytest.mark.parametrize("transport", ["tcp", "gloo"])
def test_PY04_ctrl_c_ends_the_wait_for_a_new_group(transport):
    options = shoal.distributed.Options(transport=transport)
    require_interrupted_at_once(WAITS["new group"], init={"pg_options": options})


def test_PY04_ctrl_c_ends_the_wait_for_ranks_that_have_not_come(tmp_path):
    def begin():
        dist.init_process_group("shoal", init_method=f"file://{tmp_path}/store", rank=1, world_size=2)

    require_interrupted_at_once(begin, without_group=True)


def test_PY04_a_wait_leaves_the_interpreter_free():
    def run(rank):
        counted = [0]

        def count():
            while counted[0] >= 0:
                counted[0] += 1
                time.sleep(0.001)

        if rank == 0:
            time.sleep(1)
        else:
            threading.Thread(target=count, daemon=True).start()
        dist.all_reduce(torch.ones(3))
        seen, counted[0] = counted[0], -10
        return seen

    assert on_ranks(run)[1] > 200


def test_PY04_a_killed_rank_is_named_on_all_others():
    def run(rank):
        dist.all_reduce(torch.ones(3))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        try:
            dist.all_reduce(torch.ones(3))
        except shoal.CommError as error:
            return str(error), time.monotonic() - begin, error.rank
        return "no error", 0, -1

    outcomes = Ranks(run, ranks=3).outcomes(timeout=30)
    assert outcomes[1][1] == "exit code -9"
    for rank in (0, 2):
        text, seconds, culprit = outcomes[rank][1]
        assert "rank 1 (pid" in text and "is gone" in text, text
        assert seconds < 3 and culprit == 1


def test_PY04_what_fails_in_an_operator_or_a_backward_is_an_error_of_shoal():
    """PyTorch's bindings, which call them, know RuntimeError only."""

    tcp = shoal.distributed.Options(transport="tcp")

    def run(rank):
        x = torch.ones(4, 8)

        def units():
            net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
            options = {"auto_wrap_policy": torch.nn.Linear, "unit_limit": 2, "prefetch_units": 0}
            return net, shoal.nn.FullyShardedDataParallel(net, dist.new_group([0, 1]), **options)

        (net, forwards), (_, backwards), read, read_by_name = units(), units(), units(), units()
        sharded = backwards(x).sum()
        normalised = shoal.nn.SyncBatchNorm(8)(x * torch.rand(4, 8)).sum()
        ours = shoal.nn.DistributedDataParallel(torch.nn.Linear(8, 8), dist.new_group([0, 1]))
        replicated = ours(x).sum()
        theirs = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8), process_group=dist.new_group([0, 1]))
        of_pytorch = theirs(x).sum()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        calls = {
            "forward": lambda: forwards(x),
            "backward": sharded.backward,
            "backward of SyncBatchNorm": normalised.backward,
            "backward of DistributedDataParallel": replicated.backward,
            "an operator": lambda: read[0][2].weight.clone(),
            "one by its name": lambda: torch.ops.aten.mm(x, read_by_name[0][2].weight),
        }
        for call in calls.values():
            with pytest.raises(shoal.CommError, match="is gone") as raised:
                call()
            assert raised.value.rank == 1
        with pytest.raises(shoal.CommError, match="is gone"):
            of_pytorch.backward()
        with pytest.raises(shoal.UsageError, match="takes the parameters of 4 units at once"):
            torch._foreach_norm(list(net.parameters()))
        return "all of them"

    outcomes = Ranks(run, init={"pg_options": tcp}).outcomes(timeout=60)
    assert outcomes[0][1] == "all of them", outcomes[0]


def test_PY04_a_late_rank_is_named_after_the_timeout():
    def run(rank):
        if rank == 1:
            time.sleep(4)
        else:
            dist.all_reduce(torch.ones(3))

    errors = errors_on_ranks(run, timeout=30, init={"timeout": timedelta(seconds=2)})
    assert errors[0].startswith("CommError: not finished within the timeout of 2 s"), errors
    assert "rank(s) 1 have not called it" in errors[0]


def test_PY04_a_group_has_a_timeout_of_its_own():
    def run(rank):
        group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
        if rank == 1:
            time.sleep(2.5)
            return None
        begin = time.monotonic()
        with pytest.raises(shoal.CommError, match="not finished within the timeout of 1 s"):
            dist.all_reduce(torch.ones(3), group=group)
        return time.monotonic() - begin

    assert on_ranks(run)[0] < 2


@pytest.mark.parametrize("transport", ["auto", "tcp", "gloo"])
def test_PY04_a_group_that_a_rank_does_not_make_ends_after_its_own_timeout(transport):
    def run(rank):
        if rank == 1:
            time.sleep(4)
            return None
        begin = time.monotonic()
        with pytest.raises(shoal.CommError, match="within 1 s"):
            dist.new_group([0, 1], timeout=timedelta(seconds=1), use_local_synchronization=True)
        return time.monotonic() - begin

    assert on_ranks(run, init={"pg_options": shoal.distributed.Options(transport=transport)})[0] < 3


def test_PY04_a_group_whose_timeout_is_no_time_is_refused_on_all_ranks():
    def run(rank):
        for timeout in (timedelta(0), timedelta.max):  # PyTorch makes a negative number of the longest
            with pytest.raises(shoal.UsageError, match="must be at least 1 ms, and below 290,000 years"):
                dist.new_group([0, 1], timeout=timeout)
        dist.barrier()

    on_ranks(run)


def test_PY04_a_wait_with_a_limit_may_be_repeated():
    def run(rank):
        tensor = torch.ones(3)
        if rank == 1:
            time.sleep(1)
        work = dist.all_reduce(tensor, async_op=True)
        if rank == 0:
            with pytest.raises(shoal.CommError, match="within 0.2 s, the limit of this wait; it goes on"):
                work.wait(timedelta(seconds=0.2))
        work.wait()
        assert tensor.tolist() == [2, 2, 2]

    on_ranks(run)


def test_PY04_a_group_can_be_made_again_after_a_failure(tmp_path):
    def run(rank):
        with pytest.raises(shoal.DisagreeError):
            dist.all_reduce(torch.ones(3 + rank))
        with pytest.raises(shoal.CommError, match="cannot be used after an earlier failure"):
            dist.all_reduce(torch.ones(3))
        dist.destroy_process_group()
        dist.init_process_group("shoal", init_method=f"file://{tmp_path}/again", rank=rank, world_size=2)
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2, 2, 2]

    on_ranks(run)
