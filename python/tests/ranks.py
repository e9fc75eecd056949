"""Ranks for tests: processes forked from this one, which has imported what takes long to import."""

import gc
import multiprocessing
import os
import tempfile
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

import shoal

torch.set_num_threads(1)
gc.freeze()  # or each collection in a forked process looks at, and copies, all that was imported
_fork = multiprocessing.get_context("fork")


class Failed(Exception):
    """What a rank raised, or how it ended."""


def _child(function, rank, ranks, store, init, pipe):
    try:
        torch.manual_seed(rank)
        if init is not None:
            options = {"timeout": timedelta(seconds=60), **init}
            dist.init_process_group(
                options.pop("backend", "shoal"), init_method="file://" + store, rank=rank, world_size=ranks, **options
            )
        result = (True, function(rank))
        if init is not None and dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as error:  # of any kind: the test decides
        result = (False, f"{type(error).__name__}: {error}", traceback.format_exc())
    pipe.send(result)
    pipe.close()


class Ranks:
    """Running ranks. init: further arguments of init_process_group; None: the function makes its groups itself."""

    def __init__(self, function, ranks=2, init=None, without_group=False):
        self._folder = tempfile.TemporaryDirectory()
        self.store = os.path.join(self._folder.name, "store")
        self._pipes, self.processes = [], []
        for rank in range(ranks):
            ours, theirs = _fork.Pipe(duplex=False)
            arguments = (function, rank, ranks, self.store, None if without_group else init or {}, theirs)
            process = _fork.Process(target=_child, args=arguments)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def outcomes(self, timeout=60):
        """Per rank (True, result) or (False, error, traceback); (False, "exit code N", "") if it was killed."""
        deadline = time.monotonic() + timeout
        found = []
        for process, pipe in zip(self.processes, self._pipes):
            if pipe.poll(max(0, deadline - time.monotonic())):
                try:
                    found.append(pipe.recv())
                    process.join(max(1, deadline - time.monotonic()))
                    if process.exitcode is None:
                        found[-1] = (False, "its process does not end", found[-1][-1])
                except EOFError:
                    process.join(5)
                    found.append((False, f"exit code {process.exitcode}", ""))
            else:
                found.append((False, f"no answer within {timeout} s", ""))
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()
        return found


def on_ranks(function, ranks=2, timeout=60, init=None):
    """The results of function(rank) by rank, in processes of one process group. Failed if a rank raises."""
    outcomes = Ranks(function, ranks, init).outcomes(timeout)
    bad = [f"rank {rank}: {outcome[1]}\n{outcome[2]}" for rank, outcome in enumerate(outcomes) if not outcome[0]]
    if bad:
        raise Failed("\n".join(bad))
    return [outcome[1] for outcome in outcomes]


def errors_on_ranks(function, ranks=2, timeout=60, init=None):
    """The errors of function(rank) by rank, as "Class: text"; None for a rank that raises nothing."""
    return [None if outcome[0] else outcome[1] for outcome in Ranks(function, ranks, init).outcomes(timeout)]
