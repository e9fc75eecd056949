"""PY01: every collective of torch.distributed on CPU tensors."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import shoal
from ranks import Ranks, on_ranks

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64]


def values(rank, numel=6, dtype=torch.float32):
    return (torch.arange(numel) % 5 + rank + 1).to(dtype)


def test_PY01_collectives_of_equal_parts():
    def run(rank):
        size = dist.get_world_size()
        for dtype in DTYPES:
            for numel in (1, 6, 70001):
                own = [values(r, numel, dtype) for r in range(size)]
                summed = sum(own)
                tensor = own[rank].clone()
                dist.all_reduce(tensor)
                assert torch.equal(tensor, summed)
                tensor = own[rank].clone()
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
                assert torch.equal(tensor, own[-1])
                tensor = own[rank].clone()
                dist.reduce(tensor, dst=1)
                assert rank != 1 or torch.equal(tensor, summed)
                tensor = own[rank].clone()
                dist.broadcast(tensor, src=2)
                assert torch.equal(tensor, own[2])
                outputs = [torch.empty_like(own[0]) for _ in own]
                dist.all_gather(outputs, own[rank])
                assert all(map(torch.equal, outputs, own))
                whole = torch.empty(size * numel, dtype=dtype)
                dist.all_gather_into_tensor(whole, own[rank])
                assert torch.equal(whole, torch.cat(own))
                outputs = [torch.empty_like(own[0]) for _ in own] if rank == 0 else None
                dist.gather(own[rank], outputs, dst=0)
                assert rank != 0 or all(map(torch.equal, outputs, own))
                output = torch.empty_like(own[0])
                dist.scatter(output, own if rank == 1 else None, src=1)
                assert torch.equal(output, own[rank])
                dist.reduce_scatter(output, [own[rank] + part for part in range(size)])
                assert torch.equal(output, summed + size * rank)
                dist.reduce_scatter_tensor(output, torch.cat([own[rank]] * size))
                assert torch.equal(output, summed)
                received = torch.empty(size * numel, dtype=dtype)
                dist.all_to_all_single(received, torch.cat([own[rank] + to for to in range(size)]))
                assert torch.equal(received, torch.cat([each + rank for each in own]))
        flags = torch.tensor([rank == 0, False])
        dist.all_reduce(flags, op=dist.ReduceOp.BOR)
        assert flags.tolist() == [True, False]

    on_ranks(run, ranks=3)


def test_PY01_parts_of_unequal_sizes():
    def run(rank):
        size = dist.get_world_size()
        length = lambda r: 3 * r + (100000 if r == 1 else 0)
        outputs = [torch.empty(length(r)) for r in range(size)]
        dist.all_gather(outputs, torch.full((length(rank),), float(rank)))
        assert all(bool((each == r).all()) for r, each in enumerate(outputs))
        # Rank r sends i + r rows to rank i.
        rows = [to + rank for to in range(size)]
        sent = torch.full((sum(rows), 2), float(rank))
        received = torch.empty(sum(rows), 2)
        dist.all_to_all_single(received, sent, rows, rows)
        assert received.tolist() == torch.cat([torch.full((n, 2), float(r)) for r, n in enumerate(rows)]).tolist()
        lists = [torch.empty(n, 2) for n in rows]
        dist.all_to_all(lists, list(sent.split(rows)))
        assert all(bool((each == r).all()) for r, each in enumerate(lists))
        # Equal parts, which only one rank writes down.
        sent, received = torch.arange(6.0) + 10 * rank, torch.empty(6)
        dist.all_to_all_single(received, sent, *([[2] * 3] * 2 if rank == 1 else []))
        assert received.tolist() == [10.0 * r + 2 * rank + i for r in range(3) for i in range(2)]

    on_ranks(run, ranks=3)


def test_PY01_tensors_of_inference_mode_may_be_strided():
    def run(rank):
        with torch.inference_mode():
            tensor = torch.full((3, 2), float(rank + 1)).t()
            work = dist.all_reduce(tensor, async_op=True)
            one = torch.full((4,), rank + 1)[::2]
            mean = dist.all_reduce(one, op=dist.ReduceOp.AVG, async_op=True)
            whole = torch.empty(2, 4).t()
            gathered = dist.all_gather_into_tensor(whole, torch.full((2, 2), float(rank)), async_op=True)
            time.sleep(0.3)  # another thread ends them
            for each in (work, mean, gathered):
                each.wait()
            assert tensor.tolist() == [[3.0] * 3] * 2
            assert one.tolist() == [1, 1]
            assert whole.tolist() == [[0.0] * 2] * 2 + [[1.0] * 2] * 2

    on_ranks(run, ranks=2)


def test_PY01_a_timeout_may_be_for_ever():
    ended = Ranks(lambda rank: dist.barrier(), 2, {"timeout": timedelta(days=1000000)}).outcomes()
    assert all(outcome[0] for outcome in ended), ended


def test_PY01_a_call_that_is_empty_on_one_rank_is_refused_on_both():
    def run(rank):
        seen, loss = torch.ones(rank), torch.ones(1)
        with pytest.raises(shoal.DisagreeError, match=r"all_reduce\(sum, 0 x Float\).*all_reduce\(sum, 1 x Float\)"):
            dist.all_reduce(seen)
            dist.all_reduce(loss)

    on_ranks(run, ranks=2)


def test_PY01_every_part_of_a_scatter_or_gather_has_the_size_of_the_tensor():
    def run(rank):
        parts = [torch.ones(3), torch.ones(1)]
        if rank == 0:
            with pytest.raises(shoal.UsageError, match="as large as"):
                dist.scatter(torch.zeros(3), parts, src=0)
            with pytest.raises(shoal.UsageError, match="as large as"):
                dist.gather(torch.zeros(3), parts, dst=0)
        dist.barrier()

    on_ranks(run, ranks=2)


def test_PY01_tensors_of_any_strides():
    def run(rank):
        size = dist.get_world_size()
        # Rank 0's tensor is laid out in another order than the others': elements are matched by index.
        base = torch.arange(20.0).view(4, 5)
        tensor = base.t().contiguous().t() if rank == 0 else base.clone()
        dist.all_reduce(tensor)
        assert torch.equal(tensor, size * base)
        wide = torch.zeros(4, 10)
        dist.broadcast(wide[:, ::2] if rank else wide[:, ::2].copy_(base), src=0)
        assert torch.equal(wide[:, ::2], base) and bool((wide[:, 1::2] == 0).all())
        outputs = [torch.zeros(5, 4).t() for _ in range(size)]
        dist.all_gather(outputs, (base + rank).t().contiguous().t())
        assert all(torch.equal(each, base + r) for r, each in enumerate(outputs))
        scalar = torch.tensor(float(rank))
        dist.all_reduce(scalar)
        assert scalar.item() == sum(range(size))
        turned = torch.tensor([1 - 1j]) * (rank == 0)
        dist.broadcast(turned, src=0)
        assert turned.item() == 1 - 1j
        parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
        dist.broadcast(parameter, src=1)
        assert parameter.tolist() == [1.0] * 3

    on_ranks(run, ranks=3)


def test_PY01_coalesced_forms_and_async_handles():
    def run(rank):
        size = dist.get_world_size()
        tensors = [torch.full((n,), rank + 1.0) for n in (3, 5000, 1)]
        with dist._coalescing_manager():
            for tensor in tensors:
                dist.all_reduce(tensor)
        assert all(bool((t == 6).all()) for t in tensors)
        wholes = [torch.empty(size * n) for n in (2, 7)]
        with dist._coalescing_manager(async_ops=True) as manager:
            for whole, n in zip(wholes, (2, 7)):
                dist.all_gather_into_tensor(whole, torch.full((n,), float(rank)))
        manager.wait()
        assert wholes[1].tolist() == [float(r) for r in range(size) for _ in range(7)]
        works = [dist.all_reduce(torch.ones(50000), async_op=True) for _ in range(30)]
        for work in reversed(works):
            work.wait()
            assert work.is_completed() and work.is_success() and bool((work.result()[0] == size).all())
        future = dist.all_reduce(torch.ones(4), async_op=True).get_future().then(lambda f: f.value()[0].sum().item())
        assert future.wait() == 4 * size

    on_ranks(run, ranks=3)


def test_PY01_messages():
    def run(rank):
        big = 300001
        if rank == 0:
            dist.send(torch.arange(4.0), dst=1, tag=7)
            dist.isend(torch.full((big,), 2.0), dst=1).wait()
        elif rank == 1:
            second, first = torch.empty(big), torch.empty(4)
            later = dist.irecv(second, src=0)
            assert dist.recv(first, src=0, tag=7) == 0
            later.wait()
            assert first.tolist() == [0, 1, 2, 3] and bool((second == 2).all())
        # From any source, of any size, to a rank that does not know who sends.
        if rank == 2:
            senders = []
            for _ in range(4):
                tensor = torch.empty(big)
                sender = dist.recv(tensor)
                assert bool((tensor == sender).all())
                senders.append(sender)
            assert sorted(senders) == [0, 0, 1, 1]
        else:
            for _ in range(2):
                dist.send(torch.full((big,), float(rank)), dst=2)
        dist.barrier()  # or a receive from any source might take rank 1's next message before rank 0's last ones
        ops = [
            dist.P2POp(dist.isend, torch.full((3,), float(rank)), (rank + 1) % 3),
            dist.P2POp(dist.irecv, received := torch.empty(3), (rank + 2) % 3),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert received.tolist() == [(rank + 2) % 3] * 3

    on_ranks(run, ranks=3)


def test_PY01_sparse_sum():
    def run(rank):
        tensor = torch.sparse_coo_tensor([[rank, 3]], torch.tensor([[1.0, 2.0], [10.0, 20.0]]), (5, 2))
        dist.all_reduce(tensor)
        assert tensor.to_dense().tolist() == [[1, 2], [1, 2], [0, 0], [20, 40], [0, 0]]

    on_ranks(run)


def test_PY01_sparse_tensors_of_different_sizes_are_refused_on_all_ranks():
    def run(rank):
        tensor = torch.sparse_coo_tensor([[0, 3 + rank]], torch.ones(2, 2), (4 + rank, 2))
        with pytest.raises(shoal.DisagreeError, match=r"rank 0 has Float \[4, 2\].*rank 1 has Float \[5, 2\]"):
            dist.all_reduce(tensor)
        assert tensor.shape == (4 + rank, 2)
        dist.all_reduce(tensor := torch.eye(2).to_sparse())
        assert tensor.to_dense().tolist() == [[2, 0], [0, 2]]

    on_ranks(run)


def test_PY01_the_mean_of_sparse_tensors_of_different_dtypes_is_refused_on_all_ranks():
    def run(rank):
        own = torch.ones(2, dtype=(torch.float16, torch.float32)[rank]).to_sparse()
        with pytest.raises(shoal.DisagreeError, match=r"rank 0 has Half \[2\].*rank 1 has Float \[2\]"):
            dist.all_reduce(own, op=dist.ReduceOp.AVG)

    on_ranks(run)


def test_PY01_objects():
    def run(rank):
        gathered = [None] * 2
        dist.all_gather_object(gathered, {"rank": rank})
        assert gathered == [{"rank": 0}, {"rank": 1}]
        objects = ["a", 5] if rank == 0 else [None, None]
        dist.broadcast_object_list(objects, src=0)
        assert objects == ["a", 5]

    on_ranks(run)


def test_PY01_the_mean_of_integers_rounds_towards_zero():
    """As NCCL's; Lightning's sync_dist asks for it."""

    def rank(me):
        whole = torch.tensor([[7, -7], [4, 1]])[:, me : me + 1]  # of other strides; the ranks have 7 and -7, 4 and 1
        mine = [whole[0].clone(), whole[1].clone(), whole.clone().repeat(1, 2)[:, ::2]]
        for tensor in mine:
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        part = torch.zeros(1, dtype=torch.int64)
        dist.reduce_scatter(part, [torch.tensor([me]), torch.tensor([-1 - 2 * me])], op=dist.ReduceOp.AVG)
        root = torch.tensor([5 + 2 * me])
        dist.reduce(root, 0, op=dist.ReduceOp.AVG)
        return [tensor.flatten().tolist() for tensor in mine], part.item(), root.item()

    first, second = on_ranks(rank)
    assert first[0] == second[0] == [[0], [2], [0, 2]]
    assert (first[1], second[1]) == (0, -2)
    assert first[2] == 6


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32])
def test_PY01_the_mean_of_large_integers_does_not_overflow(dtype):
    def run(rank):
        largest = torch.iinfo(dtype).max
        own = torch.full((4,), largest - 2 * rank, dtype=dtype)
        mean = [largest - 1] * 4
        for tensor in (own.clone(), own.repeat(2)[::2], own.to_sparse()):
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
            assert tensor.dtype == dtype and tensor.to_dense().tolist() == mean
        dist.reduce(tensor := own.clone(), dst=1, op=dist.ReduceOp.AVG)
        assert rank != 1 or tensor.tolist() == mean
        part = torch.empty(2, dtype=dtype)
        dist.reduce_scatter_tensor(part, own, op=dist.ReduceOp.AVG)
        assert part.tolist() == mean[:2]
        dist.reduce_scatter(part, list(own.split(2)), op=dist.ReduceOp.AVG)
        assert part.tolist() == mean[:2]

    on_ranks(run)


def test_PY01_the_mean_of_large_sparse_numbers_does_not_overflow():
    def run(rank):
        for dtype, largest in ((torch.float16, 60000.0), (torch.bfloat16, 3e38), (torch.float32, 3e38)):
            own = torch.full((2,), largest, dtype=dtype)
            dist.all_reduce(tensor := own.to_sparse(), op=dist.ReduceOp.AVG)
            assert tensor.dtype == dtype and torch.equal(tensor.to_dense(), own)

    on_ranks(run)


def test_PY01_the_mean_of_sparse_integers_rounds_towards_zero():
    def run(rank):
        tensor = torch.sparse_coo_tensor([[0, 1 + rank]], torch.tensor([7 + 2 * rank, -7]), (3,))
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        assert tensor.to_dense().tolist() == [8, -3, -3]

    on_ranks(run)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_PY01_complex_tensors_are_summed(dtype):
    def run(rank):
        size = dist.get_world_size()
        own = [torch.complex(values(r, 6).double(), values(r + 1, 6).double()).to(dtype) for r in range(size)]
        for op, divisor in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, size)):
            expected = sum(own) / divisor
            tensor = own[rank].clone()
            dist.all_reduce(tensor, op=op)
            assert torch.allclose(tensor, expected)
            tensor = own[rank].clone()
            dist.reduce(tensor, dst=1, op=op)
            assert rank != 1 or torch.allclose(tensor, expected)
            part = 6 // size
            output = torch.empty(part, dtype=dtype)
            dist.reduce_scatter_tensor(output, own[rank], op=op)
            assert torch.allclose(output, expected[part * rank : part * (rank + 1)])
            dist.reduce_scatter(output, list(own[rank].chunk(size)), op=op)
            assert torch.allclose(output, expected[part * rank : part * (rank + 1)])
            strided = torch.zeros(12, dtype=dtype)[::2]
            strided.copy_(own[rank])
            dist.reduce(strided, dst=0, op=op)
            assert rank != 0 or torch.allclose(strided, expected)
        with pytest.raises(shoal.UsageError, match="is not defined for Complex"):
            dist.reduce(own[rank].clone(), dst=0, op=dist.ReduceOp.PRODUCT)

    on_ranks(run, ranks=3)


@pytest.mark.parametrize("transport", ["auto", "tcp", "gloo"])
def test_PY01_ranks_that_wait_for_each_other_in_two_groups_are_named(transport):
    def run(rank):
        first, second = dist.new_group(), dist.new_group()
        with pytest.raises(shoal.DisagreeError, match="ranks wait for each other in different groups"):
            dist.all_reduce(torch.ones(4), group=first if rank == 0 else second)

    on_ranks(run, ranks=2, init={"pg_options": shoal.distributed.Options(transport=transport)})


def test_PY01_a_forked_child_that_aborts_its_group_breaks_nothing():
    def run(rank):
        if rank == 0:
            child = os.fork()
            if child == 0:
                dist.group.WORLD._get_backend(torch.device("cpu")).abort()
                os._exit(0)
            os.waitpid(child, 0)
        one = torch.ones(1)
        dist.all_reduce(one)
        assert one.item() == 2

    for transport in ("auto", "tcp"):
        on_ranks(run, ranks=2, init={"pg_options": shoal.distributed.Options(transport=transport)})
