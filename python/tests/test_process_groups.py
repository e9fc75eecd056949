"""PY01: process groups of torch.distributed: of some ranks, of one rank, made again, under its debug level DETAIL."""

import pytest
import torch
import torch.distributed as dist

import shoal
from ranks import on_ranks


def test_PY01_subgroups_destroy_and_again():
    def run(rank):
        for _ in range(3):
            evens, odds = dist.new_group([0, 2]), dist.new_group([1, 3])
            own = odds if rank % 2 else evens
            tensor = torch.tensor([float(rank)])
            dist.all_reduce(tensor, group=own)
            assert tensor.item() == (4 if rank % 2 else 2)
            # The members of a group that is made without the others.
            pair = dist.new_group([0, 1], use_local_synchronization=True) if rank < 2 else None
            if pair is not None:
                dist.broadcast(tensor, src=1, group=pair)
                assert tensor.item() == 4
                dist.destroy_process_group(pair)
            dist.barrier()
            dist.destroy_process_group(own)
        dist.destroy_process_group()
        store = dist.FileStore(run.store, 4)
        for _ in range(2):
            dist.init_process_group("cpu:shoal", store=store, rank=rank, world_size=4)
            tensor = torch.ones(3)
            dist.all_reduce(tensor)
            assert tensor.sum() == 12
            dist.destroy_process_group()

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        run.store = folder + "/again"
        on_ranks(run, ranks=4)


def test_PY01_one_rank():
    def run(rank):
        tensor = torch.arange(3.0)
        dist.all_reduce(tensor)
        outputs = [torch.empty(3)]
        dist.all_gather(outputs, tensor)
        dist.barrier()
        assert outputs[0].tolist() == [0, 1, 2]
        with pytest.raises(shoal.UsageError, match="nobody to receive from"):
            dist.recv(tensor)

    on_ranks(run, ranks=1)


def test_PY01_debug_detail(monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")

    def run(rank):
        dist.set_debug_level_from_env()
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=dist.new_group([0, 1]))
        assert tensor.tolist() == [2, 2] and shoal.distributed.group_of(dist.group.WORLD).size == 2

    on_ranks(run)
