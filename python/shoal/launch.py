"""Ranks from inside a program, such as a notebook. Programs of their own are started with `shoal launch` or torchrun."""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ._C import UsageError

Result = TypeVar("Result")
_fork = multiprocessing.get_context("fork")
_GRACE = 10.0  # seconds in which the others name a rank that failed, and end
_PR_SET_PDEATHSIG = 1


def notebook_launcher(function: Callable[..., Result], args: Sequence[Any] = (), num_processes: int = 2) -> list[Result]:
    """Calls function(*args) on num_processes new ranks of this host and returns what it returns, pickled, by rank.

    init_process_group("shoal") in the function finds the others. The processes are forks of this one, so that the function may
    be one of a notebook, and of one thread each, since threads of OpenMP do not survive a fork. If a rank raises or ends, the
    others end, too, and a RuntimeError names the first one. None of them outlives this process.
    """
    if num_processes < 1:
        raise UsageError(f"notebook_launcher: num_processes {num_processes} must be positive")
    if dist.is_initialized():
        raise UsageError("notebook_launcher: this process has a process group; call destroy_process_group() before")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ranks = [_Rank(rank, num_processes, listener, function, args) for rank in range(num_processes)]
        try:
            # After the forks: a child would keep the locks that a thread of the store holds at that moment.
            store = dist.TCPStore(
                "127.0.0.1", listener.getsockname()[1], is_master=True, wait_for_workers=False, master_listen_fd=listener.fileno()
            )
            listener.detach()  # the store's now
            _wait(ranks)
            del store
        finally:
            for rank in ranks:
                rank.end()
    failed = [rank for rank in ranks if rank.error]
    if failed:
        first = min(failed, key=lambda rank: rank.ended)
        raise RuntimeError(f"rank {first.number} of {num_processes} {first.error}")
    return [rank.result for rank in ranks]


def _signal_in_words(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:  # real-time signals have no names
        return f"signal {number}"


class _Rank:
    """One rank's process."""

    def __init__(self, number: int, ranks: int, listener: socket.socket, function: Callable[..., Any], args: Sequence[Any]) -> None:
        self.number = number
        self.ended = 0.0
        self.error = ""
        self.result: Any = None
        self._pipe, theirs = _fork.Pipe(duplex=False)
        self._process = _fork.Process(target=_main, args=(number, ranks, listener, os.getpid(), function, args, theirs))
        self._process.start()
        theirs.close()

    @property
    def running(self) -> bool:
        """Whether it has not told how it ended."""
        return self.ended == 0.0

    @property
    def pipe(self) -> multiprocessing.connection.Connection:
        """Has something to read once the rank has ended."""
        return self._pipe

    def hear(self) -> None:
        """Takes what it returned or raised."""
        try:
            self.error, self.result = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):  # the second, if it ended while it wrote
            self._process.join()
            code = self._process.exitcode or 0
            self.error = f"was ended by {_signal_in_words(-code)}" if code < 0 else f"ended with exit code {code}"
        self.ended = time.monotonic()

    def end(self) -> None:
        """Ends its process, if it has not ended by itself."""
        if not self.running:
            self._process.join(_GRACE)
        self._process.kill()
        self._process.join()


def _wait(ranks: list[_Rank]) -> None:
    deadline: float | None = None
    while waiting := [rank for rank in ranks if rank.running]:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = multiprocessing.connection.wait([rank.pipe for rank in waiting], left)
        if not ready:
            return
        for rank in waiting:
            if rank.pipe in ready:
                rank.hear()
                if rank.error and deadline is None:
                    deadline = time.monotonic() + _GRACE


def _main(
    number: int,
    ranks: int,
    listener: socket.socket,
    parent: int,
    function: Callable[..., Any],
    args: Sequence[Any],
    pipe: multiprocessing.connection.Connection,
) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(1)
    port = listener.getsockname()[1]
    listener.close()
    place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    torch.set_num_threads(1)
    try:
        answer = pickle.dumps(("", function(*args)))  # plainly: PyTorch would send a tensor as a file of this process
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        answer = pickle.dumps((f"raised:\n{traceback.format_exc()}", None))
    pipe.send_bytes(answer)
    pipe.close()
