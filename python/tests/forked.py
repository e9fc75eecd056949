"""Python programs as `python PROGRAM ARGUMENTS` runs them, in processes forked from this one: what they import that this
process has imported costs them nothing. Tests of launchers and of imports themselves start real interpreters instead."""

import gc
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import time

import torch

import shoal  # noqa: F401

torch.set_num_threads(1)
gc.freeze()  # or each collection in a forked process looks at, and copies, all that was imported
_fork = multiprocessing.get_context("fork")


def _main(arguments, environment, output):
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = (open(descriptor, "w", buffering=1, closefd=False) for descriptor in (1, 2))  # pytest's before
    os.environ.clear()
    os.environ.update(environment)
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        sys.path.insert(0, os.path.dirname(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


def run_all(programs, timeout=100):
    """Runs [(arguments, environment)], all at once: (exit codes, what they printed). Exit code None: killed at the timeout."""
    with tempfile.TemporaryFile() as output:
        processes = []
        for arguments, environment in programs:
            arguments = [str(each) for each in arguments]
            processes.append(_fork.Process(target=_main, args=(arguments, environment, output.fileno())))
            processes[-1].start()
        deadline, codes = time.monotonic() + timeout, []
        for process in processes:
            process.join(max(0, deadline - time.monotonic()))
            codes.append(process.exitcode)
        for process in processes:
            process.kill()
            process.join()
        output.seek(0)
        return codes, output.read().decode(errors="replace")


def run_as_torchrun(*arguments, ranks=2, timeout=280):
    """What `torchrun --standalone --nproc-per-node=RANKS ARGUMENTS` prints, by processes with the variables that it sets."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "forked"}
    place |= {f"{kind}WORLD_SIZE": str(ranks) for kind in ("", "LOCAL_", "ROLE_")}
    own = [{f"{kind}RANK": str(rank) for kind in ("", "LOCAL_", "ROLE_")} for rank in range(ranks)]
    codes, said = run_all([(arguments, {**os.environ, **place, **each}) for each in own], timeout)
    assert codes == [0] * ranks, f"exit codes {codes}\n{said}"
    return said
