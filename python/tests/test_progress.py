"""PY02: operations end whether or not somebody waits for them, and waiting costs no processor time."""

import gc
import os
import time

import pytest
import torch
import torch.distributed as dist

from ranks import on_ranks


def eventually(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.mark.parametrize("numel", [1, 3_000_000])
def test_PY02_a_message_arrives_although_its_sender_waits_for_something_else(numel):
    def run(rank):
        store = dist.distributed_c10d._get_default_store()
        if rank == 0:
            work = dist.isend(torch.full((numel,), 3.0), dst=1)
            store.get("received")
            eventually(work.is_completed)
        else:
            tensor = torch.empty(numel)
            dist.recv(tensor, src=0)
            store.set("received", "1")
            assert bool((tensor == 3).all())

    on_ranks(run)


def test_PY02_a_collective_ends_although_one_rank_does_not_wait():
    def run(rank):
        tensor = torch.full((2_000_000,), rank + 1.0)
        work = dist.all_reduce(tensor, async_op=True)
        if rank == 0:
            time.sleep(1)
        else:
            begin = time.monotonic()
            work.wait()
            assert time.monotonic() - begin < 0.9
        work.wait()
        assert bool((tensor == 3).all())

    on_ranks(run)


def test_PY02_handles_may_be_dropped():
    def run(rank):
        tensors = [torch.ones(20000) for _ in range(50)]
        for tensor in tensors:
            dist.all_reduce(tensor, async_op=True)
        # Their tensors may be dropped, too.
        for _ in range(50):
            dist.all_reduce(torch.ones(20000), async_op=True)
        gc.collect()
        dist.barrier()
        eventually(lambda: all(bool((each == 2).all()) for each in tensors))

    on_ranks(run)


def test_PY02_futures_complete_and_call_back():
    def run(rank):
        seen = []
        works = [dist.all_reduce(torch.full((5,), float(i)), async_op=True) for i in range(40)]
        for work in works:
            work.get_future().then(lambda f: seen.append(f.value()[0][0].item()))
        del works
        eventually(lambda: len(seen) == 40)
        assert sorted(seen) == [2.0 * i for i in range(40)]

    on_ranks(run)


def test_PY02_an_idle_rank_uses_no_processor_time():
    def run(rank):
        dist.barrier()
        tensor = torch.ones(10)
        work = dist.irecv(tensor, src=0) if rank else None
        if rank:
            work.get_future()
        begin = os.times()
        time.sleep(2)
        now = os.times()
        used = now.user + now.system - begin.user - begin.system
        if rank == 0:
            dist.send(tensor, dst=1)
        else:
            work.wait()
        return used

    for used in on_ranks(run):
        assert used < 0.1


def test_PY02_a_rank_may_end_right_after_its_last_message():
    def run(rank):
        if rank == 1:
            dist.send(torch.full((300001,), 2.0), dst=0)
            return
        time.sleep(1.5)
        received = torch.empty(300001)
        dist.recv(received, src=1)
        assert bool((received == 2).all())

    on_ranks(run)
