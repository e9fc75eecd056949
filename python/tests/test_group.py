"""The groups behind process groups."""

import os
import subprocess
import sys
import textwrap
import time

import pytest
import torch
import torch.distributed as dist

import shoal
from ranks import Ranks, on_ranks


def test_PY01_the_default_process_group_has_a_group():
    def rank_of(rank):
        group = shoal.distributed.group_of()
        tensor = torch.full((3,), rank + 1.0)
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 1)
        dist.barrier()
        assert shoal.distributed.group_of(dist.group.WORLD).name == group.name
        return group.rank, group.size, group.transport, tensor.tolist()

    assert on_ranks(rank_of) == [(0, 2, "host", [3.0] * 3), (1, 2, "host", [3.0] * 3)]


def test_PY01_a_process_group_of_another_backend_has_none():
    def refused(rank):
        with pytest.raises(shoal.UsageError, match='has backend "gloo" for CPU tensors'):
            shoal.distributed.group_of(dist.new_group(backend="gloo"))
        dist.barrier()  # Gloo's rank that ends here would take along the one that is still connecting

    on_ranks(refused)


def test_PY01_without_a_process_group_the_error_says_what_to_call():
    with pytest.raises(shoal.UsageError, match='call torch.distributed.init_process_group\\("shoal"\\) first'):
        shoal.distributed.group_of()


def test_PY01_a_file_store_of_the_program_outlives_its_process_groups(tmp_path):
    """A FileStore counts the stores that end, and removes its file after as many as there are ranks."""
    path = str(tmp_path / "store")

    def meets(rank):
        store = dist.FileStore(path, 2)
        for again in range(3):
            dist.init_process_group("shoal", store=dist.PrefixStore(str(again), store), rank=rank, world_size=2)
            dist.barrier()
            dist.destroy_process_group()
            time.sleep(0.3)  # the group's own use of the store ends in a thread
            assert os.path.exists(path)
        store.set(f"from {rank}", "here")
        assert store.get(f"from {1 - rank}") == b"here"

    outcomes = Ranks(meets, without_group=True).outcomes()
    assert all(outcome[0] for outcome in outcomes), outcomes


def test_PY01_a_rank_that_exits_at_once_has_finished_with_its_file_store(tmp_path):
    """A rank that exits while a thread of it ends the store leaves half an entry, where the others read without an end."""

    def leaves(rank):
        dist.init_process_group("shoal", init_method=f"file://{tmp_path}/{again}", rank=rank, world_size=3)
        dist.barrier()
        dist.destroy_process_group()
        os._exit(0)

    for again in range(5):
        codes = [outcome[1] for outcome in Ranks(leaves, ranks=3, without_group=True).outcomes()]
        assert all("exit code 0" in code for code in codes), codes
        left = tmp_path / str(again)  # the last rank removes it, unless two end at once
        assert not left.exists() or left.read_bytes().endswith(b"refcount/\x01\0\0\x000")


def test_PY08_ranks_of_torchrun_meet(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(
        textwrap.dedent(
            """
            import torch, torch.distributed as dist, shoal
            dist.init_process_group("shoal")
            tensor = torch.ones(4)
            dist.all_reduce(tensor)
            dist.barrier()
            line = f"sum {int(tensor.sum())} {shoal.distributed.group_of().transport}\\n"
            print(line, end="", flush=True)  # one write, so that the ranks' lines stay apart
            dist.destroy_process_group()
            """
        )
    )
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(program)],
        capture_output=True, text=True, timeout=100,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("sum 8 host") == 2
