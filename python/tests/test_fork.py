"""PY03: processes forked from a rank."""

import os
import signal

import torch
import torch.distributed as dist

import shoal
from ranks import on_ranks


def in_child(function):
    """What function() returns in a forked child, as text; the child ends without cleaning up after the parent."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            text = str(function())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    assert os.waitpid(child, 0)[1] == 0, text
    return text


def test_PY03_a_child_that_communicates_gets_one_sentence():
    def run(rank):
        dist.all_reduce(torch.ones(2))
        text = in_child(lambda: dist.all_reduce(torch.ones(2)))
        assert text.startswith("UsageError: group 'world' belongs to process " + str(os.getpid())), text
        assert "not in a DataLoader's workers" in text
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2, 2]

    on_ranks(run)


def test_PY03_a_child_that_destroys_the_group_harms_nobody():
    def run(rank):
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        shared = backend.allocate_tensor(100000, dtype=torch.float32, device=torch.device("cpu"))
        shared.fill_(rank + 1.0)
        works = [dist.all_reduce(torch.ones(300000), async_op=True) for _ in range(5)]

        def destroy():
            nonlocal shared, works, backend
            works.clear()
            shared = backend = None
            dist.destroy_process_group()
            return "destroyed"

        assert in_child(destroy) == "destroyed"
        for work in works:
            work.wait()
        dist.all_reduce(shared)
        assert bool((shared == 3).all())

    on_ranks(run)


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.tensor([float(index) ** 2])


def test_PY03_dataloader_workers_forked_during_an_operation():
    def run(rank):
        for _ in range(3):
            works = [dist.all_reduce(torch.ones(500000), async_op=True) for _ in range(4)]
            loader = torch.utils.data.DataLoader(Squares(), batch_size=8, num_workers=2)
            total = sum(batch.sum() for batch in loader)
            assert total == sum(i * i for i in range(64))
            for work in works:
                work.wait()
            dist.all_reduce(total)
        assert shoal.distributed.group_of().size == 2

    on_ranks(run)
